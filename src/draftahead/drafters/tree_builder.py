"""Guesses that a model makes: a tree grown as far as it pays, or a chain that is drawn.

For every drafter that has a law of its own for the next token. How it gets that law is its affair:
it hands over a function that says what comes after the nodes so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftahead.core.types import Batch, Draft

DEEPEST = 8  # levels, where the number is left to it
A_LEVEL = 2  # nodes of a tree that it goes on from at each level
CHILDREN = 4  # of each of them
LEAST = 0.02  # likelihood below which a guess is not worth its row
FORGET = 0.98  # of the time of a level, whenever it was not run for it
GOOD = 0.7  # chance that the next level holds a right guess, before that is known

# Tokens and parents [B, N] of the nodes that the trees go on from -> logits [B, N, V] after each.
# Node 0 is the root. Every call brings the nodes of the call before in the same places, and behind
# them new ones; rows with fewer nodes are filled up with roots, whose logits nobody reads.
Expand = Callable[[Tensor, Tensor], Tensor]

# Drawn tokens [B] -> logits [B, V] after them, and their argmax [B] if it is known.
Feed = Callable[[Tensor], tuple[Tensor, Tensor | None]]


class TreeBuilder:
    """Grows a tree for every text, always from the nodes that the law makes the likeliest (after
    EAGLE-2, Li et al., arXiv 2406.16858), and keeps in mind what a level takes."""

    def __init__(self, deepest: int = DEEPEST, a_level: int = A_LEVEL) -> None:
        self.deepest, self.a_level = deepest, a_level
        self.level_seconds = 0.0  # of one more level, as of late
        self.levels = 0  # that this is known from

    @property
    def most_nodes(self) -> int:
        """Of the trees that `expand` is asked for."""
        return 1 + self.a_level * self.deepest

    def grow(
        self,
        batch: Batch,
        logits: Tensor,
        expand: Expand,
        max_depths: Sequence[int] | None = None,
        tokens: Tensor | None = None,
    ) -> Draft | None:
        """`logits` [B, V]: after the roots. `rooms`: the batch's, or 0 for rows without a tree.
        `tokens` [D]: what logits over a draft vocabulary are for."""
        max_depths = batch.max_depths if max_depths is None else max_depths
        trees = [Tree(root) for root in batch.roots]
        self._branch(
            trees, [[0] if room else [] for room in max_depths], logits[:, None], batch, tokens
        )
        for _ in range(self.deepest - 1):
            frontier = [
                tree.frontier(room, self.a_level)
                for tree, room in zip(trees, max_depths, strict=True)
            ]
            if not self._pays(trees, frontier, batch):
                break
            start = time.perf_counter()
            for tree, nodes in zip(trees, frontier, strict=True):
                tree.expanded += nodes
            width = max(len(tree.expanded) for tree in trees)
            block = torch.tensor([tree.block(width) for tree in trees])
            parents = torch.tensor([tree.block_parents(width) for tree in trees])
            self._branch(trees, frontier, expand(block, parents), batch, tokens)
            self.note_level(time.perf_counter() - start)
        if not any(tree.tokens[1:] for tree in trees):
            return None
        guesses = [list(zip(t.tokens[1:], t.parents[1:], strict=True)) for t in trees]
        return Draft.trees(batch.roots, guesses, [tree.likely[1:] for tree in trees])

    def _branch(
        self,
        trees: list[Tree],
        frontier: list[list[int]],
        logits: Tensor,
        batch: Batch,
        ids: Tensor | None,
    ) -> None:
        """Children for the nodes that the pass has just been over; reads back once."""
        at = [(row, node) for row, nodes in enumerate(frontier) for node in nodes]
        rows = [row for row, _ in at]
        places = [trees[row].expanded.index(node) for row, node in at]
        paths = [trees[row].path(node) for row, node in at]
        weights, tokens = batch.draft_sampler.noise_coupled_topk(
            logits[rows, places], rows, paths, CHILDREN, ids
        )
        found = torch.cat([weights, tokens.to(weights)], -1).tolist()
        for (row, node), children in zip(at, found, strict=True):
            trees[row].add(node, children)

    def note_level(self, seconds: float) -> None:
        self.levels += 1
        if self.levels <= 3:  # the first may compile or record
            self.level_seconds = min(seconds, self.level_seconds or seconds)
        else:
            usual = min(seconds, 3 * self.level_seconds)
            self.level_seconds += 0.2 * (usual - self.level_seconds)

    def _pays(self, trees: list[Tree], frontier: list[list[int]], batch: Batch) -> bool:
        """Whether one more level promises more than it takes."""
        reached = sum(
            tree.likely[node] for tree, nodes in zip(trees, frontier, strict=True) for node in nodes
        )
        if reached > self.enough(batch):
            return True
        self.stopped_early()
        return False

    def enough(self, batch: Batch) -> float:
        """The likelihood that a level must have reached to be worth its time."""
        if batch.step_cost is None:
            return 0.0
        texts = len(batch.sequences)
        return self.level_seconds * texts / (GOOD * batch.step_cost.of(texts))

    def stopped_early(self) -> None:
        self.level_seconds *= FORGET  # or one bad moment would be believed for ever


@dataclass
class Tree:
    """One text's guesses while they grow. Node 0 is the root."""

    root: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    likely: list[float] = field(default_factory=lambda: [1.0])  # reached and right, as we think
    expanded: list[int] = field(default_factory=lambda: [0])  # the nodes it went on from

    def __post_init__(self) -> None:
        self.tokens = [self.root]

    def add(self, node: int, found: list[float]) -> None:
        """Children of a node: likelihoods, and behind them the tokens."""
        half = len(found) // 2
        for chance, token in zip(found[:half], found[half:], strict=True):
            if self.likely[node] * chance >= LEAST:
                self.tokens.append(int(token))
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.likely.append(self.likely[node] * chance)

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from below the root to a node."""
        found: list[int] = []
        while node:
            found.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(found))

    def frontier(self, room: int, most: int) -> list[int]:
        """The likeliest nodes that can have children and have none."""
        leaves = [
            node
            for node in range(1, len(self.tokens))
            if node not in self.expanded and self.depths[node] < room
        ]
        return sorted(sorted(leaves, key=lambda node: -self.likely[node])[:most])

    def block(self, width: int) -> list[int]:
        tokens = [self.tokens[node] for node in self.expanded]
        return tokens + [self.root] * (width - len(tokens))

    def block_parents(self, width: int) -> list[int]:
        place = {node: index for index, node in enumerate(self.expanded)}
        parents = [place.get(self.parents[node], -1) for node in self.expanded]
        return parents + [0] * (width - len(parents))


def draw_chain(
    batch: Batch,
    count: int,
    logits: Tensor,
    best: Tensor | None,
    feed: Feed,
    going: Tensor | None = None,
) -> None:
    """Draws so many guesses for every text, or for those that are `going` [B]. The dice hold the
    draft. The tokens may still be unknown to the host when they are fed on."""
    for depth in range(count):
        tokens = batch.draft_sampler.draw(logits, going, best)
        if depth + 1 < count:
            logits, best = feed(tokens)


def guess_chain(batch: Batch, count: int, logits: Tensor, feed: Feed) -> Draft:
    """So many guesses for every text, each what the target would say by this law. For drafters
    whose law may be another when the same text is asked for again: what is drawn would be, too."""
    rows = range(len(batch.sequences))
    chains: list[list[int]] = [[] for _ in rows]
    for depth in range(count):
        paths = [tuple(chain) for chain in chains]
        tokens = batch.draft_sampler.noise_coupled_topk(logits, rows, paths, 1)[1][:, 0]
        for chain, token in zip(chains, tokens.tolist(), strict=True):
            chain.append(token)
        if depth + 1 < count:
            logits, _ = feed(tokens)
    guesses = [chain[:room] for chain, room in zip(chains, batch.max_depths, strict=True)]
    return Draft.chains(batch.roots, guesses)


def likeliest_part(draft: Draft, roots: Sequence[int], count: int) -> Draft:
    """Of every tree the guesses that are the likeliest by its claims, without those claims: asked
    for as they are."""
    assert draft.confidence is not None
    trees = []
    for row, confidence in enumerate(draft.confidence):
        ranked = sorted(range(len(confidence)), key=lambda i: (-confidence[i], i))
        place = {0: 0}
        tree: list[tuple[int, int]] = []
        for node in sorted(i + 1 for i in ranked[:count]):
            tree.append((draft.host_tokens[row][node], place[draft.host_parents[row][node]]))
            place[node] = len(tree)
        trees.append(tree)
    return Draft.trees(roots, trees)
