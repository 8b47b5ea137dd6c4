"""Counts and seconds, with one definition each."""

from __future__ import annotations

from collections.abc import Sequence as Seq
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
        self, drafted_depths: Seq[int], accepted: int, nodes: int = 1, seconds: float = 0.0
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
