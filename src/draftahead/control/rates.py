"""How often guesses of some kind came true, lately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Kind = TypeVar("Kind")
RECENT = 0.05  # share of the newest draft in what is usual


class Rates(Generic[Kind]):
    """Shares of successes by kind. A first opinion counts as a few guesses; old ones fade."""

    def __init__(self, first: Callable[[Kind], float], *, worth: float, fade: float) -> None:
        self._first, self._worth, self._fade = first, worth, fade
        self._right: dict[Kind, float] = {}
        self._seen: dict[Kind, float] = {}

    def __getitem__(self, kind: Kind) -> float:
        if kind not in self._seen:
            return self._first(kind)
        return self._right[kind] / self._seen[kind]

    def note(self, kind: Kind, came_true: bool) -> None:
        worth = self._worth
        self._right[kind] = (
            self._right.get(kind, worth * self._first(kind)) * self._fade + came_true
        )
        self._seen[kind] = self._seen.get(kind, worth) * self._fade + 1

    def seen(self) -> dict[Kind, tuple[float, float]]:
        """(share, weight) of every kind that was noted, its first opinion included."""
        return {kind: (self[kind], self._seen[kind]) for kind in self._seen}


BINS = 10  # of likelihood


class Calibration:
    """What claims are worth: of guesses said to be this likely, how many came true."""

    def __init__(self) -> None:
        self.rates: Rates[int] = Rates(lambda bin_: (bin_ + 0.5) / BINS, worth=4.0, fade=0.98)

    def __call__(self, claim: float) -> float:
        return self.rates[_bin(claim)]

    def note(self, claim: float, came_true: bool) -> None:
        self.rates.note(_bin(claim), came_true)


def _bin(claim: float) -> int:
    return min(BINS - 1, max(0, int(claim * BINS)))


class Usual:
    """What the likeliest guess of a draft is worth, the second likeliest, and so on: lately."""

    def __init__(self) -> None:
        self.by_rank: list[float] = []
        self.known = 0  # drafts that this is known from

    def note(self, ranked: Sequence[float]) -> None:
        self.known += 1
        share = max(RECENT, 1 / self.known)
        self.by_rank += [0.0] * (len(ranked) - len(self.by_rank))
        for rank, before in enumerate(self.by_rank):
            now = ranked[rank] if rank < len(ranked) else 0.0
            self.by_rank[rank] = before + share * (now - before)
