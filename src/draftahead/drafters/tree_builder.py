"""Drafts from a model's logits: a tree, built level by level while a level is worth its time, or a
chain. The drafter passes a function that returns the logits after given nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import MIN_CONFIDENCE

# Levels of a tree, where the number is not asked for. Deeper levels are reached less often than
# they cost time.
MAX_DEPTH = 8
# Nodes that are expanded at each level. More find more alternatives, for a wider forward per level.
EXPANDED_PER_LEVEL = 2
CHILDREN = 4  # of each of them; their confidence falls quickly
# Factor on the measured level time whenever no further level is built: otherwise one slow
# measurement could disable further levels for good.
LEVEL_TIME_DECAY = 0.98
# Assumed probability that the next level holds an accepted node, before its logits are known. Lower
# builds shallower trees.
LEVEL_ACCEPTANCE = 0.7

# Tokens and parents [B, N] of the nodes to expand -> logits [B, N, V] after each. Each call repeats
# the nodes of the call before and appends one level: parents [-1], then [-1, 0, 0], then
# [-1, 0, 0, 1, 2]. Levels of fewer nodes are padded with roots, whose logits are not used.
ExpandFn = Callable[[Tensor, Tensor], Tensor]

# Sampled tokens [B] -> logits [B, V] after them, and their argmax [B] if it is known.
NextLogitsFn = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class TreeBuilder:
    """Builds a tree for every sequence, expanding the most confident nodes first (after EAGLE-2, Li
    et al., arXiv 2406.16858), and measures what a level takes."""

    def __init__(
        self, max_depth: int = MAX_DEPTH, expanded_per_level: int = EXPANDED_PER_LEVEL
    ) -> None:
        self.max_depth, self.expanded_per_level = max_depth, expanded_per_level
        self.level_seconds = 0.0  # moving average
        self._levels = 0  # measured

    @property
    def max_expanded(self) -> int:
        """The most nodes that `expand` is called for."""
        return 1 + self.expanded_per_level * self.max_depth

    def build(
        self,
        batch: Batch,
        logits: Tensor,
        expand: ExpandFn,
        draft_to_target: Tensor | None = None,
    ) -> Draft | None:
        """`logits` [B, V]: after the roots. `draft_to_target` [D]: the tokens of the draft
        vocabulary that logits are over."""
        trees = list(map(PartialTree, batch.roots, batch.max_depths))
        self._add_children(trees, logits[:, None], batch, draft_to_target)
        for _ in range(self.max_depth - 1):
            for partial in trees:
                partial.frontier = partial.best_leaves(self.expanded_per_level)
            reached = sum(p.confidence[node] for p in trees for node in p.frontier)
            if reached <= self.needed_confidence(batch):
                self.decay_level_time()
                break
            start = time.perf_counter()
            level_size = max(len(partial.frontier) for partial in trees)
            for partial in trees:
                partial.expand(level_size)
            nodes = torch.tensor([[p.tokens[node] for node in p.expanded] for p in trees])
            parents = torch.tensor([partial.expanded_parents for partial in trees])
            self._add_children(trees, expand(nodes, parents), batch, draft_to_target)
            self.note_level(time.perf_counter() - start)
        if not any(partial.tokens[1:] for partial in trees):
            return None
        pairs = [list(zip(p.tokens[1:], p.parents[1:], strict=True)) for p in trees]
        return Draft.trees(batch.roots, pairs, [p.confidence[1:] for p in trees])

    def _add_children(
        self, trees: list[PartialTree], logits: Tensor, batch: Batch, draft_to_target: Tensor | None
    ) -> None:
        """Adds children to the nodes of the frontier; reads back once."""
        nodes = [(b, node) for b, partial in enumerate(trees) for node in partial.frontier]
        places = [(b, trees[b].expanded.index(node)) for b, node in nodes]
        paths = [trees[b].paths[node] for b, node in nodes]
        children = top_candidates(batch, logits, places, paths, CHILDREN, draft_to_target)
        for (b, node), (probs, tokens) in zip(nodes, children, strict=True):
            trees[b].add(node, probs, tokens)

    # ------------------------------------------------------------------------ how deep it pays

    def note_level(self, seconds: float) -> None:
        self._levels += 1
        if self._levels <= 3:  # the first ones may compile or capture
            self.level_seconds = min(seconds, self.level_seconds or seconds)
        else:
            bounded = min(seconds, 3 * self.level_seconds)  # a single disturbance counts little
            self.level_seconds += 0.2 * (bounded - self.level_seconds)

    def needed_confidence(self, batch: Batch) -> float:
        """The confidence, summed over the nodes to expand, from which a level is worth its time."""
        if batch.step_cost is None:
            return 0.0
        size = len(batch.sequences)
        return self.level_seconds * size / (LEVEL_ACCEPTANCE * batch.step_cost.of(size))

    def decay_level_time(self) -> None:
        """To be called when a tree ends before its last level."""
        self.level_seconds *= LEVEL_TIME_DECAY


class PartialTree:
    """One sequence's tree while it is built. Node 0 is the root."""

    def __init__(self, root: int, max_depth: int) -> None:
        self.tokens, self.parents, self.confidence = [root], [-1], [1.0]
        self.paths: list[tuple[int, ...]] = [()]  # the tokens from below the root to each node
        self.frontier = [0] if max_depth else []  # nodes of the level that is expanded next
        # Nodes that were expanded, and the index of each one's parent in this list. The root pads
        # levels to the size of the largest tree's.
        self.expanded, self.expanded_parents = [0], [-1]
        self._max_depth = max_depth

    def add(self, node: int, probs: Sequence[float], tokens: Sequence[int]) -> None:
        """Children of a node."""
        for prob, token in zip(probs, tokens, strict=True):
            if self.confidence[node] * prob >= MIN_CONFIDENCE:
                self.tokens.append(token)
                self.parents.append(node)
                self.confidence.append(self.confidence[node] * prob)
                self.paths.append((*self.paths[node], token))

    def best_leaves(self, count: int) -> list[int]:
        """The most confident nodes that can have children and have none."""
        leaves = [
            node
            for node in range(1, len(self.tokens))
            if node not in self.expanded and len(self.paths[node]) < self._max_depth
        ]
        return sorted(sorted(leaves, key=lambda node: -self.confidence[node])[:count])

    def expand(self, level_size: int) -> None:
        """Adds the frontier to the expanded nodes, as a level of `level_size` nodes."""
        padding = [0] * (level_size - len(self.frontier))
        self.expanded_parents += [self.expanded.index(self.parents[n]) for n in self.frontier]
        self.expanded_parents += padding
        self.expanded += self.frontier + padding


