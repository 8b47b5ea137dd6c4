"""Hidden states that forwards on a GPU store in the cache."""

from __future__ import annotations

import pytest
import torch

import zoo
from cuda_models import cuda_model
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.backends.cuda.hf_graph import GraphedForward
from draftahead.models.runner import ModelRunner
from graph_checks import relative_error


def test_graphed_forwards_store_those_of_the_model(gpu_device: str) -> None:
    model = zoo.tiny("gemma2", dtype=torch.float32).to(gpu_device)
    check(ModelRunner(model, max_batch=2, max_context=100, scratch_entries=64), 1e-4)


@pytest.mark.gpu
def test_kernels_store_those_of_the_model() -> None:
    model = cuda_model("qwen3", torch.bfloat16, "cuda")
    check(ModelRunner(model, max_batch=2, max_context=100, scratch_entries=64), 0.03)


@torch.no_grad()
def check(runner: ModelRunner, tolerance: float) -> None:
    """Captured from before and after graphs were; of chains and trees; of accepted paths."""
    backend, device = runner._backend, runner.device
    assert isinstance(backend, GraphedForward | CudaDecoder)
    runner.prefill(0, [5, 6, 7])
    runner.forward(torch.tensor([[8, 9]]))  # a graph without hidden states
    runner.add_aux_layers((1, 3))
    runner.add_aux_layers((2,))
    text = list(range(20, 50))
    for slot in range(2):
        runner.prefill(slot, text)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]] * 2)
    runner.forward(torch.tensor([[8, 9, 10, 11, 12, 13, 14]] * 2), parents=parents)
    runner.cache.commit([[0, 1, 4], [0, 2, 5]], [[8, 9, 12], [8, 10, 13]])
    assert backend.graphs.can_capture
    for slot, path in enumerate(([8, 9, 12], [8, 10, 13])):
        ids = torch.tensor([text + path], device=device)
        expected = runner.model(ids, output_hidden_states=True).hidden_states
        entries = torch.arange(len(text) + 3, device=device)[None]
        found = runner.hidden_states((3, 1), torch.tensor([slot], device=device), entries)[0]
        for place, depth in enumerate((3, 1)):
            # Those after the last layer are stored by forwards with logits; prefill has none.
            is_last = depth == 3 == runner.model.config.num_hidden_layers
            part = slice(len(text), None) if is_last else slice(None)
            gap = relative_error(found[part, place], expected[depth][0, part])
            assert gap < tolerance, (slot, depth)
