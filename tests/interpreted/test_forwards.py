"""Whole forwards by the kernels, as the engine runs them, beside the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_models import cuda_model
from draftahead import LLM, SamplingParams
from draftahead.backends.base import DeviceTree
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.backends.cuda.graphs import CapturedGraph
from draftahead.core.device import Captured
from draftahead.core.types import ForwardOutput
from draftahead.drafters.eagle.cuda_head import TreePlan
from draftahead.models.runner import ModelRunner
from graph_checks import eager, relative_error
from head_trees import assert_same_trees, untrained_head

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
CASES = [("llama", torch.float16, 1), ("qwen3", torch.bfloat16, 2)]
LENGTHS = (1, 20, 70)
TREES = [[-1, 0, 0, 1, 3, 2, 2], [-1, 0, 1, 2, 0, 4, 5], [-1, 0, 0, 0, 0, 0, 0]]


@pytest.fixture(autouse=True)
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing a graph runs its body several times; here once."""

    def capture(self: CapturedGraph) -> Captured:
        if self._graph is None:
            self._graph = self._memory.capture(self._forward)
        return self._graph

    monkeypatch.setattr(CapturedGraph, "capture", capture)


def both(kind: str, dtype: torch.dtype, layers: int) -> tuple[ModelRunner, ModelRunner]:
    """Kernels, and the model's own forward in float32; slots that hold LENGTHS tokens."""
    model = cuda_model(kind, dtype, num_hidden_layers=layers, **SMALL)
    truth = cuda_model(kind, dtype, num_hidden_layers=layers, **SMALL).float()
    options: Any = {"max_batch": 3, "max_context": 96, "scratch_entries": 16}
    ours, exact = ModelRunner(model, **options), eager(ModelRunner(truth, **options))
    assert isinstance(ours._backend, CudaDecoder)
    for runner in (ours, exact):
        runner.add_aux_layers((layers,))
        for slot, length in enumerate(LENGTHS):
            runner.prefill(slot, random_tokens(length, seed=slot).tolist())
    return ours, exact


def random_tokens(*size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], size, generator=generator)


@pytest.mark.parametrize(("kind", "dtype", "layers"), CASES, ids=["llama", "qwen3"])
@torch.inference_mode()
def test_forwards(kind: str, dtype: torch.dtype, layers: int) -> None:
    ours, exact = both(kind, dtype, layers)
    graphs: Any = ours._backend.graphs  # type: ignore[union-attr]
    tolerance = 0.005 if dtype == torch.float16 else 0.04
    parents = torch.tensor(TREES)
    for step, known in enumerate([True, True, False]):
        tokens = random_tokens(3, 7, seed=step)
        truth = exact.forward(tokens, parents=parents).logits
        trees: Any = parents
        if not known:  # a device draft
            trees = DeviceTree(tokens[:, 0].tolist(), torch.stack([tokens, parents, parents], 1))
        found = ours.forward(tokens, parents=trees)
        assert relative_error(found.logits, truth) < tolerance, step
        check_argmax(found)
        # Paths are accepted: the next replay reads other numbers of KV entries.
        kept = [[0, 1, 3], [0, 4], [0]]
        for runner in (ours, exact):
            runner.cache.commit(kept, [tokens[b, path].tolist() for b, path in enumerate(kept)])
    for slot in (1, 1, 2):  # the last reads another part of the cache, in more splits
        tokens = random_tokens(1, 4, seed=slot)
        truth = exact.forward(tokens, first_slot=slot).logits
        found = ours.forward(tokens, first_slot=slot)
        assert relative_error(found.logits, truth) < tolerance, slot
    assert graphs.can_capture
    check_cache(ours, exact, tolerance)


def check_argmax(found: ForwardOutput) -> None:
    assert found.argmax is not None
    assert torch.equal(found.argmax, found.logits.float().argmax(-1))


def check_cache(ours: ModelRunner, exact: ModelRunner, tolerance: float) -> None:
    for slot, held in enumerate(ours.cache.tokens_in):
        assert held == exact.cache.tokens_in[slot]
        for here, there in zip(ours.cache.tensors(), exact.cache.tensors(), strict=True):
            part = (slice(None), slot, slice(None), slice(LENGTHS[slot], len(held)))
            assert relative_error(here[part], there[part]) < tolerance


@pytest.mark.parametrize(
    ("kind", "temperature"), [("norm each", 0.0), ("one norm", 0.9), ("two layers", 0.0)]
)
@torch.inference_mode()
def test_device_drafts(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees built by the kernels are those of the tree builder, and verified before the host reads
    them."""
    monkeypatch.setattr("draftahead.drafters.tree_builder.MIN_CONFIDENCE", 0.0)
    model = cuda_model("llama", torch.float16, num_hidden_layers=1, **SMALL)
    head = untrained_head(model, kind)
    llm = LLM(model, {"method": "eagle", "model": head}, max_batch=2, max_context=64)
    prompts = [[5, 6, 7, 8, 9], list(range(20, 40))]
    params = SamplingParams(temperature=temperature, max_tokens=8, seed=1)
    plan = TreePlan(3, 2, 4, 6, temperature > 0)
    batch, launched = assert_same_trees(llm, prompts, params, plan, [1, 3])
    verifier = llm.engine.verifier
    assert verifier.supports_device_draft(launched, batch)
    found = verifier.forward(batch, launched).logits.clone()
    draft, _ = launched.to_host()
    truth = eager(verifier.runner).forward(draft.token_tensor, parents=draft.parent_tensor).logits
    assert relative_error(found, truth) < 0.005
