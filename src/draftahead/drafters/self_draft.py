"""The target drafts for itself with some of its layers: the same weights, the same KV cache.

The KV entries of the sequence are there already. What such a forward writes lies behind every
slot's length, where verification writes again and nothing else reads: no draft can change the
output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.tree_builder import TreeBuilder, argmax_chain, sampled_chain
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner


class SelfDraft:
    """Drafts one step with a subset of the target's layers."""

    def __init__(self, runner: ModelRunner, layers: LayerSubset) -> None:
        self._runner, self._layers = runner, layers
        self._computed = 0  # nodes of a chain behind each slot's length

    def trees(self, batch: Batch, builder: TreeBuilder) -> Draft | None:
        """Trees as deep as they pay, with confidence."""
        logits = self._expand(torch.tensor(batch.roots)[:, None])[:, 0]
        return builder.build(batch, logits, self._expand, tokens=self._layers.tokens)

    def sampled(self, batch: Batch, count: int) -> None:
        """Chains of `count` tokens by the draft sampler, which holds the draft."""
        logits, argmax = self._feed(torch.tensor(batch.roots))
        sampled_chain(batch, min(count, max(batch.max_depths)), logits, argmax, self._feed)

    def argmax(self, batch: Batch, count: int) -> Draft:
        """Chains of `count` tokens, each the most likely one."""
        logits, _ = self._feed(torch.tensor(batch.roots))
        return argmax_chain(batch, min(count, max(batch.max_depths)), logits, self._feed)

    def _expand(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self._runner.forward(tokens, parents=parents, layers=self._layers).logits

    def _feed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self._runner.forward(tokens[:, None], layers=self._layers, offset=self._computed)
        self._computed += 1
        argmax = None if output.argmax is None else output.argmax[:, 0]
        return self._layers.scatter(output.logits[:, 0], argmax)
