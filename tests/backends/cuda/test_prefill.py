"""Prompts whose prefill is a CUDA graph: from the second of about its length on."""

from __future__ import annotations

import pytest
import torch

import zoo
from cuda_models import cuda_model
from draftahead.models.runner import ModelRunner
from graph_checks import assert_same_entries, eager

PROMPTS = ((0, 5), (1, 37), (2, 39), (0, 60), (1, 88))  # slots and lengths


def prompt(slot: int, length: int) -> list[int]:
    return [(7 * slot + 3 * i) % 90 for i in range(length)]


def runner_of(model: object) -> ModelRunner:
    runner = ModelRunner(model, max_batch=3, max_context=100, scratch_entries=64)
    runner.add_aux_layers((1, 2))
    return runner


def check(model: object, tolerance: float) -> None:
    both = runner_of(model), runner_of(model)
    fill = both[0]._prefill
    assert fill is not None
    both[1]._prefill = None
    for runner in both:
        for slot, length in PROMPTS:
            runner.prefill(slot, prompt(slot, length))
    assert fill.graphs.can_capture and len(fill.graphs) == 2
    assert_same_entries(*both, tolerance=tolerance)


def test_a_graphed_prefill_fills_slots_as_the_models_own_forward(gpu_device: str) -> None:
    check(zoo.tiny("gemma2", dtype=torch.float32).to(gpu_device), 1e-4)


@pytest.mark.gpu
def test_a_graphed_prefill_beside_our_kernels() -> None:
    check(cuda_model("llama", torch.bfloat16, "cuda"), 0.02)


def test_a_graph_serves_one_length_and_one_range_of_kv_entries(
    gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any slot, behind the KV entries that it holds; long prompts in chunks."""
    monkeypatch.setattr("draftahead.models.runner.PREFILL_CHUNK", 16)
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.MIN_KV_LEN", 16)
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.MIN_PREFILL", 4)
    model = zoo.tiny("llama").to(gpu_device)
    both, graphs = (runner_of(model), eager(runner_of(model))), []
    assert both[0]._prefill is not None
    for slot, length in (*PROMPTS, (0, 6), (1, 12), (0, 40), (1, 46), (0, 52)):
        for runner in both:
            runner.prefill(slot, prompt(slot, length))
        graphs.append(len(both[0]._prefill.graphs))
    assert graphs[0] == 0 < graphs[2] <= graphs[4] < graphs[-1]
    assert {key[1] for key in both[0]._prefill.graphs._graphs} >= {32, 64, 128}  # type: ignore[index]
    assert_same_entries(*both)
