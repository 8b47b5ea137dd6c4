"""Counts and seconds of decoding."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal


@dataclass(repr=False)
class Stats:
    """Counts and seconds of one sequence, or of several added up.

    Seconds are wall time of the steps that the sequence took part in: all sequences of a batch have
    the same. Not counted: what a device does while the reader of a stream does something else.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0  # forwards of the target
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)  # steps that drafted at depth 1, 2, ...
    accepted_at: list[int] = field(default_factory=list)
    steps_by_nodes: list[int] = field(default_factory=list)  # forwards over 1, 2, ... nodes
    seconds_by_nodes: list[float] = field(default_factory=list)  # and what they took
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's forward, the acceptance rule, the KV cache
    other_seconds: float = 0.0
    reused_tokens: int = 0  # prompt tokens whose KV entries were in the cache already

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target forward: the accepted ones and the target's own."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafted tokens / drafted tokens."""
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

    def __repr__(self) -> str:
        return (
            f"Stats({self.tokens} tokens in {self.steps} steps, {self.mean_acceptance_length:.2f} "
            f"a step, acceptance rate {self.acceptance_rate:.2f}, "
            f"{self.tokens_per_second:.1f} tokens/s)"
        )

    def add_step(
        self, depths: Sequence[int], accepted: int, num_nodes: int = 1, seconds: float = 0.0
    ) -> None:
        """Counts one step: the depth of every drafted node, how many were accepted; and of the
        forward the nodes per sequence (of the largest tree in the batch) and its time."""
        self.steps += 1
        _grow(self.steps_by_nodes, num_nodes, 0)
        _grow(self.seconds_by_nodes, num_nodes, 0.0)
        self.steps_by_nodes[num_nodes - 1] += 1
        self.seconds_by_nodes[num_nodes - 1] += seconds
        self.drafted += len(depths)
        self.accepted += accepted
        for counts in (self.drafted_at, self.accepted_at):
            _grow(counts, max(depths, default=0), 0)
        for depth in set(depths):
            self.drafted_at[depth - 1] += 1
        for depth in range(1, accepted + 1):
            self.accepted_at[depth - 1] += 1

    def add(self, other: Stats) -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                length = max(len(mine), len(theirs))
                pad = [[*counts, *[0] * (length - len(counts))] for counts in (mine, theirs)]
                setattr(self, item.name, [a + b for a, b in zip(*pad, strict=True)])
            else:
                setattr(self, item.name, mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        raw = {item.name: getattr(self, item.name) for item in fields(self)}
        names = ("mean_acceptance_length", "acceptance_rate", "seconds", "tokens_per_second")
        return raw | {name: getattr(self, name) for name in names}


def _grow(counts: list[Any], length: int, zero: float) -> None:
    if len(counts) < length:
        counts.extend([zero] * (length - len(counts)))


class CompileTime:
    """Seconds that this process has spent on compiling kernels and capturing graphs. They count as
    wall time, but not as the cost of a step: later steps do not pay it."""

    seconds: ClassVar[float] = 0.0

    @classmethod
    @contextmanager
    def counted(cls) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            cls.seconds += time.perf_counter() - start


Stage = Literal["prefill", "draft", "verify", "other"]


class StepTimer:
    """Seconds of one step by stage. Time of a device counts in the stage that waits for it."""

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = {}
        self._compiling: dict[Stage, float] = {}  # the part that was CompileTime
        self._last, self._compiled = time.perf_counter(), CompileTime.seconds
        self._paused: float | None = None

    def lap(self, stage: Stage) -> None:
        """The time since the last lap belongs to this stage."""
        now, compiled = time.perf_counter(), CompileTime.seconds
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        if compiled != self._compiled:
            spent = compiled - self._compiled
            self._compiling[stage] = self._compiling.get(stage, 0.0) + spent
        self._last, self._compiled = now, compiled

    def cost(self, stage: Stage) -> float:
        """Seconds of a stage without compilation: what the next step of its kind will take."""
        return self.seconds[stage] - self._compiling.get(stage, 0.0)

    def reassign(self, stage: Stage, to: Stage, rest: float) -> None:
        """Moves all of a stage's time but `rest` seconds to another stage. Does nothing if code was
        compiled meanwhile: it is unknown in which of the two."""
        if not self._compiling.get(stage):
            seconds = max(0.0, self.seconds[stage] - rest)
            self.seconds[stage] -= seconds
            self.seconds[to] = self.seconds.get(to, 0.0) + seconds

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """The time since `pause` does not count."""
        if self._paused is not None:
            self._last += time.perf_counter() - self._paused
            self._paused = None

    def add_to(self, stats: Stats, share: float = 1.0) -> None:
        for stage, seconds in self.seconds.items():
            name = f"{stage}_seconds"
            setattr(stats, name, getattr(stats, name) + share * seconds)
