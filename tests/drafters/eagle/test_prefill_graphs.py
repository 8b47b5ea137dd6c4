"""Inputs of a head that a long text lacks, computed by CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead.drafters.eagle.head import new_head
from draftahead.drafters.eagle.prefill import HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.models.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("short_graphs")


@pytest.fixture
def short_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftahead.drafters.eagle.prefill.PREFILL_CHUNK", 16)
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.MIN_PREFILL", 4)


def prompt(slot: int, length: int) -> list[int]:
    return [(7 * slot + 3 * i) % zoo.VOCABULARY for i in range(length)]


def prefill_of(device: str, layers: int = 1, scratch: int = 8, *, graphed: bool) -> HeadPrefill:
    model = zoo.tiny("llama").to(device)
    torch.manual_seed(3)
    tokens = torch.arange(zoo.VOCABULARY)
    head = new_head(model, tokens, aux_layers=(1, 3), num_layers=layers).to(model.dtype)
    target = ModelRunner(model, max_batch=2, max_context=90, scratch_entries=scratch)
    target.add_aux_layers((1, 3))
    found = HeadPrefill(EagleRunner(head, target, 2, 8))
    assert found._graphs is not None
    if not graphed:
        found._graphs = None
    return found


def fill(prefill: HeadPrefill, slot: int, length: int) -> None:
    prefill._runner.target.prefill(slot, prompt(slot, length))
    prefill.fill(slot, prompt(slot, length))
    assert len(prefill._runner.cache.tokens_in[slot]) == length - 2


def assert_same_entries(one: HeadPrefill, other: HeadPrefill) -> None:
    caches = one._runner.cache, other._runner.cache
    for slot, held in enumerate(caches[0].tokens_in):
        assert held == caches[1].tokens_in[slot]
        for here, there in zip(caches[0].tensors(), caches[1].tensors(), strict=True):
            part = (slice(None), slot, slice(None), slice(len(held)))
            assert torch.allclose(here[part], there[part], atol=1e-9)
            assert not held or here[part].any()


@pytest.mark.parametrize("layers", [1, 2])
@torch.inference_mode()
def test_graphs_fill_the_cache_as_the_heads_own_forward(layers: int, gpu_device: str) -> None:
    """From the second chunk of a length on; also once the target's hidden states lie elsewhere."""
    both = [prefill_of(gpu_device, layers, graphed=graphed) for graphed in (True, False)]
    graphs: Any = both[0]._graphs
    captured = []
    for slot, length in ((0, 21), (1, 40), (0, 77)):
        for one in both:
            fill(one, slot, length)
        captured.append({key[:2] for key in graphs.graphs._graphs})
    assert captured[0] == set() and len(captured[1]) == 1 and len(captured[2]) > 1
    assert_same_entries(*both)
    for one in both:
        one._runner.target.add_aux_layers((1, 2, 3))
        one._runner.cache.tokens_in[0].clear()
        fill(one, 0, 77)
    assert graphs.graphs.can_capture and len(graphs.graphs)
    for one in both:
        one._runner.cache.tokens_in[1].clear()
    assert_same_entries(*both)


@torch.inference_mode()
def test_padding_may_reach_beyond_the_cache_of_the_target(
    gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's cache may be the longer one."""
    monkeypatch.setattr("draftahead.drafters.eagle.prefill.PREFILL_CHUNK", 64)
    both = [prefill_of(gpu_device, scratch=4, graphed=graphed) for graphed in (True, False)]
    graphs: Any = both[0]._graphs
    for one in both:
        assert one._runner.cache.num_entries > one._runner.target.cache.num_entries
        for _ in range(2):
            one._runner.cache.tokens_in[0].clear()
            fill(one, 0, 88)
    assert len(graphs.graphs) == 2
    assert_same_entries(*both)
