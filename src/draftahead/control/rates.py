"""How often drafted tokens of some kind were accepted, recently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Kind = TypeVar("Kind")
RECENT = 0.05  # share of the newest draft in what is usual


class Rates(Generic[Kind]):
    """Acceptance rates by kind, from observations whose weight decays and a prior that counts as
    `prior_weight` of them."""

    def __init__(
        self, prior: Callable[[Kind], float], *, prior_weight: float, decay: float
    ) -> None:
        self._prior, self._prior_weight, self._decay = prior, prior_weight, decay
        self._right: dict[Kind, float] = {}
        self._seen: dict[Kind, float] = {}

    def __getitem__(self, kind: Kind) -> float:
        if kind not in self._seen:
            return self._prior(kind)
        return self._right[kind] / self._seen[kind]

    def note(self, kind: Kind, accepted: bool) -> None:
        right = self._right.get(kind, self._prior_weight * self._prior(kind))
        self._right[kind] = right * self._decay + accepted
        self._seen[kind] = self._seen.get(kind, self._prior_weight) * self._decay + 1

    def seen(self) -> dict[Kind, tuple[float, float]]:
        """(share, weight) of every kind that was noted, its prior included."""
        return {kind: (self[kind], self._seen[kind]) for kind in self._seen}


BINS = 10  # of likelihood


class Calibration:
    """What claims are worth: of guesses said to be this likely, how many came true."""

    def __init__(self) -> None:
        self.rates: Rates[int] = Rates(
            lambda bin_: (bin_ + 0.5) / BINS, prior_weight=4.0, decay=0.98
        )

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
