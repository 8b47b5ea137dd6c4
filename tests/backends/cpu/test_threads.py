"""Torch's number of threads is the user's: changed for a drafter's small operations, restored
after them, also when they raise."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_gguf
import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu import threads
from draftahead.backends.cpu.linear import SmallBatchLinears
from draftahead.backends.cpu.threads import (
    available_cores,
    cpu_quota,
    num_threads,
    torch_all_threads,
    torch_single_threaded,
)
from draftahead.drafters.tree_builder import TreeBuilder
from draftahead.loader import hub
from drafted import ALL
from llama_shaped import llama_shaped, needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """The user's number of threads is 2."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def numbers_set(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that torch is set to."""
    noted: list[int] = []
    set_num_threads = torch.set_num_threads

    def note(number: int) -> None:
        noted.append(number)
        set_num_threads(number)

    monkeypatch.setattr(torch, "set_num_threads", note)
    return noted


@pytest.mark.usefixtures("two_threads")
def test_one_thread_is_for_torch_and_not_for_our_kernels() -> None:
    assert (torch.get_num_threads(), num_threads()) == (2, 2)
    with torch_single_threaded():
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
        with torch_single_threaded():
            assert (torch.get_num_threads(), num_threads()) == (1, 2)
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_number_is_restored_after_an_exception(error: type[BaseException]) -> None:
    with pytest.raises(error), torch_single_threaded(), torch_single_threaded():
        raise error
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


@pytest.mark.usefixtures("two_threads")
def test_a_part_that_takes_all_threads() -> None:
    with torch_all_threads():
        assert (torch.get_num_threads(), num_threads()) == (2, 2)
    with torch_single_threaded():
        with torch_all_threads():
            assert (torch.get_num_threads(), num_threads()) == (2, 2)
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
        with pytest.raises(RuntimeError), torch_all_threads():
            raise RuntimeError
        assert (torch.get_num_threads(), num_threads()) == (1, 2)
    assert (torch.get_num_threads(), num_threads()) == (2, 2)


@pytest.mark.usefixtures("two_threads")
def test_another_python_thread_keeps_its_number() -> None:
    """One that has used torch before."""
    ready, entered, left = threading.Event(), threading.Event(), threading.Event()
    seen: list[tuple[int, int]] = []

    def other() -> None:
        seen.append((torch.get_num_threads(), num_threads()))
        ready.set()
        entered.wait()
        seen.append((torch.get_num_threads(), num_threads()))
        left.set()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    with torch_single_threaded():
        entered.set()
        left.wait()
    thread.join()
    assert seen == [(2, 2)] * 2
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_new_python_thread_has_the_kernels_of_the_others() -> None:
    """torch gives it the number of threads of the process, which is 1 meanwhile."""
    seen: list[int] = []

    def new() -> None:
        seen.append(num_threads())
        with torch_single_threaded():
            seen.append(num_threads())
        seen.append(torch.get_num_threads())

    with torch_single_threaded():
        thread = threading.Thread(target=new)
        thread.start()
        thread.join()
    assert seen == [2, 2, 2]
    assert torch.get_num_threads() == 2


# Drafters whose small operations run in one thread.
@pytest.mark.usefixtures("two_threads", "generous_policy")
@pytest.mark.parametrize("name", ["eagle", "eagle_adaptive", "eagle_tree", "medusa", "medusa_tree"])
@pytest.mark.parametrize("kernels", [True, False])
def test_the_number_is_restored_after_generating(
    name: str, kernels: bool, numbers_set: list[int]
) -> None:
    model = llama_shaped("llama") if kernels else zoo.tiny("llama", dtype=torch.float32)
    llm = LLM(model, ALL[name](model), max_batch=2)
    assert torch.get_num_threads() == 2
    outs = llm.generate(zoo.ragged_prompts(2), GREEDY)
    assert all(out.stats.drafted for out in outs)
    assert 1 in numbers_set
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads", "generous_policy")
def test_the_number_is_restored_when_drafting_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    during: list[int] = []

    def interrupted(*_: Any, **__: Any) -> None:
        during.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(TreeBuilder, "build", interrupted)
    llm = LLM(model, ALL["eagle_adaptive"](model))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(zoo.ragged_prompts(1), GREEDY)
    assert during == [1]
    assert torch.get_num_threads() == 2