def top_candidates(
    batch: Batch,
    logits: Tensor,
    places: Sequence[tuple[int, int]],
    paths: Sequence[tuple[int, ...]],
    count: int,
    draft_to_target: Tensor | None,
) -> list[tuple[list[float], list[int]]]:
    """Probabilities and tokens of the best `count` by DraftSampler.noise_coupled_topk, for the
    logits [B, N, D] at each of `places` (b, n). Reads back once."""
    sequences, index = [b for b, _ in places], [n for _, n in places]
    probs, tokens = batch.draft_sampler.noise_coupled_topk(
        logits[sequences, index], sequences, paths, count, draft_to_target
    )
    # In float64, which holds every token id exactly.
    pairs = torch.stack([probs.double(), tokens.double()], 1).tolist()
    return [(best, [int(token) for token in ids]) for best, ids in pairs]


def sampled_chain(
    batch: Batch,
    count: int,
    logits: Tensor,
    argmax: Tensor | None,
    feed: NextLogitsFn,
) -> None:
    """Draws up to `count` tokens for every sequence; the draft sampler holds the draft. Tokens stay
    on the device."""
    max_depths = batch.max_depths
    active = None if all(max_depths) else torch.tensor([depth > 0 for depth in max_depths])
    for left in reversed(range(min(count, max(max_depths)))):
        tokens = batch.draft_sampler.draw(logits, active, argmax)
        if left:
            logits, argmax = feed(tokens)


def argmax_chain(batch: Batch, count: int, logits: Tensor, feed: NextLogitsFn) -> Draft:
    """Up to `count` tokens for every sequence, each what the target would emit if it had these
    logits. For drafters whose distribution is not reproducible (layer_skip before and after its
    search): sampled drafts would make the text irreproducible."""
    sequences = range(len(batch.sequences))
    chains: list[tuple[int, ...]] = [() for _ in sequences]
    for left in reversed(range(min(count, max(batch.max_depths)))):
        tokens = batch.draft_sampler.noise_coupled_topk(logits, sequences, chains, 1)[1][:, 0]
        chains = [(*chain, token) for chain, token in zip(chains, tokens.tolist(), strict=True)]
        if left:
            logits, _ = feed(tokens)
    pairs = zip(chains, batch.max_depths, strict=True)
    return Draft.chains(batch.roots, [chain[:max_depth] for chain, max_depth in pairs])
