"""Estimates the speed-up of a trained drafter on this machine, from the acceptance on held-out
texts and the measured time of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.llm import LLM
from draftahead.loader import hub
from draftahead.models.support import context_limit
from draftahead.train.dataset import Dataset

PROMPTS, TOKENS = 3, 24  # prompts, and generated tokens of each, that steps are measured on
REPEATS = 3  # the fastest counts


@dataclass(frozen=True)
class SpeedupEstimate:
    """Seconds of a step by its number of drafted tokens; 0: plain decoding."""

    step_seconds: Mapping[int, float]

    def best(self, acceptance_by_depth: Sequence[float]) -> tuple[float, int]:
        """The highest speed-up over plain decoding, and its number of drafted tokens."""
        known = sorted(self.step_seconds)
        seconds = [self.step_seconds[drafted] for drafted in known]
        best, reached, tokens = (1.0, 0), 1.0, 1.0
        for drafted, share in enumerate(acceptance_by_depth, start=1):
            reached *= share
            tokens += reached
            step = float(np.interp(drafted, known, seconds))
            best = max(best, (tokens * self.step_seconds[0] / step, drafted))
        return best

    def describe(self, acceptance_by_depth: Sequence[float]) -> str:
        speedup, drafted = self.best(acceptance_by_depth)
        steps = ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in sorted(self.step_seconds.items()))
        gain = f"{speedup:.2f}x of plain decoding, with chains of {drafted}"
        return (
            f"estimated speed-up for one sequence on this machine: {gain if drafted else 'none'} "
            f"(measured ms of a step by drafted tokens: {steps})"
        )


def measure_steps(
    model: Any, drafter: Mapping[str, Any], data: Dataset, depth: int
) -> SpeedupEstimate:
    """Measures steps with 0, 1 and `depth` drafted tokens, on the first prompts of the data."""
    if drafter["method"] == "draft_model" and isinstance(drafter["model"], str):
        draft, _ = hub.load(drafter["model"], dtype=model.dtype, device=model.device)
        drafter = {**drafter, "model": draft}
    limit = context_limit(model) - TOKENS
    prompts = [
        data.text(i)[:length].tolist()
        for i, length in enumerate(data.prompt_lengths.tolist())
        if 0 < length <= limit
    ][:PROMPTS] or [[0]]
    chains = {n: {**drafter, "num_speculative_tokens": n} for n in (1, depth)}
    drafters: dict[int, Any] = {0: "none", **chains}
    max_context = max(map(len, prompts)) + TOKENS
    llms = {
        count: LLM(model, config, max_batch=1, max_context=max_context)
        for count, config in drafters.items()
    }
    # Interleaved, so that a disturbance of the machine hits all. The first repetition compiles.
    repetitions = [
        {count: _seconds_per_step(llm, prompts) for count, llm in llms.items()}
        for _ in range(1 + REPEATS)
    ]
    return SpeedupEstimate({count: min(r[count] for r in repetitions[1:]) for count in llms})


def _seconds_per_step(llm: LLM, prompts: list[list[int]]) -> float:
    total = Stats()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for completion in llm.generate(prompts, params):
        total.add(completion.stats)
    return total.decode_seconds / total.steps
