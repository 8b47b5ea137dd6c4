"""The tree of candidates that Medusa heads draft: which candidate of each head a node holds.

A node is a path: (1, 0) is the second best candidate of the first head, and behind it the best one
of the second head. The heads predict independently, so the confidence of a node is the product of
the probabilities on its path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from draftahead.core import tree
from draftahead.core.checks import list_of, whole
from draftahead.core.tree import MAX_NODES
from draftahead.errors import ConfigError

Choice = tuple[int, ...]  # a path: the index of a candidate for each head


class MedusaNode(NamedTuple):
    path: Choice
    parent: int  # index in the tree; the root is 0
    confidence: float


def likeliest_tree(
    probs: Sequence[Sequence[float]], max_nodes: int, min_confidence: float = 0.0
) -> list[MedusaNode]:
    """The `max_nodes` most confident nodes, parents first. `probs[h][i]`: that candidate i of head
    h is right. Nodes below `min_confidence` are left out, and impossible ones; of equals the one
    with the smaller path is taken."""

    def children(node: MedusaNode, index: int) -> Iterator[MedusaNode]:
        of_head = probs[len(node.path)] if len(node.path) < len(probs) else ()
        for candidate, prob in enumerate(of_head):
            if node.confidence * prob > 0:
                yield MedusaNode((*node.path, candidate), index, node.confidence * prob)

    roots = children(MedusaNode((), -1, 1.0), 0)
    return tree.best_first(roots, children, max_nodes, min_confidence, tie_break=lambda n: n.path)


def fixed_tree(choices: Sequence[Choice], probs: Sequence[Sequence[float]]) -> list[MedusaNode]:
    """The nodes of a given tree, parents first, as far as there are candidates: a part of `probs`
    may be left out."""
    nodes: list[MedusaNode] = []
    index: dict[Choice, int] = {(): 0}
    for path in choices:
        chosen = [p[i] for p, i in zip(probs, path, strict=False) if i < len(p)]
        if len(chosen) == len(path):
            index[path] = len(index)
            nodes.append(MedusaNode(path, index[path[:-1]], math.prod(chosen)))
    return nodes


def validated_choices(name: str, choices: Any, num_heads: int) -> list[Choice]:
    """Choices as in Medusa's `medusa_choices`, checked, parents first. `name`: for the errors."""
    says = f"a list of 1 to {MAX_NODES - 1} paths of candidates, as [[0], [1], [0, 0]]"
    path_kind = list_of(whole(0), "", at_least=1)
    given = list_of(path_kind, says, at_least=1, at_most=MAX_NODES - 1).of(name, choices)
    paths = sorted(set(given), key=lambda path: (len(path), path))
    if len(paths[-1]) > num_heads:
        raise ConfigError(
            f"{name} is {len(paths[-1])} deep, and there are {num_heads} Medusa heads"
        )
    for path in paths:
        if path[:-1] and path[:-1] not in paths:
            raise ConfigError(f"{name} has {list(path)} without {list(path[:-1])} above it")
    return paths
