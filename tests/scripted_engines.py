"""Configurations of a benchmark whose seconds are given, one per repetition."""

from __future__ import annotations

from collections.abc import Sequence

from draftahead import SamplingParams, Stats, errors
from draftahead.bench.configurations import Draftahead, InThisProcess, Outcome

WARM_UP = 4  # tokens: of no repetition that is measured


class Scripted(Draftahead):
    """One of ours; a negative number of seconds is Ctrl-C."""

    def __init__(self, name: str, seconds: Sequence[float], log: list[str]) -> None:
        self.name, self.batch, self.log = name, 1, log
        self._seconds = iter(seconds)

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome:
        self.log.append(self.name)
        if params.max_tokens == WARM_UP:
            return Outcome(0.0, 0, [])
        seconds = next(self._seconds)
        if seconds < 0:
            raise KeyboardInterrupt
        stats = Stats(tokens=10, steps=5, drafted=8, accepted=5, verify_seconds=seconds)
        return Outcome(seconds, 10 * len(prompts), [[1, 2]] * len(prompts), stats)


class Other(InThisProcess):
    """Another engine of scripted seconds, which fails when they are used up. Its texts are half as
    long as ours."""

    engine, batch = "other", 1

    def __init__(self, name: str, seconds: Sequence[float], text: str = "abc") -> None:
        self.name, self.reference, self.text = name, "other", text
        self._seconds = iter(seconds)

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome:
        if params.max_tokens == WARM_UP:
            return Outcome(0.0, 0, [])
        if (seconds := next(self._seconds, None)) is None:
            raise errors.OtherEngineError(f"{self.name} ended")
        stats = Stats(tokens=5, steps=5, prefill_seconds=0.25, verify_seconds=seconds - 0.25)
        return Outcome(seconds, 5, [self.text] * len(prompts), stats, prefill_tokens=1)
