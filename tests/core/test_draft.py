"""Drafts: chains and trees of unequal size, and those that a device builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft, Draft
from drafted import ZeroTimer

ROOTS = [7, 8]
NOTHING = torch.empty(2, 0, dtype=torch.long)


def test_chains_of_unequal_length() -> None:
    draft = Draft.chains(ROOTS, [[1, 2, 3], []], confidence=[[0.9, 0.5, 0.1], []])
    assert draft.token_tensor.tolist() == draft.tokens == [[7, 1, 2, 3], [8, 8, 8, 8]]
    assert draft.parent_tensor.tolist() == draft.parents == [[-1, 0, 1, 2]] * 2
    assert draft.num_nodes == [4, 1]
    assert draft.width == 4
    assert draft.is_chain
    assert draft.confidence == [[0.9, 0.5, 0.1], []]
    assert draft.probs is None


def test_a_draft_of_roots_only() -> None:
    draft = Draft.root_only(ROOTS)
    assert draft.token_tensor.tolist() == [[7], [8]]
    assert draft.num_nodes == [1, 1]
    assert draft.is_chain
    assert draft.confidence is None


def test_trees_are_padded_below_their_root() -> None:
    draft = Draft.trees(ROOTS, [[(1, 0), (2, 0), (3, 1)], [(4, 0)]], [[0.5] * 3, [0.2]])
    assert draft.token_tensor.tolist() == draft.tokens == [[7, 1, 2, 3], [8, 4, 8, 8]]
    assert draft.parent_tensor.tolist() == draft.parents == [[-1, 0, 0, 1], [-1, 0, 0, 0]]
    assert draft.num_nodes == [4, 2]
    assert not draft.is_chain
    assert draft.confidence == [[0.5] * 3, [0.2]]
    other = Draft.trees(ROOTS, [[(1, 0), (2, 0)], []])
    assert other.tokens == [[7, 1, 2], [8, 8, 8]]
    assert other.num_nodes == [3, 1]


def test_trees_without_branches_are_chains() -> None:
    draft = Draft.trees(ROOTS, [[(1, 0), (2, 1)], [(3, 0)]], [[0.5, 0.4], [0.2]])
    assert draft.is_chain
    assert draft.tokens == [[7, 1, 2], [8, 3, 8]]
    assert draft.parents == [[-1, 0, 1]] * 2
    assert draft.confidence == [[0.5, 0.4], [0.2]]
    assert Draft.trees(ROOTS, [[], []]).is_chain
    assert not Draft([[7, 1, 2], [8, 3, 4]], [[-1, 0, 1], [-1, 0, 0]], [3, 3]).is_chain


def test_the_part_of_a_draft_keeps_its_shape_and_confidence() -> None:
    draft = Draft.trees(ROOTS, [[(1, 0), (2, 0), (3, 1)], [(4, 0)]], [[0.5, 0.4, 0.3], [0.2]])
    part = draft.part([[0, 1, 3], [0]])
    assert part.tokens == [[7, 1, 3], [8, 8, 8]]
    assert part.parents == [[-1, 0, 1]] * 2
    assert part.num_nodes == [3, 1]
    assert part.confidence == [[0.5, 0.3], []]
    assert draft.part([[0, 1, 2, 3], [0, 1]]) is draft


def test_a_draft_on_the_host_reads_what_was_found() -> None:
    draft = Draft.chains(ROOTS, [[1], [3]])
    found = torch.tensor([[5, 6, 4], [9, 9, 1]])
    assert draft.read(found) == (draft, found.tolist())


def test_a_chain_on_a_device_is_read_with_what_was_found() -> None:
    found = torch.tensor([[5, 6, 4], [9, 9, 1]])
    probs = torch.rand(2, 2, 3)
    draft = DeviceDraft(ROOTS, torch.tensor([[7, 1], [8, 3]]), [2, 1], probs)
    assert draft.is_chain
    assert draft.parent_tensor.tolist() == [[-1, 0]] * 2
    known, others = draft.read(found)
    assert others == found.tolist()
    assert (known.tokens, known.parents, known.num_nodes) == (
        [[7, 1], [8, 3]],
        [[-1, 0]] * 2,
        [2, 1],
    )
    assert known.probs is probs
    assert known.confidence is None


# ------------------------------------------------------------------- trees that a device builds

TOKENS = [[0, 1, 2, 3], [0, 4, 5, 6]]
PARENTS = [[-1, 0, 0, 2], [9, 0, 1, 2]]
CONFIDENCE = [[1.0, 0.5, 0.25, 0.125], [1.0, 0.25, 0.5, -0.5]]


def built(parents: list[list[int]], confidence: Any = CONFIDENCE) -> DeviceDraft:
    scaled = [[int(value * CONFIDENCE_SCALE) for value in values] for values in confidence]
    trees = torch.stack([torch.tensor(part) for part in (TOKENS, parents, scaled)], 1)
    return DeviceDraft.of_trees(ROOTS, trees, ZeroTimer())


def test_a_tree_on_a_device_is_validated_when_it_is_read() -> None:
    """Its root is the batch's own; a confidence is at most that of the parent, and not negative."""
    draft = built(PARENTS)
    assert not draft.is_chain
    assert draft.num_nodes == [4, 4]
    assert draft.token_tensor.tolist() == TOKENS
    assert draft.parent_tensor.tolist() == PARENTS
    found = torch.tensor([[31, 32], [33, 34]])
    known, others = draft.read(found)
    assert others == found.tolist()
    assert known.tokens == [[7, 1, 2, 3], [8, 4, 5, 6]]
    assert known.parents == [[-1, 0, 0, 2], [-1, 0, 1, 2]]
    assert known.confidence == [[0.5, 0.25, 0.125], [0.25, 0.25, 0.0]]
    assert known.num_nodes == [4, 4]


@pytest.mark.parametrize("wrong", [[-1, 0, 2, 1], [-1, 1, 0, 0], [-1, 0, -1, 0], [-1, 0, 0, 3]])
def test_what_is_no_tree_counts_as_its_root(wrong: list[int]) -> None:
    """A parent stands before its children. The other sequence is not affected."""
    known, _ = built([PARENTS[0], wrong]).read(NOTHING)
    assert known.tokens == [[7, 1, 2, 3], [8, 8, 8, 8]]
    assert known.parents == [[-1, 0, 0, 2], [-1, 0, 0, 0]]
    assert known.num_nodes == [4, 1]
    assert known.confidence == [[0.5, 0.25, 0.125], []]


def test_a_confidence_above_one_is_one() -> None:
    confidence = [[1.0, 3.0, 2.0, 1.5], [1.0, 1.0, 0.5, 0.75]]
    known, _ = built(PARENTS, confidence).read(NOTHING)
    assert known.confidence == [[1.0, 1.0, 1.0], [1.0, 0.5, 0.5]]
