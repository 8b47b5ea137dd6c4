"""The target drafts for itself with some of its layers: the same weights, the same cache.

The text's own keys are there already. What such a pass writes lies behind every row's length, where
the pass that verifies writes again and nothing else looks: no draft can change the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftahead.core.types import Batch, Draft
from draftahead.drafters.tree_builder import TreeBuilder, draw_chain, guess_chain
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner


class SelfDraft:
    """Guesses by a part of the target, for one step."""

    def __init__(self, passes: ModelRunner, part: LayerSubset) -> None:
        self._passes, self._part = passes, part
        self._fed = 0  # nodes of a chain that the cache holds behind each row

    def grown(self, batch: Batch, grower: TreeBuilder) -> Draft | None:
        """Trees, as far as they pay, with claims."""
        root = self._scored(torch.tensor(batch.roots)[:, None])[:, 0]
        return grower.grow(batch, root, self._scored, tokens=self._part.tokens)

    def drawn(self, batch: Batch, count: int) -> None:
        """Chains of so many by the dice, which hold the draft."""
        first = self._feed(torch.tensor(batch.roots))
        draw_chain(batch, min(count, max(batch.max_depths)), *first, self._feed)

    def guessed(self, batch: Batch, count: int) -> Draft:
        """Chains of so many, each token the likeliest."""
        logits, _ = self._feed(torch.tensor(batch.roots))
        return guess_chain(batch, min(count, max(batch.max_depths)), logits, self._feed)

    def _scored(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self._passes.run(tokens, parents=parents, part=self._part)

    def _feed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self._passes.run(tokens[:, None], part=self._part, ahead=self._fed)
        self._fed += 1
        best = self._passes.best
        return self._part.scatter_to_vocab(logits[:, 0], None if best is None else best[:, 0])
