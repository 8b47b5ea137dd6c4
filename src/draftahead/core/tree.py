"""Operations on trees of tokens, given by parents. A chain is a tree without branches.

Node 0 is the root and has parent -1; a parent stands before its children.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_NODES = 64  # of a tree, the root included: ancestors are the bits of one word


def chain(num_nodes: int) -> list[int]:
    """Parents of a tree without branches."""
    return list(range(-1, num_nodes - 1))


def is_chain(parents: Sequence[int]) -> bool:
    return list(parents) == chain(len(parents))


def is_valid(parents: Sequence[int]) -> bool:
    """Whether every parent stands before its children."""
    return all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))


def limit_to_parents(confidence: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Confidence of nodes 1, 2, ..., none above 1 or above that of its parent."""
    found = [1.0]
    for node, value in enumerate(confidence, start=1):
        found.append(min(value, found[parents[node]]))
    return found[1:]


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node; 0 for the root."""
    found = [0] * len(parents)
    for node in range(1, len(parents)):
        found[node] = found[parents[node]] + 1
    return found


def depth_tensor(parents: Tensor) -> Tensor:
    """[B, N] parents -> [B, N] depths, by pointer jumping on their device. Of an invalid tree the
    root's is right, and all are below N."""
    num_nodes = parents.shape[1]
    ancestor = F.pad(parents[:, 1:].clamp(0, num_nodes - 1), (1, 0))
    found = (torch.arange(num_nodes, device=parents.device) > 0).long().expand_as(ancestor)
    for _ in range(num_nodes.bit_length()):
        found = found + found.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    return found.clamp(max=num_nodes - 1)


def ancestors(parents: Tensor) -> Tensor:
    """[B, N] parents -> [B, N, N] bool: row n marks the ancestors of node n and n itself."""
    batch, num_nodes = parents.shape
    found = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    # A parent stands before its children, so its own row is already complete.
    for node in range(1, num_nodes):
        index = parents[:, node].view(batch, 1, 1).expand(batch, 1, num_nodes)
        found[:, node] |= found.gather(1, index)[:, 0]
    return found


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """For up to 64 nodes one signed 64-bit word each: bit m is set for ancestors m and itself."""
    found = [1]
    for node in range(1, len(parents)):
        found.append(found[parents[node]] | 1 << node)
    return [word - (1 << 64) if word >> 63 else word for word in found]


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from below the root to every node; () for the root."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        found.append((*found[parents[node]], tokens[node]))
    return found


# ------------------------------------------------------------------------------ parts of a tree


def reindex(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Parents of a part of a tree: nodes `kept`, ascending, the root first, none without its
    parent."""
    new_index = {node: index for index, node in enumerate(kept)}
    return [-1, *(new_index[parents[node]] for node in kept[1:])]


def most_confident(confidence: Sequence[float], count: int) -> list[int]:
    """The root and up to `count` nodes below it with the highest confidence, ascending.
    `confidence[n]` belongs to node n + 1 and is at most that of its parent, so that none comes
    without its parent; of equals the earlier one is taken."""
    ranked = sorted(range(1, len(confidence) + 1), key=lambda node: (-confidence[node - 1], node))
    return [0, *sorted(ranked[:count])]


def first_child_chain(parents: Sequence[int], nodes: Iterable[int]) -> list[int]:
    """The root, its first child, the first child of that, and so on, out of `nodes`."""
    found = [0]
    for node in nodes:
        if node and parents[node] == found[-1]:
            found.append(node)
    return found


# ----------------------------------------------------------------------- building and checking


class Candidate(Protocol):
    """A node that may become part of a tree."""

    @property
    def confidence(self) -> float: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def best_first(
    roots: Iterable[AnyCandidate],
    expand: Callable[[AnyCandidate, int], Iterable[AnyCandidate]],
    max_nodes: int,
    min_confidence: float,
    tie_break: Callable[[AnyCandidate], Any] | None = None,
) -> list[AnyCandidate]:
    """The `max_nodes` most confident nodes below a root, parents first.

    `roots`: the root's children. `expand(node, index)`: the children of a node that became number
    `index` of the tree (the root is 0); none may be more confident than its parent. Candidates
    below `min_confidence` are left out; of equals the one with the smaller `tie_break` is taken, by
    default the older one.
    """
    order = itertools.count()
    heap: list[tuple[float, Any, AnyCandidate]] = []

    def offer(candidates: Iterable[AnyCandidate]) -> None:
        for node in candidates:
            if node.confidence >= min_confidence:
                key = next(order) if tie_break is None else tie_break(node)
                heapq.heappush(heap, (-node.confidence, key, node))

    offer(roots)
    chosen: list[AnyCandidate] = []
    while heap and len(chosen) < max_nodes:
        node = heapq.heappop(heap)[2]
        chosen.append(node)
        offer(expand(node, len(chosen)))
    return chosen


def match_emitted(
    tokens: Sequence[int], parents: Sequence[int], emitted: Sequence[int]
) -> list[bool | None]:
    """Whether each node agrees with the tokens that the target emitted, whether it was verified or
    not. False below a node that disagrees; None beyond the last emitted token."""
    found: list[bool | None] = [True]
    depth = depths(parents)
    for node in range(1, len(parents)):
        outcome = found[parents[node]]
        if outcome:
            index = depth[node] - 1
            outcome = emitted[index] == tokens[node] if index < len(emitted) else None
        found.append(outcome)
    return found
