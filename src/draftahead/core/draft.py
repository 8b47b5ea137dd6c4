"""A draft: a tree of guesses a row, which the target scores in one pass.

Shapes: B rows of the batch, N nodes of a draft (node 0 is the root), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CONFIDENCE_SCALE = 1 << 20  # a likelihood of 1, where a device hands it over as a whole number


class DeviceTimer(Protocol):
    """Times one thing after the other."""

    def mark(self) -> None:
        """Here one ends and another begins."""

    def laps(self) -> list[float]:
        """Seconds of each of them."""


class DeviceDraft(NamedTuple):
    """Trees under way on a device: nobody has looked at them when they are scored."""

    roots: list[int]
    trees: Tensor  # [B, 3, N] int64: tokens, parents, and claims as parts of SURE
    clock: DeviceTimer  # of the device: for growing them, and for scoring them


@dataclass(frozen=True)
class Draft:
    """A tree of guesses a row. Node 0 is the root: the last agreed token."""

    tokens: Tensor  # [B, N] int64; may lie on a device and not be known to the host yet
    # [B, N] int64; parents[:, 0] is -1, a parent stands before its children; may lie there as well
    parents: Tensor
    num_nodes: list[int]  # nodes of each row, the root included; the rest is padding
    probs: Tensor | None = None  # [B, N, V]: what the children of a node were drawn from
    # [b][n]: how likely node n + 1 seems to be reached and right; no child is likelier than its
    # parent. A drafter that says so leaves it to the policy how much of the draft is scored.
    confidence: list[list[float]] | None = None
    on_device: DeviceDraft | None = None  # trees that a device still works on

    @cached_property
    def host_tokens(self) -> list[list[int]]:
        """The tokens, known to the host."""
        if self.on_device is not None:
            return self._settled(self.on_device.trees.flatten(1).tolist())[0]
        return self.tokens.tolist()

    @cached_property
    def host_parents(self) -> list[list[int]]:
        """The parents as lists."""
        if self.on_device is not None:
            return self._settled(self.on_device.trees.flatten(1).tolist())[1]
        return self.parents.tolist()

    @cached_property
    def is_chain(self) -> bool:
        """Whether no row branches."""
        chain = list(range(-1, self.parents.shape[1] - 1))
        return all(row == chain for row in self.host_parents)

    def read_with(self, found: Tensor) -> list[list[int]]:
        """Reads `found` [B, M] back from the device, and the tokens along with it: one wait."""
        if self.on_device is not None and "host_tokens" not in self.__dict__:
            trees = self.on_device.trees.flatten(1)
            both = torch.cat([trees, found], 1).tolist()
            self._settled(both)
            return [row[trees.shape[1] :] for row in both]
        if self.tokens.device != found.device or "host_tokens" in self.__dict__:
            return found.tolist()
        width = self.tokens.shape[1]
        both = torch.cat([self.tokens, found], 1).tolist()
        self.__dict__["host_tokens"] = [row[:width] for row in both]
        return [row[width:] for row in both]

    def _settled(self, read: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """What the device has grown, by [tokens, parents, claims] a row. It was scored as it was,
        unseen: a row that is no tree after all counts as its root alone."""
        assert self.on_device is not None
        width, roots = self.tokens.shape[1], self.on_device.roots
        rows, above, confidence = [], [], []
        for b, (root, row) in enumerate(zip(roots, read, strict=True)):
            tokens, parents = [root, *row[1:width]], [-1, *row[width + 1 : 2 * width]]
            if not all(0 <= parent < node for node, parent in enumerate(parents[1:], 1)):
                tokens, parents, self.num_nodes[b] = [root] * width, [-1] + [0] * (width - 1), 1
            said, likely = row[2 * width + 1 : 3 * width][: self.num_nodes[b] - 1], [1.0]
            for node, claim in enumerate(said, start=1):
                likely.append(min(max(0.0, claim / CONFIDENCE_SCALE), likely[parents[node]]))
            rows.append(tokens)
            above.append(parents)
            confidence.append(likely[1:])
        self.__dict__.update(host_tokens=rows, host_parents=above, confidence=confidence)
        return rows, above

    def copied(self) -> Draft:
        """For others to look at: what they do to its lists stays theirs."""
        found = Draft(self.tokens, self.parents, list(self.num_nodes))
        rows, above = (
            [list(row) for row in rows] for rows in (self.host_tokens, self.host_parents)
        )
        found.__dict__.update(host_tokens=rows, host_parents=above, is_chain=self.is_chain)
        return found

    @staticmethod
    def from_device(growing: DeviceDraft) -> Draft:
        """Trees that a device is still growing. Their claims will be known with them."""
        tokens, parents, _ = growing.trees.unbind(1)
        draft = Draft(tokens, parents, [tokens.shape[1]] * len(tokens), on_device=growing)
        draft.__dict__["is_chain"] = False
        return draft

    @staticmethod
    def nothing(roots: Sequence[int]) -> Draft:
        """Roots alone: plain decoding."""
        return Draft.chains(roots, [()] * len(roots))

    @staticmethod
    def chains(
        roots: Sequence[int],
        guesses: Sequence[Sequence[int]],
        confidence: list[list[float]] | None = None,
    ) -> Draft:
        """A draft without branches: each row's guesses follow its root."""
        width = 1 + max((len(row) for row in guesses), default=0)
        rows = [
            [root, *row] + [root] * (width - 1 - len(row))
            for root, row in zip(roots, guesses, strict=True)
        ]
        chain = list(range(-1, width - 1))
        parents = torch.tensor(chain).expand(len(rows), width)
        sizes = [1 + len(row) for row in guesses]
        draft = Draft(torch.tensor(rows), parents, sizes, confidence=confidence)
        draft.__dict__.update(
            host_tokens=rows, host_parents=[chain] * len(rows), is_chain=True
        )  # known already
        return draft

    @staticmethod
    def trees(
        roots: Sequence[int],
        trees: Sequence[Sequence[tuple[int, int]]],
        confidence: list[list[float]] | None = None,
    ) -> Draft:
        """A draft from (token, parent) pairs a row; parent 0 is the root, 1 the first pair."""
        if all(parent == node for tree in trees for node, (_, parent) in enumerate(tree)):
            return Draft.chains(roots, [[token for token, _ in tree] for tree in trees], confidence)
        width = 1 + max((len(tree) for tree in trees), default=0)
        rows, above = [], []
        for root, tree in zip(roots, trees, strict=True):
            spare = width - 1 - len(tree)
            # Padding hangs below the root: no path leads there, and it costs no depth.
            rows.append([root, *[token for token, _ in tree], *[root] * spare])
            above.append([-1, *[parent for _, parent in tree], *[0] * spare])
        sizes = [1 + len(tree) for tree in trees]
        draft = Draft(torch.tensor(rows), torch.tensor(above), sizes, confidence=confidence)
        draft.__dict__.update(host_tokens=rows, host_parents=above, is_chain=False)  # known already
        return draft
