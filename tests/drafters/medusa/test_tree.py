"""The tree of candidates that Medusa heads draft is the most confident one of its size."""

from __future__ import annotations

import itertools
import math

import pytest

from draftahead.drafters.medusa.tree import Choice, likeliest_tree

PROBS = [[0.5, 0.2, 0.3], [0.4, 0.0, 0.35], [0.9, 0.05, 0.1]]


def prefix_closed(paths: list[Choice], count: int) -> list[tuple[Choice, ...]]:
    """All trees of so many nodes: with every path its prefixes."""
    return [
        tree
        for tree in itertools.combinations(paths, count)
        if all(not path[:-1] or path[:-1] in tree for path in tree)
    ]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_tree_is_the_most_confident_of_all_trees(count: int) -> None:
    """Candidates are not sorted, and some are impossible: so are rates measured on little data."""
    paths = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]

    def confidence(path: Choice) -> float:
        return math.prod(own[i] for own, i in zip(PROBS, path, strict=False))

    found = likeliest_tree(PROBS, count)
    best = max(sum(map(confidence, tree)) for tree in prefix_closed(paths[:21], count))
    assert sum(confidence(node.path) for node in found) == pytest.approx(best, abs=1e-12)
    assert sum(node.confidence for node in found) == pytest.approx(best, abs=1e-12)
    for index, node in enumerate(found):
        above = [(), *(earlier.path for earlier in found[:index])]
        assert above[node.parent] == node.path[:-1]


def test_unlikely_nodes_are_left_out() -> None:
    probs = [[0.5, 0.0], [0.1]]
    assert likeliest_tree(probs, 9) == [((0,), 0, 0.5), ((0, 0), 1, 0.05)]
    assert likeliest_tree(probs, 9, min_confidence=0.06) == [((0,), 0, 0.5)]
    assert likeliest_tree([], 9) == []
