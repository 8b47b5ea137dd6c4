"""Drafts: chains and trees of unequal size, and those that a device builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft, Draft
from drafted import ZeroTimer

ROOTS = [7, 8]


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
    assert draft.parents == [[-1], [-1]]
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


def test_a_subset_of_a_draft_keeps_its_shape_and_confidence() -> None:
    draft = Draft.trees(ROOTS, [[(1, 0), (2, 0), (3, 1)], [(4, 0)]], [[0.5, 0.4, 0.3], [0.2]])
    subset = draft.subset([[0, 1, 3], [0]])
    assert subset.tokens == [[7, 1, 3], [8, 8, 8]]
    assert subset.parents == [[-1, 0, 1]] * 2
    assert subset.num_nodes == [3, 1]
    assert subset.confidence == [[0.5, 0.3], []]
    assert draft.subset([[0, 1, 2, 3], [0]]).num_nodes == [4, 1]
    assert draft.subset([[0, 1, 2, 3], [0, 1]]) is draft
    assert draft.subset([[0, 1, 2, 3], [0]]).num_nodes == [4, 1]


def test_to_host_of_a_host_draft_copies_the_extra_tensor() -> None:
    draft = Draft.chains(ROOTS, [[1], [3]])
    found = torch.tensor([[5, 6, 4], [9, 9, 1]])
    assert draft.to_host(found) == (draft, found.tolist())


def test_to_host_copies_a_chain_and_the_extra_tensor() -> None:
    found = torch.tensor([[5, 6, 4], [9, 9, 1]])
    probs, tokens, parents = torch.rand(2, 3, 3), [[7, 1, 2], [8, 3, 4]], [[-1, 0, 1]] * 2
    draft = DeviceDraft(ROOTS, torch.tensor(tokens), [3, 1], probs)
    assert draft.is_chain
    assert draft.parent_tensor.tolist() == parents
    known, others = draft.to_host(found)
    assert others == found.tolist()
    assert (known.tokens, known.parents, known.num_nodes) == (tokens, parents, [3, 1])
    assert known.probs is probs
    assert known.confidence is None


class OnAnotherDevice(torch.Tensor):
    """A tensor that must be moved before anything else is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to:
            raise RuntimeError("Expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].as_subclass(torch.Tensor)


def test_tokens_on_another_device_than_the_target_are_copied_too() -> None:
    draft = DeviceDraft(ROOTS, torch.tensor([[7, 1], [8, 3]]), [2, 1])
    host_draft, extra = draft.to_host(torch.tensor([[5], [6]]).as_subclass(OnAnotherDevice))
    assert host_draft.tokens == [[7, 1], [8, 3]]
    assert extra == [[5], [6]]


# ------------------------------------------------------------------- trees that a device builds

TOKENS = [[0, 1, 2, 3], [0, 4, 5, 6]]
PARENTS = [[-1, 0, 0, 2], [9, 0, 1, 2]]
CONFIDENCE = [[1.0, 0.5, 0.25, 0.125], [1.0, 0.25, 0.5, -0.5]]


def built(parents: list[list[int]], confidence: Any = CONFIDENCE) -> DeviceDraft:
    scaled = [[int(value * CONFIDENCE_SCALE) for value in values] for values in confidence]
    trees = torch.stack([torch.tensor(part) for part in (TOKENS, parents, scaled)], 1)
    return DeviceDraft.of_trees(ROOTS, trees, ZeroTimer())


def test_to_host_validates_a_tree() -> None:
    """Its root is the batch's own; a confidence is at most that of the parent, and not negative."""
    draft = built(PARENTS)
    assert not draft.is_chain
    assert draft.num_nodes == [4, 4]
    assert draft.token_tensor.tolist() == TOKENS
    assert draft.parent_tensor.tolist() == PARENTS
    found = torch.tensor([[31, 32], [33, 34]])
    known, others = draft.to_host(found)
    assert others == found.tolist()
    assert known.tokens == [[7, 1, 2, 3], [8, 4, 5, 6]]
    assert known.parents == [[-1, 0, 0, 2], [-1, 0, 1, 2]]
    assert known.confidence == [[0.5, 0.25, 0.125], [0.25, 0.25, 0.0]]
    assert known.num_nodes == [4, 4]


@pytest.mark.parametrize("wrong", [[-1, 0, 2, 1], [-1, 1, 0, 0], [-1, 0, -1, 0], [-1, 0, 0, 3]])
def test_what_is_no_tree_counts_as_its_root(wrong: list[int]) -> None:
    """A parent stands before its children. The other sequence is not affected."""
    draft = built([PARENTS[0], wrong])
    known, nothing = draft.to_host()
    assert nothing == [[], []]
    assert draft.num_nodes == [4, 4]
    assert known.tokens == [[7, 1, 2, 3], [8, 8, 8, 8]]
    assert known.parents == [[-1, 0, 0, 2], [-1, 0, 0, 0]]
    assert known.num_nodes == [4, 1]
    assert known.confidence == [[0.5, 0.25, 0.125], []]


def test_a_confidence_above_one_is_one() -> None:
    confidence = [[1.0, 3.0, 2.0, 1.5], [1.0, 1.0, 0.5, 0.75]]
    known, _ = built(PARENTS, confidence).to_host()
    assert known.confidence == [[1.0, 1.0, 1.0], [1.0, 0.5, 0.5]]
