"""What forwards as CUDA graphs are compared with: the same forwards run eagerly."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from draftahead import LLM, SamplingParams
from draftahead.models.runner import ModelRunner


def eager(runner: ModelRunner) -> ModelRunner:
    """With every forward, prefill and move run as the model's own code does it."""
    runner._backend = runner._prefill = runner.cache.graphed_copy = None
    return runner


def assert_same_entries(one: ModelRunner, other: ModelRunner, tolerance: float = 1e-9) -> None:
    """Keys, values and hidden states of the tokens that two caches hold."""
    for slot, held in enumerate(one.cache.tokens_in):
        assert held == other.cache.tokens_in[slot]
        for here, there in zip(one.cache.tensors(), other.cache.tensors(), strict=True):
            found, expected = (x[:, slot, :, : len(held)].float() for x in (here, there))
            assert float((found - expected).norm()) <= tolerance * float(expected.norm())
            assert not held or found.any()


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@torch.no_grad()
def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """Half precision has near-ties, and trees sum in another order than chains: each token must be
    as good as the best, by the model in float32, up to that rounding."""
    ids = torch.tensor([prompt + output], device=model.device)
    logits = copy.deepcopy(model).float()(ids).logits[0, len(prompt) - 1 : -1]
    gap = logits.max(-1).values - logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    assert float((gap / logits.std(-1)).max()) < 0.25, gap.max()


def assert_waits_once_per_step(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    """On a real GPU: the host waits for the device one single time between two launches."""
    llm.generate(prompts, params)  # captures the graphs
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outs = llm.generate(prompts, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchronizing" in str(w.message)]
    steps = max(out.stats.steps for out in outs)
    where = {f"{w.filename}:{w.lineno}" for w in waits}
    assert steps <= len(waits) <= steps + 8, (len(waits), steps, where)  # prompts wait, too
