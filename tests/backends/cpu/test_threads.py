"""Torch's number of threads is the user's: changed for a drafter's small operations, restored
after them, also when they raise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu.threads import num_threads, torch_single_threaded
from draftahead.drafters.tree_builder import TreeBuilder
from drafted import ALL
from llama_shaped import llama_shaped

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
