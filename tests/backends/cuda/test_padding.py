"""Batches and numbers of nodes that are rounded up on a GPU, so that few graphs serve all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead.backends.base import DeviceTree
from draftahead.backends.cuda.padding import Padding
from draftahead.kv.cache import KVCache, LayerKVShape
from draftahead.models.runner import ModelRunner
from emulated_gpu import emulated_gpu


@pytest.fixture
def cache() -> KVCache:
    shapes = [LayerKVShape(1, 2, 1, 2)]
    return KVCache(shapes, 20, 32, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("slots", "held", "nodes", "fixed", "padding"),
    [
        (1, 5, 1, False, (0, 0)),
        (1, 5, 5, False, (0, 3)),
        (1, 5, 5, True, (0, 0)),  # a device draft has the nodes that it has
        (1, 5, 65, False, (0, 0)),
        (8, 5, 3, False, (0, 1)),
        (9, 5, 3, False, (7, 1)),
        (17, 5, 3, False, (0, 1)),  # there are only 20 slots
        (1, 24, 5, False, (0, 3)),
        (1, 25, 5, False, (0, 0)),  # 33 entries would be needed
    ],
)
def test_padding(
    cache: KVCache, slots: int, held: int, nodes: int, fixed: bool, padding: tuple[int, int]
) -> None:
    assert Padding.of(cache, 0, [held] * slots, nodes, fixed=fixed) == padding


def test_idle_slots_must_have_entries_left(cache: KVCache) -> None:
    cache.tokens_in[12] = [1] * 30
    assert Padding.of(cache, 0, [5] * 9, 2, fixed=False) == (7, 0)
    assert Padding.of(cache, 0, [5] * 9, 3, fixed=False) == (0, 1)
    assert Padding.of(cache, 4, [5] * 9, 2, fixed=False) == (7, 0)


def test_what_is_padded() -> None:
    padding = Padding(1, 2)
    assert padding.size(2, 3) == (3, 5)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 1]])
    assert padding.tokens(tokens).tolist() == [[5, 6, 7, 0, 0], [8, 9, 1, 0, 0], [0] * 5]
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0]])
    known: Any = padding.parents(parents)
    assert known == [[-1, 0, 1, 0, 0], [-1, 0, 0, 0, 0], [-1, 0, 1, 0, 0]]
    unseen: Any = padding.parents(DeviceTree([5, 8], torch.ones(2, 3, 3)))
    assert unseen.roots == [5, 8, 0]
    assert unseen.trees.tolist() == [[[1.0] * 3] * 3] * 2 + [[[0.0] * 3] * 3]
    assert padding.parents(None) is None
    assert Padding().tokens(tokens) is tokens


@pytest.mark.parametrize(("most", "sizes"), [(8, [8]), (6, [5]), (4, [])])
def test_padding_that_the_backend_does_not_support_is_left_out(
    most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it supports not even so many nodes, the model's own forward runs."""
    with emulated_gpu():
        runner = ModelRunner(zoo.tiny("llama"), max_batch=1, max_context=90, scratch_entries=64)
        tokens = torch.tensor([[1, 2, 3, 4, 5]])
        expected = runner.forward(tokens).logits.clone()
        backend: Any = runner._backend
        forward, seen = backend.forward, []

        def noting(tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
            seen.append(tokens.shape[1])
            return forward(tokens, *args, **options)

        monkeypatch.setattr(backend, "supports", lambda _, nodes, __: nodes <= most)
        monkeypatch.setattr(backend, "forward", noting)
        assert torch.allclose(runner.forward(tokens).logits, expected)
        assert seen == sizes
