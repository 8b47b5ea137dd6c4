"""What a trained drafter should bring on this machine: an estimate, from the acceptance on held-out
texts and from steps that were measured here."""

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
from draftahead.train.texts import Texts

PROMPTS, TOKENS = 3, 24  # that the steps are measured on
TURNS = 3


@dataclass(frozen=True)
class Gain:
    """Seconds of a step by the guesses it drafts and scores; none: plain decoding."""

    steps: Mapping[int, float]

    def of(self, by_depth: Sequence[float]) -> tuple[float, int]:
        """How many times as fast as plain decoding, and with how many guesses: the best number,
        given how often a guess is right where those before it were."""
        best, reached, tokens = (1.0, 0), 1.0, 1.0
        for guesses, hit in enumerate(by_depth, start=1):
            reached *= hit
            tokens += reached
            best = max(best, (tokens * self.steps[0] / self._step(guesses), guesses))
        return best

    def _step(self, guesses: int) -> float:
        known = sorted(self.steps)
        return float(np.interp(guesses, known, [self.steps[count] for count in known]))

    def told(self, by_depth: Sequence[float]) -> str:
        times, guesses = self.of(by_depth)
        steps = ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in sorted(self.steps.items()))
        said = f"{times:.2f} times as fast as plain decoding, with chains of {guesses}"
        return (
            f"an estimate for one text on this machine: {said if guesses else 'no gain'} "
            f"(ms of a step by its guesses, measured: {steps})"
        )


def measured(model: Any, drafter: Mapping[str, Any], texts: Texts, depth: int) -> Gain:
    """Plain steps, and those with one guess and with `depth`, on the first prompts of texts."""
    limit = context_limit(model) - TOKENS
    asked = [
        texts.text(i)[:size].tolist()
        for i, size in enumerate(texts.answers.tolist())
        if 0 < size <= limit
    ][:PROMPTS] or [[0]]
    drafters: dict[int, Any] = {0: "none"}
    drafters |= {count: {**drafter, "num_speculative_tokens": count} for count in (1, depth)}
    sides = {
        count: LLM(
            model,
            side,
            max_batch=1,
            max_context=max(map(len, asked)) + TOKENS,
            _load=lambda name: hub.load(name, dtype=model.dtype, device=model.device),
        )
        for count, side in drafters.items()
    }
    # Turn by turn, and the quickest of each: what a busy machine does meanwhile should not fall on
    # one of them. In the first turn passes may compile or record.
    turns = [{count: _step(llm, asked) for count, llm in sides.items()} for _ in range(1 + TURNS)]
    return Gain({count: min(turn[count] for turn in turns[1:]) for count in sides})


def _step(llm: LLM, asked: list[list[int]]) -> float:
    total = Stats()
    for out in llm.generate(
        asked, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    ):
        total.add(out.stats)
    return total.decode_seconds / total.steps
