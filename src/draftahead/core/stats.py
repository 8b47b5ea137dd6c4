"""Counts and seconds, with one definition each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Stats:
    """Counts and seconds of one sequence, or of several added up.

    Seconds are wall time of the steps that the sequence took part in: batch mates share them. What
    a device does while the reader of a stream is busy with something else is not counted.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0  # target passes
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)  # by depth, from depth 1
    accepted_at: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)  # steps by the nodes scored, from 1 node
    scored_seconds: list[float] = field(default_factory=list)  # and how long the target took
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's pass, the acceptance rule, the cache
    other_seconds: float = 0.0
    reused_tokens: int = 0  # prompt tokens whose keys were still in the cache

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a target pass: the drafted ones it accepted and its own."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def seconds(self) -> float:
        parts = (self.prefill_seconds, self.draft_seconds, self.verify_seconds, self.other_seconds)
        return sum(parts)

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    def count(
        self, drafted_depths: Sequence[int], accepted: int, nodes: int = 1, seconds: float = 0.0
    ) -> None:
        """Takes note of one step: the depth of every drafted node, how many were kept; and of the
        pass, which mates may have made wider, its nodes a text and its time."""
        self.steps += 1
        self.scored.extend([0] * (nodes - len(self.scored)))
        self.scored_seconds.extend([0.0] * (nodes - len(self.scored_seconds)))
        self.scored[nodes - 1] += 1
        self.scored_seconds[nodes - 1] += seconds
        self.drafted += len(drafted_depths)
        self.accepted += accepted
        deepest = max(drafted_depths, default=0)
        for counts in (self.drafted_at, self.accepted_at):
            counts.extend([0] * (deepest - len(counts)))
        for depth in set(drafted_depths):
            self.drafted_at[depth - 1] += 1
        for depth in range(1, accepted + 1):
            self.accepted_at[depth - 1] += 1

    def add(self, other: Stats) -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                width = max(len(mine), len(theirs))
                pad = [[*counts, *[0] * (width - len(counts))] for counts in (mine, theirs)]
                setattr(self, item.name, [a + b for a, b in zip(*pad, strict=True)])
            else:
                setattr(self, item.name, mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        raw = {item.name: getattr(self, item.name) for item in fields(self)}
        names = ("mean_acceptance_length", "acceptance_rate", "seconds", "tokens_per_second")
        return raw | {name: getattr(self, name) for name in names}


class CompileTime:
    """Seconds that have gone into compiling and recording, in all. They are part of the wall time,
    and no price of a step: the next one of its kind is without."""

    seconds = 0.0

    @classmethod
    @contextmanager
    def counted(cls) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            cls.seconds += time.perf_counter() - start


class StepTimer:
    """Seconds by stage of one step. A device's work counts where the host waits for it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._set_up: dict[str, float] = {}  # what of it went into compiling and recording
        self._last, self._before = time.perf_counter(), CompileTime.seconds
        self._stopped: float | None = None

    def lap(self, stage: str) -> None:
        """What passed since the last lap goes to this stage."""
        now, before = time.perf_counter(), CompileTime.seconds
        self.spent[stage] = self.spent.get(stage, 0.0) + now - self._last
        self._set_up[stage] = self._set_up.get(stage, 0.0) + before - self._before
        self._last, self._before = now, before

    def price(self, stage: str) -> float:
        """Without what the next step of its kind will not take."""
        return self.spent[stage] - self._set_up.get(stage, 0.0)

    def shift(self, stage: str, to: str, but: float) -> None:
        """All but so many seconds of a stage were another's. If something was also compiled or
        recorded then, nobody knows for which of them."""
        if self._set_up.get(stage, 0.0) > 0:
            return
        seconds = max(0.0, self.spent[stage] - but)
        self.spent[stage] -= seconds
        self.spent[to] = self.spent.get(to, 0.0) + seconds

    def stop(self) -> None:
        self._stopped = time.perf_counter()

    def go_on(self) -> None:
        """What others did since it was stopped does not count."""
        if self._stopped is not None:
            self._last += time.perf_counter() - self._stopped
            self._stopped = None

    def charge(self, stats: Stats, share: float = 1.0) -> None:
        for stage, seconds in self.spent.items():
            setattr(stats, stage, getattr(stats, stage) + share * seconds)
