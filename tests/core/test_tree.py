"""Trees by hand: depths, ancestors, their bits, children, paths."""

from __future__ import annotations

import random

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
    bits = tree.ancestor_bits([-1, *range(63)])
    assert bits[62] == 2**63 - 1
    assert bits[63] == -1
    assert tree.ancestor_bits([-1] + [0] * 63)[63] == 1 - 2**63


def test_children_in_the_order_they_were_drafted() -> None:
    parents = [-1, 0, 0, 1, 0, 3, 1, 0, 0]
    assert tree.children(parents, 7) == [[1, 2, 4], [3, 6], [], [5], [], [], []]
    assert tree.children(parents, 1) == [[]]
