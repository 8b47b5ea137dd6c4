"""A draft: a tree of tokens for each sequence, which the target verifies in one forward.

Shapes: B sequences of the batch, N nodes of a draft (node 0 is the root), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from draftahead.core import tree

# Confidence 1.0 as the integer that a device stores: a tree built on a device is one int64 tensor.
CONFIDENCE_SCALE = 1 << 20


@dataclass(frozen=True)
class Draft:
    """A tree of tokens for each sequence, known to the host. Node 0 is the root: the last
    token of the sequence."""

    tokens: list[list[int]]  # [B][N]
    parents: list[list[int]]  # [B][N]; -1 for the root; a parent stands before its children
    num_nodes: list[int]  # [B] the root included; the nodes after them are padding
    # [b][n] the probability that node n + 1 is accepted; at most that of its parent. A drafter that
    # states it leaves it to the policy how many nodes are verified.
    confidence: list[list[float]] | None = None
    probs: Tensor | None = None  # [B, N, V] the distribution that a node's children were drawn from

    @cached_property
    def token_tensor(self) -> Tensor:
        """[B, N] int64."""
        return torch.tensor(self.tokens)

    @cached_property
    def parent_tensor(self) -> Tensor:
        """[B, N] int64."""
        return torch.tensor(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no tree branches."""
        return all(parents == [*range(-1, len(parents) - 1)] for parents in self.parents)

    @property
    def width(self) -> int:
        """N: the nodes of the largest tree, to which the others are padded."""
        return len(self.tokens[0])

    def to_host(self, extra: Tensor | None = None) -> tuple[Draft, list[list[int]]]:
        """The draft and `extra` [B, M] on the host: see DeviceDraft."""
        return self, [] if extra is None else extra.tolist()

    def subset(self, kept: Sequence[Sequence[int]]) -> Draft:
        """The draft with these nodes only: ascending for each tree, the root first, none without
        its parent."""
        if all(len(nodes) == size for nodes, size in zip(kept, self.num_nodes, strict=True)):
            return self
        assert self.probs is None, "leaving out drawn tokens would bias the output"
        trees, confidence = [], []
        for b, nodes in enumerate(kept):
            parents = tree.reindex(self.parents[b], nodes)
            tokens = [self.tokens[b][n] for n in nodes[1:]]
            trees.append(list(zip(tokens, parents[1:], strict=True)))
            if self.confidence is not None:
                confidence.append([self.confidence[b][n - 1] for n in nodes[1:]])
        roots = [tokens[0] for tokens in self.tokens]
        return Draft.trees(roots, trees, confidence if self.confidence is not None else None)

    @staticmethod
    def root_only(roots: Sequence[int]) -> Draft:
        """A draft without drafted tokens: plain decoding."""
        return Draft([[root] for root in roots], [[-1]] * len(roots), [1] * len(roots))

    @staticmethod
    def chains(
        roots: Sequence[int],
        guesses: Sequence[Sequence[int]],
        confidence: list[list[float]] | None = None,
    ) -> Draft:
        """A draft without branches: the guesses of each sequence follow its root."""
        trees = [[(token, node) for node, token in enumerate(chain)] for chain in guesses]
        return Draft.trees(roots, trees, confidence)

    @staticmethod
    def trees(
        roots: Sequence[int],
        trees: Sequence[Sequence[tuple[int, int]]],
        confidence: list[list[float]] | None = None,
    ) -> Draft:
        """A draft from (token, parent) pairs; parent 0 is the root, 1 the first pair."""
        is_chain = all(parent == node for pairs in trees for node, (_, parent) in enumerate(pairs))
        num_nodes, tokens, parents = [1 + len(pairs) for pairs in trees], [], []
        for root, pairs in zip(roots, trees, strict=True):
            # Padding continues a chain, so that it stays one; in a tree it hangs from the root, so
            # that it does not make the tree deeper.
            padding = [n if is_chain else 0 for n in range(len(pairs), max(num_nodes) - 1)]
            tokens.append([root, *[token for token, _ in pairs], *[root] * len(padding)])
            parents.append([-1, *[parent for _, parent in pairs], *padding])
        return Draft(tokens, parents, num_nodes, confidence)


class DeviceTimer(Protocol):
    """Times consecutive work of a device."""

    def mark(self) -> None:
        """Ends a lap and begins the next, in the device's stream."""

    def laps(self) -> list[float]:
        """Seconds of each lap."""


@dataclass(frozen=True)
class DeviceDraft:
    """A draft on a device. It is verified without a copy on the host; its tokens are copied to the
    host together with the verdict, in one synchronisation."""

    roots: list[int]
    token_tensor: Tensor  # [B, N] int64
    num_nodes: list[int]
    probs: Tensor | None = None  # [B, N, V] as in Draft
    # [B, 3, N] int64: tokens, parents, and confidence in units of 1 / CONFIDENCE_SCALE. None: a
    # chain without confidence.
    trees: Tensor | None = None
    timer: DeviceTimer | None = None  # two laps: build, verify

    @property
    def is_chain(self) -> bool:
        return self.trees is None

    @property
    def parent_tensor(self) -> Tensor:
        """[B, N] int64; on the device, where trees are."""
        if self.trees is not None:
            return self.trees[:, 1]
        return torch.arange(-1, self.width - 1).expand(len(self.roots), self.width)

    @property
    def width(self) -> int:
        return self.token_tensor.shape[1]

    @staticmethod
    def of_trees(roots: list[int], trees: Tensor, timer: DeviceTimer) -> DeviceDraft:
        """Trees that a device is still building."""
        batch, _, width = trees.shape
        return DeviceDraft(roots, trees[:, 0], [width] * batch, trees=trees, timer=timer)

    def to_host(self, extra: Tensor | None = None) -> tuple[Draft, list[list[int]]]:
        """The draft on the host and `extra` [B, M] with it, in one copy if both are on one device.

        Trees were verified before the host saw them: one that is invalid becomes its root alone.
        """
        packed = self.token_tensor if self.trees is None else self.trees.flatten(1)
        extra = packed[:, :0] if extra is None else extra.to(packed.device)
        rows = torch.cat([packed, extra], 1).tolist()
        extra_rows = [row[packed.shape[1] :] for row in rows]
        width, num_nodes = self.width, list(self.num_nodes)
        if self.trees is None:
            tokens, parents = [row[:width] for row in rows], [tree.chain(width)] * len(rows)
            return Draft(tokens, parents, num_nodes, probs=self.probs), extra_rows
        tokens, parents, confidence = [], [], []
        for b, (root, row) in enumerate(zip(self.roots, rows, strict=True)):
            tokens.append([root, *row[1:width]])
            parents.append([-1, *row[width + 1 : 2 * width]])
            if not tree.is_valid(parents[b]):
                tokens[b], parents[b] = [root] * width, [-1] + [0] * (width - 1)
                num_nodes[b] = 1
            values = row[2 * width + 1 : 2 * width + num_nodes[b]]
            stated = [max(0.0, value / CONFIDENCE_SCALE) for value in values]
            confidence.append(tree.limit_to_parents(stated, parents[b]))
        return Draft(tokens, parents, num_nodes, confidence), extra_rows