@needs_kernels
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("stored", "num_tokens", "expected"), [(True, 64, 1), (True, 65, 2), (False, 64, 2)]
)
def test_the_models_own_forward_takes_all_threads_unless_its_products_are_ours(
    stored: bool, num_tokens: int, expected: int, tmp_path: Path
) -> None:
    """Torch's threads spin for milliseconds after each operation: ours would wait for them.
    A comparison at load was seen to take 5 s so, beside another process."""
    path = tiny_gguf.write(tmp_path / "m.gguf")
    model, _ = hub.load(path, device="cpu", dtype=None if stored else "float32")
    linears, during = SmallBatchLinears(model), list[int]()
    for _ in range(2):
        with linears.torch_threads(num_tokens):
            during.append(torch.get_num_threads())
        with torch_single_threaded(), linears.torch_threads(num_tokens):
            during.append(torch.get_num_threads())
    assert during == [expected] * 4
    assert torch.get_num_threads() == 2


# ------------------------------------------------------------------------- the container's quota

# Files of a container: what /proc/self/cgroup says, and the files of the control groups.
V1 = "12:cpuset:/\n4:cpu,cpuacct:{}\n1:name=systemd:/\n"
QUOTAS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "none": ("0::/", {}, None),
    "version 2, unlimited": ("0::/", {"cpu.max": "max 100000"}, None),
    "version 2": ("0::/", {"cpu.max": "250000 100000"}, 2.5),
    "version 2, of this group": ("0::/a/b", {"a/b/cpu.max": "50000 100000"}, 0.5),
    "version 2, of the group above": (
        "0::/a/b",
        {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"},
        3,
    ),
    "version 2, the least": (
        "0::/a/b",
        {"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 100000"},
        3,
    ),
    "version 2, another group's": ("0::/a", {"b/cpu.max": "50000 100000"}, None),
    "version 1, unlimited": (
        V1.format("/a"),
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
        None,
    ),
    "version 1": (
        V1.format("/a"),
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
        4,
    ),
    "version 1, mounted as cpu": (
        V1.format("/"),
        {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"},
        3,
    ),
    "version 1, named as on the host": (
        V1.format("/docker/0123"),
        {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"},
        1,
    ),
    "both versions": (
        V1.format("/") + "0::/",
        {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"},
        2,
    ),
    "no number": ("0::/", {"cpu.max": "plenty"}, None),
    "nothing": ("", {"cpu.max": "50000 100000"}, None),
}


def a_machine(root: Path, groups: str, files: dict[str, str], siblings: dict[int, str]) -> Path:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    files["proc/self/cgroup"] = groups
    for cpu, text in siblings.items():
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize("kind", QUOTAS)
def test_the_quota_of_a_container_is_read(kind: str, tmp_path: Path) -> None:
    groups, files, expected = QUOTAS[kind]
    assert cpu_quota(a_machine(tmp_path, groups, files, {})) == expected


@pytest.mark.parametrize(
    ("cpus", "siblings", "quota", "expected"),
    [
        (8, {}, None, 8),  # nothing is known of hyper-threads
        (8, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}, None, 4),
        (3, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}, None, 3),
        (8, {}, 2.5, 2),
        (8, {}, 0.25, 1),
        (4, {}, 1.75, 2),
        (4, {}, 16, 4),
    ],
)
def test_available_cores(
    cpus: int,
    siblings: dict[int, str],
    quota: float | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {} if quota is None else {"cpu.max": f"{int(quota * 100000)} 100000"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)
    assert available_cores(a_machine(tmp_path, "0::/", files, siblings)) == expected


@pytest.mark.usefixtures("two_threads")
def test_a_quota_limits_torchs_own_number_and_not_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_torch_default", 2)
    monkeypatch.setattr(threads, "available_cores", lambda: 1)
    assert num_threads() == 1
    with torch_single_threaded():
        assert num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(3)
    assert num_threads() == 3
    with torch_single_threaded():
        assert num_threads() == 3
