"""Drafts with some of the target's layers, in the target's own KV cache.

A drafting forward reads the KV entries of the sequence and writes behind each slot's length, where
verification writes again before anything is read: drafts cannot change the output.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter, DrafterContext, positive_int
from draftahead.drafters.tree_builder import MAX_DEPTH, TreeBuilder, argmax_chain, sampled_chain
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.support import text_config


class SelfDrafter(Drafter):
    """Drafts with a subset of the target's layers: trees as deep as they pay, or chains of
    `num_speculative_tokens`."""

    def __init__(
        self, context: DrafterContext, name: str, num_speculative_tokens: int | None
    ) -> None:
        self.adaptive = num_speculative_tokens is None
        self.count = positive_int(
            "num_speculative_tokens", num_speculative_tokens, default=MAX_DEPTH
        )
        self.builder = TreeBuilder(self.count)
        self.runner = context.target_runner(name)
        self.num_layers = int(text_config(self.runner.model).num_hidden_layers)

    def draft_with(self, layers: LayerSubset, batch: Batch, *, sampled: bool) -> Draft | None:
        """Trees, or chains: `sampled` by the draft sampler, which then holds the draft, or of the
        most likely tokens."""
        offsets = itertools.count()  # of a chain's next token behind each slot's length

        def expand(tokens: Tensor, parents: Tensor | None = None) -> Tensor:
            return self.runner.forward(tokens, parents=parents, layers=layers).logits

        def feed(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
            output = self.runner.forward(tokens[:, None], layers=layers, offset=next(offsets))
            argmax = None if output.argmax is None else output.argmax[:, 0]
            return layers.scatter(output.logits[:, 0], argmax)

        roots = torch.tensor(batch.roots)
        if self.adaptive:
            logits = expand(roots[:, None])[:, 0]
            return self.builder.build(batch, logits, expand, draft_to_target=layers.draft_to_target)
        logits, argmax = feed(roots)
        if not sampled:
            return argmax_chain(batch, self.count, logits, feed)
        sampled_chain(batch, self.count, logits, argmax, feed)
        return None
