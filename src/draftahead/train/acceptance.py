"""Simulated acceptance: how many tokens per forward pass a drafter would bring on held-out texts.

The simulation is exact for greedy decoding: drafts after a correct prefix of the text are those
that the drafter would make there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, stack
from torch.nn import functional as F

from draftahead.train.batches import TrainBatch, TrainBatches


@dataclass(frozen=True)
class Acceptance:
    length: float  # tokens per forward pass: accepted ones and the target's own
    by_depth: list[float]  # share of drafted tokens accepted, of those whose parents were


class AcceptanceSimulation:
    """Runs chains of `depth` drafted tokens over texts and counts."""

    def __init__(self, depth: int) -> None:
        self._forward_passes = self._tokens = 0
        self._drafted, self._accepted = [0] * depth, [0] * depth

    def add(self, hits: Tensor, loss_mask: Tensor) -> None:
        """`hits` [B, chains, depth]: whether each drafted token of a chain is the text's token. The
        last chain starts two tokens before a text's end. `loss_mask` [B, T]: generated tokens."""
        for chains, generated in zip(hits.tolist(), loss_mask.sum(1).tolist(), strict=True):
            # The chain whose first drafted token is the first generated one; a text without a
            # prompt has none for its first tokens.
            at = max(0, len(chains) - generated)
            while at < len(chains):
                left = len(chains) - at
                accepted = self._count(chains[at], left)
                self._forward_passes += 1
                self._tokens += min(accepted + 1, left)
                at += accepted + 1

    def _count(self, chain: list[bool], left: int) -> int:
        """Accepted tokens of a chain, `left` tokens before the end of the text."""
        for depth, hit in enumerate(chain[:left]):
            self._drafted[depth] += 1
            if not hit:
                return depth
            self._accepted[depth] += 1
        return min(len(chain), left)

    def result(self) -> Acceptance:
        pairs = zip(self._accepted, self._drafted, strict=True)
        by_depth = [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]
        return Acceptance(self._tokens / max(1, self._forward_passes), by_depth)


def stack_depths(hits: Sequence[Tensor]) -> Tensor:
    """Hits by depth, [B, chains - depth] each, as [B, chains, depth]; False where a text ends."""
    chains = hits[0].shape[1]
    return stack([F.pad(hit, (0, chains - hit.shape[1])) for hit in hits], -1)


def next_token_acceptance(
    held_out: TrainBatches, depth: int, predict: Callable[[TrainBatch, slice], Tensor]
) -> Acceptance:
    """For drafters that read the text alone, so that a draft equals the predictions at its tokens.
    `predict` gives the token after each token of a slice of the batch, [B, tokens]."""
    simulation = AcceptanceSimulation(depth)
    for batch in held_out.once():
        # A chain's first token is predicted at the root, one token after the chain's start.
        window = min(batch.tokens.shape[1] - 1, batch.window + 1)
        hit = predict(batch, slice(-1 - window, -1)) == batch.tokens[:, -window:]
        simulation.add(stack_depths([hit[:, at:] for at in range(depth)]), batch.loss_mask)
    return simulation.result()
