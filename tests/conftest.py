"""Shared by all tests. One thread: tiny tensors gain nothing from more, and sums are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zoo
from emulated_gpu import emulated_gpu

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU its tests are not collected."""
    if not torch.cuda.is_available():
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a GPU, for tests of CUDA graphs that need no kernels of ours: a real one, and
    the CPU as an emulated one."""
    if request.param == "cuda":
        yield "cuda"
    else:
        with emulated_gpu():
            yield "cpu"


@pytest.fixture
def generous_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is proposed is verified, whatever it costs: for tests of the result."""
    from draftahead.control import policy

    monkeypatch.setattr(policy.Policy, "width", lambda self, rows: 1 + max(map(len, rows)))
    monkeypatch.setattr(policy.Guard, "closed", lambda self: False)
    # Next to a forward, drafting costs nothing.
    monkeypatch.setattr(policy.Costs, "of", lambda self, rows: 1e6)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The embedded model and its tokenizer, fetched and converted once."""
    from draftahead.loader import hub

    return hub.load("smollm2", device="cpu")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer whose words are w0 to w96, and a chat template."""
    path = tmp_path_factory.mktemp("model")
    zoo.tiny("llama").float().save_pretrained(path)
    zoo.tokenizer().save_pretrained(path)
    return str(path)
