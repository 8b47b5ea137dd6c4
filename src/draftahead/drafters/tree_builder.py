"""Drafts by a model: a tree, built level by level as deep as it pays, or a chain.

For every drafter that has a distribution of its own for the next token. How it computes that is its
own affair: it passes a function that returns the logits after given nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftahead.core import tree
from draftahead.core.draft import Draft
from draftahead.core.types import Batch

# Levels of a tree, where the number is not asked for. Deeper levels are reached less often than
# they cost time.
MAX_DEPTH = 8
# Nodes that are expanded at each level. More find more alternatives, for a wider forward per level.
EXPANDED_PER_LEVEL = 2
CHILDREN = 4  # of each of them; their confidence falls quickly
# Nodes below this confidence are dropped: they do not repay their share of the verification.
MIN_CONFIDENCE = 0.02
# A level's measured time is multiplied by this whenever the tree stops before it: one slow moment
# must not keep further levels out for ever.
FORGET = 0.98
# Assumed probability that the next level holds an accepted node, before its logits are known. Lower
# builds shallower trees.
ACCEPTED_NEXT = 0.7

# Tokens and parents [B, N] of the nodes that are expanded -> logits [B, N, V] after each. Node 0 is
# the root. Every call brings the nodes of the call before in the same places, and behind them new
# ones; trees with fewer nodes are filled up with roots, whose logits are not used.
Expand = Callable[[Tensor, Tensor], Tensor]

# Sampled tokens [B] -> logits [B, V] after them, and their argmax [B] if it is known.
Feed = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class TreeBuilder:
    """Builds a tree for every sequence, expanding the most confident nodes first (after EAGLE-2, Li
    et al., arXiv 2406.16858), and measures what a level takes."""

    def __init__(
        self, max_depth: int = MAX_DEPTH, expanded_per_level: int = EXPANDED_PER_LEVEL
    ) -> None:
        self.max_depth, self.expanded_per_level = max_depth, expanded_per_level
        self.level_seconds = 0.0  # of one more level, as of late
        self._levels = 0  # that this is measured from

    @property
    def max_expanded(self) -> int:
        """The most nodes that `expand` is called for."""
        return 1 + self.expanded_per_level * self.max_depth

    def build(
        self,
        batch: Batch,
        logits: Tensor,
        expand: Expand,
        max_depths: Sequence[int] | None = None,
        tokens: Tensor | None = None,
    ) -> Draft | None:
        """`logits` [B, V]: after the roots. `max_depths`: the batch's, or 0 for sequences without a
        tree. `tokens` [D]: the draft vocabulary that logits are over."""
        max_depths = batch.max_depths if max_depths is None else max_depths
        trees = [PartialTree(root) for root in batch.roots]
        frontiers = [[0] if depth else [] for depth in max_depths]
        self._add_children(trees, frontiers, logits[:, None], batch, tokens)
        for _ in range(self.max_depth - 1):
            frontiers = [
                partial.frontier(depth, self.expanded_per_level)
                for partial, depth in zip(trees, max_depths, strict=True)
            ]
            if not self._pays(trees, frontiers, batch):
                break
            start = time.perf_counter()
            for partial, nodes in zip(trees, frontiers, strict=True):
                partial.expanded += nodes
            width = max(len(partial.expanded) for partial in trees)
            block = torch.tensor([partial.expanded_tokens(width) for partial in trees])
            parents = torch.tensor([partial.expanded_parents(width) for partial in trees])
            self._add_children(trees, frontiers, expand(block, parents), batch, tokens)
            self.note_level(time.perf_counter() - start)
        if not any(partial.tokens[1:] for partial in trees):
            return None
        guesses = [list(zip(p.tokens[1:], p.parents[1:], strict=True)) for p in trees]
        return Draft.trees(batch.roots, guesses, [p.confidence[1:] for p in trees])

    def _add_children(
        self,
        trees: list[PartialTree],
        frontiers: list[list[int]],
        logits: Tensor,
        batch: Batch,
        tokens: Tensor | None,
    ) -> None:
        """Children of the nodes that were just expanded; reads back once."""
        at = [(b, node) for b, nodes in enumerate(frontiers) for node in nodes]
        sequences = [b for b, _ in at]
        index = [trees[b].expanded.index(node) for b, node in at]
        paths = [trees[b].path(node) for b, node in at]
        probs, children = batch.draft_sampler.noise_coupled_topk(
            logits[sequences, index], sequences, paths, CHILDREN, tokens
        )
        found = torch.cat([probs, children.to(probs)], -1).tolist()
        for (b, node), values in zip(at, found, strict=True):
            half = len(values) // 2
            trees[b].add(node, values[:half], values[half:])

    # ------------------------------------------------------------------------ how deep it pays

    def note_level(self, seconds: float) -> None:
        self._levels += 1
        if self._levels <= 3:  # the first ones may compile or capture
            self.level_seconds = min(seconds, self.level_seconds or seconds)
        else:
            usual = min(seconds, 3 * self.level_seconds)
            self.level_seconds += 0.2 * (usual - self.level_seconds)

    def _pays(self, trees: list[PartialTree], frontiers: list[list[int]], batch: Batch) -> bool:
        """Whether one more level is expected to gain more than it takes."""
        reached = sum(
            partial.confidence[node]
            for partial, nodes in zip(trees, frontiers, strict=True)
            for node in nodes
        )
        if reached > self.needed_confidence(batch):
            return True
        self.note_stop()
        return False

    def needed_confidence(self, batch: Batch) -> float:
        """The confidence, summed over the nodes to expand, from which a level is worth its time."""
        if batch.step_cost is None:
            return 0.0
        size = len(batch.sequences)
        return self.level_seconds * size / (ACCEPTED_NEXT * batch.step_cost.of(size))

    def note_stop(self) -> None:
        """The tree ended before its last level."""
        self.level_seconds *= FORGET


@dataclass
class PartialTree:
    """One sequence's tree while it is built. Node 0 is the root."""

    root: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    confidence: list[float] = field(default_factory=lambda: [1.0])
    expanded: list[int] = field(default_factory=lambda: [0])  # nodes that have children, or may

    def __post_init__(self) -> None:
        self.tokens = [self.root]

    def add(self, node: int, probs: Sequence[float], tokens: Sequence[float]) -> None:
        """Children of a node."""
        for prob, token in zip(probs, tokens, strict=True):
            if self.confidence[node] * prob >= MIN_CONFIDENCE:
                self.tokens.append(int(token))
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.confidence.append(self.confidence[node] * prob)

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from below the root to a node."""
        found: list[int] = []
        while node:
            found.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(found))

    def frontier(self, max_depth: int, count: int) -> list[int]:
        """The most confident nodes that can have children and have none."""
        leaves = [
            node
            for node in range(1, len(self.tokens))
            if node not in self.expanded and self.depths[node] < max_depth
        ]
        return sorted(sorted(leaves, key=lambda node: -self.confidence[node])[:count])

    def expanded_tokens(self, width: int) -> list[int]:
        tokens = [self.tokens[node] for node in self.expanded]
        return tokens + [self.root] * (width - len(tokens))

    def expanded_parents(self, width: int) -> list[int]:
        parents = tree.reindexed(self.parents, self.expanded)
        return parents + [0] * (width - len(parents))


def sampled_chain(
    batch: Batch,
    count: int,
    logits: Tensor,
    argmax: Tensor | None,
    feed: Feed,
    active: Tensor | None = None,
) -> None:
    """Draws `count` tokens for every sequence, or for those that are `active` [B]; the draft
    sampler holds the draft. The tokens may be unknown to the host when they are fed."""
    for depth in range(count):
        tokens = batch.draft_sampler.draw(logits, active, argmax)
        if depth + 1 < count:
            logits, argmax = feed(tokens)


def argmax_chain(batch: Batch, count: int, logits: Tensor, feed: Feed) -> Draft:
    """`count` tokens for every sequence, each what the target would emit if it had these logits.
    For drafters whose distribution may be another one when the same text is decoded again: drawn
    tokens would be others, too."""
    sequences = range(len(batch.sequences))
    chains: list[list[int]] = [[] for _ in sequences]
    for depth in range(count):
        paths = [tuple(chain) for chain in chains]
        _, top = batch.draft_sampler.noise_coupled_topk(logits, sequences, paths, 1)
        tokens = top[:, 0]
        for chain, token in zip(chains, tokens.tolist(), strict=True):
            chain.append(token)
        if depth + 1 < count:
            logits, _ = feed(tokens)
    guesses = [chain[:most] for chain, most in zip(chains, batch.max_depths, strict=True)]
    return Draft.chains(batch.roots, guesses)
