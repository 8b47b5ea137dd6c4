"""Trees by their numbers: depths, ancestors, bits, children; drafts and how they are read back."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from draftahead.core import tree
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft, Draft

ROOTS = [7, 8]


def random_parents(seed: int, size: int) -> list[int]:
    dice = random.Random(seed)
    return [-1, *(dice.randrange(node) for node in range(1, size))]


def above_by_hand(parents: list[int], node: int) -> list[int]:
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_depths_and_ancestors_of_every_node(size: int) -> None:
    rows = [random_parents(seed, size) for seed in range(3)]
    together = tree.ancestors(torch.tensor(rows))
    assert together.dtype == torch.bool
    for row, parents in enumerate(rows):
        above = [above_by_hand(parents, node) for node in range(size)]
        assert tree.depths(parents) == [len(found) - 1 for found in above]
        bits = tree.ancestor_bits(parents)
        for node in range(size):
            assert together[row, node].nonzero()[:, 0].tolist() == sorted(above[node])
            assert bits[node] % 2**64 == sum(1 << other for other in above[node])
            assert -(2**63) <= bits[node] < 2**63  # as the kernels' signed integers


def test_the_last_of_64_nodes_has_the_sign_bit() -> None:
    bits = tree.ancestor_bits([-1, *range(63)])
    assert bits[62] == 2**63 - 1
    assert bits[63] == -1
    assert tree.ancestor_bits([-1] + [0] * 63)[63] == 1 - 2**63


def test_children_in_the_order_they_were_drafted() -> None:
    parents = [-1, 0, 0, 1, 0, 3, 1, 0, 0]
    assert tree.children(parents, 7) == [[1, 2, 4], [3, 6], [], [5], [], [], []]
    assert tree.children(parents, 1) == [[]]


# ------------------------------------------------------------------------------- drafts


def test_chains_of_unequal_length() -> None:
    draft = Draft.chains(ROOTS, [[1, 2, 3], []], confidence=[[0.9, 0.5, 0.1], []])
    assert draft.tokens.tolist() == draft.host_tokens == [[7, 1, 2, 3], [8, 8, 8, 8]]
    assert draft.parents.tolist() == draft.host_parents == [[-1, 0, 1, 2]] * 2
    assert draft.num_nodes == [4, 1]
    assert draft.is_chain
    assert draft.confidence == [[0.9, 0.5, 0.1], []]
    assert draft.probs is None
    nothing = Draft.nothing(ROOTS)
    assert nothing.tokens.tolist() == [[7], [8]]
    assert nothing.num_nodes == [1, 1]
    assert nothing.is_chain
    assert nothing.confidence is None


def test_trees_are_padded_below_their_root() -> None:
    draft = Draft.trees(ROOTS, [[(1, 0), (2, 0), (3, 1)], [(4, 0)]], [[0.5] * 3, [0.2]])
    assert draft.tokens.tolist() == draft.host_tokens == [[7, 1, 2, 3], [8, 4, 8, 8]]
    assert draft.parents.tolist() == draft.host_parents == [[-1, 0, 0, 1], [-1, 0, 0, 0]]
    assert draft.num_nodes == [4, 2]
    assert not draft.is_chain
    assert draft.confidence == [[0.5] * 3, [0.2]]
    lone = Draft.trees(ROOTS, [[(1, 0), (2, 0)], []])
    assert lone.rows == [[7, 1, 2], [8, 8, 8]]
    assert lone.num_nodes == [3, 1]


def test_trees_without_branches_are_chains() -> None:
    draft = Draft.trees(ROOTS, [[(1, 0), (2, 1)], [(3, 0)]], [[0.5, 0.4], [0.2]])
    assert draft.is_chain
    assert draft.host_tokens == [[7, 1, 2], [8, 3, 8]]
    assert draft.host_parents == [[-1, 0, 1]] * 2
    assert draft.confidence == [[0.5, 0.4], [0.2]]
    assert Draft.trees(ROOTS, [[], []]).is_chain


def test_what_a_draft_knows_of_itself_it_reads_from_its_tensors() -> None:
    tokens = torch.tensor([[7, 1, 2], [8, 3, 4]])
    chain = Draft(tokens, torch.tensor([[-1, 0, 1]] * 2), [3, 3])
    assert chain.is_chain
    assert (chain.rows, chain.host_parents) == (tokens.tolist(), [[-1, 0, 1]] * 2)
    assert not Draft(tokens, torch.tensor([[-1, 0, 1], [-1, 0, 0]]), [3, 3]).is_chain


def test_what_was_found_is_read_back_with_the_tokens_in_one_go() -> None:
    found = torch.tensor([[5, 6, 4], [9, 9, 1]])
    draft = Draft(torch.tensor([[7, 1], [8, 3]]), torch.tensor([[-1, 0]] * 2), [2, 2])
    assert draft.read_with(found) == found.tolist()
    assert draft.__dict__["rows"] == [[7, 1], [8, 3]]
    assert draft.read_with(found[:, :1]) == [[5], [9]]  # the tokens are known by now
    known = Draft.chains(ROOTS, [[1], [3]])
    assert known.read_with(found) == found.tolist()
    assert known.rows == [[7, 1], [8, 3]]


# --------------------------------------------------------- trees that a device is growing


def growing(
    tokens: list[list[int]], parents: list[list[int]], confidence: list[list[float]]
) -> Draft:
    parts = [[int(claim * CONFIDENCE_SCALE) for claim in row] for row in confidence]
    trees = torch.stack([torch.tensor(part) for part in (tokens, parents, parts)], 1)
    return Draft.from_device(DeviceDraft(ROOTS, trees, SimpleNamespace()))  # type: ignore[arg-type]


TOKENS = [[0, 1, 2, 3], [0, 4, 5, 6]]
PARENTS = [[-1, 0, 0, 2], [9, 0, 1, 2]]
CLAIMS = [[1.0, 0.5, 0.25, 0.125], [1.0, 0.25, 0.5, -0.5]]


@pytest.mark.parametrize("look", ["rows", "above", "read_with"])
def test_a_tree_of_a_device_is_known_with_the_first_look(look: str) -> None:
    """Its root is the batch's own; a claim is no larger than its parent's, and never negative."""
    draft = growing(TOKENS, PARENTS, CLAIMS)
    assert not draft.is_chain
    assert draft.num_nodes == [4, 4]
    assert draft.tokens.tolist() == TOKENS
    assert draft.parents.tolist() == PARENTS
    if look == "read_with":
        found = torch.tensor([[31, 32], [33, 34]])
        assert draft.read_with(found) == found.tolist()
        assert draft.read_with(found) == found.tolist()
    else:
        getattr(draft, look)
    assert {"rows", "above", "claims"} <= set(draft.__dict__)
    assert draft.host_tokens == [[7, 1, 2, 3], [8, 4, 5, 6]]
    assert draft.host_parents == [[-1, 0, 0, 2], [-1, 0, 1, 2]]
    assert draft.confidence == [[0.5, 0.25, 0.125], [0.25, 0.25, 0.0]]
    assert draft.num_nodes == [4, 4]


@pytest.mark.parametrize("wrong", [[-1, 0, 2, 1], [-1, 1, 0, 0], [-1, 0, -1, 0], [-1, 0, 0, 3]])
def test_what_is_no_tree_after_all_counts_as_its_root(wrong: list[int]) -> None:
    """A parent stands before its children. The other row is not touched."""
    draft = growing(TOKENS, [PARENTS[0], wrong], CLAIMS)
    assert draft.host_tokens == [[7, 1, 2, 3], [8, 8, 8, 8]]
    assert draft.host_parents == [[-1, 0, 0, 2], [-1, 0, 0, 0]]
    assert draft.num_nodes == [4, 1]
    assert draft.confidence == [[0.5, 0.25, 0.125], []]


def test_a_claim_of_more_than_certainty_is_certainty() -> None:
    draft = growing(TOKENS, PARENTS, [[1.0, 3.0, 2.0, 1.5], [1.0, 1.0, 0.5, 0.75]])
    _ = draft.host_tokens
    assert draft.confidence == [[1.0, 1.0, 1.0], [1.0, 0.5, 0.5]]
