"""Simulated acceptance: tokens per forward pass with a drafter on held-out texts.

The simulation is exact for greedy decoding: drafts after a correct prefix of the text are those
that the drafter would make there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    length: float  # tokens per forward pass: accepted ones and the target's own
    by_depth: list[float]  # accepted share of drafted tokens with accepted parents


class AcceptanceSimulation:
    """Runs chains of `depth` drafted tokens over texts and counts."""

    def __init__(self, depth: int) -> None:
        self._forward_passes = self._tokens = 0
        self._drafted, self._accepted = [0] * depth, [0] * depth

    def add(self, hits: Iterable[Tensor], loss_mask: Tensor) -> None:
        """`hits`: by depth, whether the chains' drafted tokens are the text's, [B, chains - depth].
        The last chain starts two tokens before a text's end. `loss_mask` [B, T]: generated ones."""
        by_text = zip(*(hit.tolist() for hit in hits), strict=True)
        for text, generated in zip(by_text, loss_mask.sum(1).tolist(), strict=True):
            chains = len(text[0])
            # The chain whose first drafted token is the first generated one; a text without a
            # prompt has none for its first tokens.
            at = max(0, chains - generated)
            while at < chains:
                accepted = self._count_accepted(hit[at] for hit in text if at < len(hit))
                self._forward_passes += 1
                self._tokens += min(accepted + 1, chains - at)
                at += accepted + 1

    def _count_accepted(self, chain: Iterable[bool]) -> int:
        accepted = 0
        for hit in chain:
            self._drafted[accepted] += 1
            if not hit:
                break
            self._accepted[accepted] += 1
            accepted += 1
        return accepted

    def result(self) -> Acceptance:
        pairs = zip(self._accepted, self._drafted, strict=True)
        by_depth = [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]
        return Acceptance(self._tokens / max(1, self._forward_passes), by_depth)
