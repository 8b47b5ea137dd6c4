"""Trees by hand: depths, ancestors, their bits, paths."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch

from draftahead.core import tree


def random_parents(seed: int, size: int) -> list[int]:
    numbers = random.Random(seed)
    return [-1, *(numbers.randrange(node) for node in range(1, size))]


def ancestors_by_hand(parents: list[int], node: int) -> list[int]:
    """The node itself, its parent, and so on up to the root."""
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_depths_ancestors_and_paths_of_every_node(size: int) -> None:
    trees = [random_parents(seed, size) for seed in range(3)]
    together = tree.ancestors(torch.tensor(trees))
    assert together.dtype == torch.bool
    for b, parents in enumerate(trees):
        expected = [ancestors_by_hand(parents, node) for node in range(size)]
        assert tree.depths(parents) == [len(found) - 1 for found in expected]
        bits = tree.ancestor_bits(parents)
        paths = tree.paths(range(100, 100 + size), parents)
        for node in range(size):
            assert together[b, node].nonzero()[:, 0].tolist() == sorted(expected[node])
            assert bits[node] % 2**64 == sum(1 << other for other in expected[node])
            assert -(2**63) <= bits[node] < 2**63  # as the kernels' signed integers
            assert paths[node] == tuple(100 + other for other in expected[node][-2::-1])


def test_the_last_of_64_nodes_has_the_sign_bit() -> None:
    bits = tree.ancestor_bits(tree.chain(tree.MAX_NODES))
    assert bits[62] == 2**63 - 1
    assert bits[-1] == -1
    assert tree.ancestor_bits([-1] + [0] * 63)[63] == 1 - 2**63


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 64])
def test_depth_tensor_has_the_depths_of_every_node(size: int) -> None:
    trees = [tree.chain(size), *(random_parents(seed, size) for seed in range(3))]
    expected = [tree.depths(parents) for parents in trees]
    assert tree.depth_tensor(torch.tensor(trees)).tolist() == expected


def test_depth_tensor_of_invalid_trees_stays_in_range() -> None:
    depths = tree.depth_tensor(torch.tensor([[5, 2, 1, 99], [-9, -9, 3, 2]]))
    assert depths[:, 0].tolist() == [0, 0]
    assert 0 <= int(depths.min()) <= int(depths.max()) <= 3


def test_chains_and_valid_trees_are_recognised() -> None:
    assert tree.chain(3) == [-1, 0, 1]
    assert tree.is_chain([-1])
    assert tree.is_chain((-1, 0, 1))
    assert not tree.is_chain([-1, 0, 0])
    for parents in ([-1], [-1, 0, 0, 1, 3]):
        assert tree.is_valid(parents)
    for parents in ([-1, 1], [-1, 0, -1], [-1, 2, 1]):
        assert not tree.is_valid(parents)


def test_no_confidence_is_above_that_of_its_parent() -> None:
    assert tree.limit_to_parents([1.5, 0.5, 0.75, 0.25], [-1, 0, 1, 2, 1]) == [1, 0.5, 0.5, 0.25]


# ------------------------------------------------------------------------------ parts of a tree


@pytest.mark.parametrize(
    ("count", "nodes"),
    [(0, [0]), (1, [0, 2]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4])],
)
def test_the_most_confident_nodes_of_equals_the_earlier(count: int, nodes: list[int]) -> None:
    assert tree.most_confident([0.5, 0.9, 0.5, 0.1], count) == nodes


def test_parents_of_a_part_and_the_chain_of_first_children() -> None:
    parents = [-1, 0, 0, 1, 2, 3]
    assert tree.reindex(parents, [0, 2, 4]) == [-1, 0, 1]
    assert tree.reindex(parents, [0, 1, 2, 3, 5]) == [-1, 0, 0, 1, 3]
    assert tree.first_child_chain(parents, range(6)) == [0, 1, 3, 5]
    assert tree.first_child_chain(parents, [0, 2, 3, 4]) == [0, 2, 4]
    assert tree.first_child_chain(parents, []) == [0]


class Word(NamedTuple):
    """A candidate whose children are twice and three times less likely."""

    confidence: float
    name: str


def grown(
    max_nodes: int, min_confidence: float = 0.0, tie_break: Any = None
) -> tuple[list[str], list[int]]:
    """The names of the chosen, and the numbers at which they were expanded."""
    expanded = []

    def expand(word: Word, index: int) -> list[Word]:
        expanded.append(index)
        return [
            Word(word.confidence / 2, word.name + "a"),
            Word(word.confidence / 3, word.name + "b"),
        ]

    chosen = tree.best_first(
        [Word(0.5, "x"), Word(0.5, "w"), Word(0.2, "v")],
        expand, max_nodes, min_confidence, tie_break,
    )  # fmt: skip
    return [word.name for word in chosen], expanded


def test_the_best_nodes_first() -> None:
    """Of equals the older one, unless something else breaks the tie."""
    assert grown(0) == ([], [])
    assert grown(1) == (["x"], [1])
    assert grown(5) == (["x", "w", "xa", "wa", "v"], [1, 2, 3, 4, 5])
    assert grown(3, tie_break=lambda word: word.name)[0] == ["w", "x", "wa"]
    assert grown(9, min_confidence=0.25)[0] == ["x", "w", "xa", "wa"]  # what equals it stays
    assert grown(9, min_confidence=0.26)[0] == ["x", "w"]
