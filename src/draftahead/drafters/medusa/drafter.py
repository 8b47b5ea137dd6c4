"""Medusa heads draft from the target's last hidden state (Cai et al., arXiv 2401.10774).

With `num_speculative_tokens` they sample a chain, one token per head. Otherwise they draft a tree
of the candidates of all heads: with the given choices, or else the most confident nodes.

They read the hidden state of the token before the root, which the forward that verified it has
stored. A prefill computes no last hidden states, so the first step has no draft.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.backends.cpu.linear import SmallBatchLinears
from draftahead.backends.cpu.threads import torch_single_threaded
from draftahead.core.checks import shown
from draftahead.core.device import small_tensor
from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter, DrafterContext, positive_int, with_drafts_for
from draftahead.drafters.candidates import DEFAULT_TREE_NODES
from draftahead.drafters.medusa import io
from draftahead.drafters.medusa.heads import MedusaHeads
from draftahead.drafters.medusa.tree import (
    MedusaNode,
    fixed_tree,
    likeliest_tree,
    validated_choices,
)
from draftahead.drafters.registry import register
from draftahead.drafters.tree_builder import sampled_chain, top_candidates
from draftahead.errors import ConfigError
from draftahead.models.support import text_config
from draftahead.sampling.draft_sampler import scatter_to_vocab

# Candidates of each head if no choices are given. More find unlikely tokens, and take longer to
# copy from the device.
CANDIDATES_PER_HEAD = 8
# Least product of the heads' probabilities for a node of an adaptive tree. Lower adds nodes that do
# not repay their share of the verification.
MIN_PRODUCT = 0.01


@register("medusa")
class Medusa(Drafter):
    """Drafts with trained Medusa heads."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        model: Any,
        num_speculative_tokens: int | None = None,
        tree: int | list[list[int]] | None = None,
    ) -> None:
        """A tree that is asked for, by its number of nodes or its choices, is verified as it is; of
        one that came with the heads, the policy verifies as much as pays."""
        if tree is not None and num_speculative_tokens is not None:
            raise ConfigError("give medusa 'tree' or 'num_speculative_tokens', not both")
        self.target = context.target_runner("medusa")
        self.heads = heads = _heads(model, self.target.model)
        self.adaptive = num_speculative_tokens is None and tree is None
        self.count: int | None = None  # tokens of a chain that is sampled
        if num_speculative_tokens is not None:
            self.count = positive_int("num_speculative_tokens", num_speculative_tokens, len(heads))
        is_size = isinstance(tree, Integral)
        self.max_nodes = positive_int("tree", tree) if is_size else DEFAULT_TREE_NODES
        self.choices = list(heads.choices) if tree is None else []
        if tree is not None and not is_size:
            self.choices = validated_choices("tree", tree, len(heads))
        self.num_candidates = 1 + max(
            (max(choice) for choice in self.choices), default=CANDIDATES_PER_HEAD - 1
        )
        self.lm_head = heads.target_lm_head(self.target.model)
        modules = [heads] if self.lm_head is None else [heads, self.lm_head]
        self._linears = SmallBatchLinears(nn.ModuleList(modules))
        self._slots = torch.arange(context.max_batch, device=context.device)
        self._aux_layers = (int(text_config(self.target.model).num_hidden_layers),)
        self.target.add_aux_layers(self._aux_layers)

    @torch_single_threaded()
    def propose(self, batch: Batch) -> Draft | None:
        batch = with_drafts_for(batch, (s.num_generated > 0 for s in batch.sequences))
        if not any(batch.max_depths):
            return None
        logits = self._logits(batch)
        if self.count is None:
            return self._build_trees(batch, logits)
        draft_to_target, vocab_size = self.heads.draft_to_target, self.target.vocab_size
        by_head = (scatter_to_vocab(x, draft_to_target, vocab_size) for x in logits.unbind(1))
        first = next(by_head)
        sampled_chain(batch, self.count, first, None, lambda _: (next(by_head), None))
        return None  # the draft sampler holds the draft

    def _logits(self, batch: Batch) -> Tensor:
        """Logits of every head for every sequence, over the draft vocabulary: [B, K, D]."""
        before_root = [[max(0, len(sequence.tokens) - 2)] for sequence in batch.sequences]
        entries = small_tensor(before_root, torch.int64, self._slots.device)
        slots = self._slots[: len(before_root)]
        hidden = self.target.hidden_states(self._aux_layers, slots, entries)[:, 0, 0]
        with self._linears.patched():
            return self.heads.logits(hidden, self.lm_head)[..., : self.target.vocab_size]

    def _build_trees(self, batch: Batch, logits: Tensor) -> Draft | None:
        trees, confidence = [], []
        for heads in self._candidates(batch, logits):
            nodes = self._tree([probs for probs, _ in heads])
            tokens = [heads[len(node.path) - 1][1][node.path[-1]] for node in nodes]
            trees.append([(t, node.parent) for t, node in zip(tokens, nodes, strict=True)])
            confidence.append([node.confidence for node in nodes])
        if not any(trees):
            return None
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def _tree(self, probs: Sequence[Sequence[float]]) -> list[MedusaNode]:
        if self.choices:
            return fixed_tree(self.choices, probs)
        return likeliest_tree(probs, self.max_nodes, MIN_PRODUCT if self.adaptive else 0.0)

    def _candidates(
        self, batch: Batch, logits: Tensor
    ) -> list[list[tuple[list[float], list[int]]]]:
        """For each sequence and each head up to its depth: the probabilities of the best
        candidates, and their tokens. Reads back once."""
        num_heads = [min(len(self.heads), max_depth) for max_depth in batch.max_depths]
        pairs = [(b, head) for b, count in enumerate(num_heads) for head in range(count)]
        chains = self._assumed_chains(batch, logits)
        paths = [tuple(chains[b][:head]) for b, head in pairs]
        vocab = self.heads.draft_to_target
        candidates = iter(top_candidates(batch, logits, pairs, paths, self.num_candidates, vocab))
        return [list(itertools.islice(candidates, count)) for count in num_heads]

    def _assumed_chains(self, batch: Batch, logits: Tensor) -> list[list[int]]:
        """The path that a head's predictions are assumed to follow, [B][K]: the best token of every
        head. Only processors depend on its tokens; without them only its length counts."""
        if not batch.modifies_logits:
            return [[0] * len(self.heads)] * len(batch.sequences)
        best = logits.argmax(-1)
        tokens = best if self.heads.draft_to_target is None else self.heads.draft_to_target[best]
        return tokens.tolist()


def _heads(model: Any, target: Any) -> MedusaHeads:
    if isinstance(model, str | Path):
        return io.load(model, target)
    if not isinstance(model, MedusaHeads):
        raise ConfigError(
            f"drafter 'medusa': {shown(model)} is no Medusa heads and no path of them"
        )
    hidden_size = int(text_config(target).hidden_size)
    if model.hidden_size != hidden_size:
        raise ConfigError(
            f"these heads are for a hidden size of {model.hidden_size}, and the target's is "
            f"{hidden_size}"
        )
    return copy.deepcopy(model).to(device=target.device, dtype=target.dtype)
