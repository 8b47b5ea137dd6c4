"""Parents to depths, ancestors and children. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node below the root."""
    found = [0] * len(parents)
    for node in range(1, len(parents)):
        found[node] = found[parents[node]] + 1
    return found


def ancestors(parents: Tensor) -> Tensor:
    """[B, N] -> [B, N, N] bool: row n says which nodes lead to n, itself included."""
    rows, width = parents.shape
    seen = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    # A parent stands before its children, so its own row is already complete.
    for node in range(1, width):
        above = seen.gather(1, parents[:, node].view(rows, 1, 1).expand(rows, 1, width))
        seen[:, node] |= above[:, 0]
    return seen


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """For up to 64 nodes a word: bit m says that node m leads to this one, itself included."""
    seen = [1]
    for node in range(1, len(parents)):
        seen.append(seen[parents[node]] | 1 << node)
    return [word - (1 << 64) if word >> 63 else word for word in seen]  # as signed integers


def children(parents: list[int], size: int) -> list[list[int]]:
    """For every node its children, in the order they were drafted."""
    found: list[list[int]] = [[] for _ in range(size)]
    for node in range(1, size):
        found[parents[node]].append(node)
    return found
