"""Checks of drafts, confidence and options, and the other functions that drafters share."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftahead import Draft, DrafterContext, errors
from draftahead.core import tree
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft
from draftahead.drafters.base import (
    as_built,
    check_draft,
    positive_int,
    validated,
    validated_confidence,
    with_drafts_for,
)
from drafted import ZeroTimer
from toy import batch_of_roots

VOCAB_SIZE = 10
BATCH = batch_of_roots(0, 9)
# Trees of three nodes and of two, with padding after the nodes.
VALID = Draft([[0, 5, 6, 0], [9, 0, 9, 9]], [[-1, 0, 0, 0], [-1, 0, 0, 0]], [3, 2])


def check(**fields: Any) -> None:
    check_draft(dataclasses.replace(VALID, **fields), BATCH, VOCAB_SIZE)


# ----------------------------------------------------------------------------------------- drafts


@pytest.mark.parametrize(
    "fields",
    {
        "as it is": {},
        "first and last token of the vocabulary": {"tokens": [[0, 0, 9, 0], [9, 0, 9, 9]]},
        "roots alone": {"num_nodes": [1, 1]},
        "no padding": {"tokens": [[0, 5], [9, 1]], "parents": [[-1, 0]] * 2, "num_nodes": [2, 2]},
        "any tokens as padding": {"tokens": [[0, 5, 6, -1], [9, 0, 10**6, 0]]},
        "any parents as padding": {"parents": [[-1, 0, 1, 7], [-1, 0, -1, 9]]},
        "any parent of the root": {"parents": [[0, 0, 1, 0], [5, 0, 0, 0]]},
        "widths of their own": {"tokens": [[0, 5, 6], [9, 0]], "parents": [[-1, 0, 1], [-1, 0]]},
        "tuples": {"tokens": ((0, 5, 6, 0), (9, 0, 9, 9)), "num_nodes": (3, 2)},
        "integers of numpy": {"tokens": [np.array([0, 5, 6, 0]), np.array([9, 0, 9, 9])]},
    }.values(),
)
def test_valid_drafts(fields: dict[str, Any]) -> None:
    check(**fields)


NO_TREES = "a draft of {} trees for a batch of 2"
DO_NOT_FIT = "{} nodes, {} tokens and {} parents do not fit"
WHOLE = "tokens and parents must be whole numbers"
ROOT = "node 0 must be the last token of the sequence"
OUTSIDE = "a token outside the vocabulary of 10"
ORDER = "a parent must stand before its children"
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "a tree too few": (
        {"tokens": [[0]], "parents": [[-1]], "num_nodes": [1]},
        NO_TREES.format(1),
    ),
    "a tree too many": (
        {"tokens": [[0]] * 3, "parents": [[-1]] * 3, "num_nodes": [1] * 3},
        NO_TREES.format(3),
    ),
    "parents of one tree only": ({"parents": VALID.parents[:1]}, NO_TREES.format(2)),
    "tokens of three trees": ({"tokens": [*VALID.tokens, [1]]}, NO_TREES.format(3)),
    "sizes of three trees": ({"num_nodes": [3, 2, 1]}, NO_TREES.format(2)),
    "no root": ({"num_nodes": [3, 0]}, DO_NOT_FIT.format(0, 4, 4)),
    "less than no root": ({"num_nodes": [-1, 2]}, DO_NOT_FIT.format(-1, 4, 4)),
    "more nodes than tokens": ({"num_nodes": [3, 5]}, DO_NOT_FIT.format(5, 4, 4)),
    "fewer tokens than parents": (
        {"tokens": [[0, 5, 6], VALID.tokens[1]]},
        DO_NOT_FIT.format(3, 3, 4),
    ),
    "fewer parents than tokens": (
        {"parents": [VALID.parents[0], [-1, 0]]},
        DO_NOT_FIT.format(2, 4, 2),
    ),
    "a token that is no integer": ({"tokens": [[0, 5.0, 6, 0], VALID.tokens[1]]}, WHOLE),
    "padding that is no integer": ({"tokens": [[0, 5, 6, None], VALID.tokens[1]]}, WHOLE),
    "a parent that is no integer": ({"parents": [VALID.parents[0], [-1, 0.0, 0, 0]]}, WHOLE),
    "no integer at all": ({"tokens": ["abcd", VALID.tokens[1]], "parents": ["abcd"] * 2}, WHOLE),
    "elements of a tensor": ({"tokens": VALID.token_tensor}, WHOLE),
    "another root": ({"tokens": [VALID.tokens[0], [8, 0, 9, 9]]}, ROOT),
    "the root of the other sequence": ({"tokens": [VALID.tokens[1], VALID.tokens[0]]}, ROOT),
    "a negative token": ({"tokens": [[0, -1, 6, 0], VALID.tokens[1]]}, OUTSIDE),
    "a negative token at the end": ({"tokens": [[0, 5, -1, 0], VALID.tokens[1]]}, OUTSIDE),
    "a token past the last": ({"tokens": [[0, 10, 6, 0], VALID.tokens[1]]}, OUTSIDE),
    "a token past the last at the end": ({"tokens": [[0, 5, 10, 0], VALID.tokens[1]]}, OUTSIDE),
    "its own parent": ({"parents": [[-1, 0, 2, 0], VALID.parents[1]]}, ORDER),
    "a parent behind it": ({"parents": [[-1, 2, 0, 0], VALID.parents[1]]}, ORDER),
    "a second root": ({"parents": [[-1, 0, -1, 0], VALID.parents[1]]}, ORDER),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_drafts_are_refused(name: str) -> None:
    fields, message = INVALID[name]
    with pytest.raises(ValueError, match=f"^{message}$"):
        check(**fields)
    with pytest.raises(ValueError, match=f"^{message}$"):
        validated(dataclasses.replace(VALID, **fields), BATCH, VOCAB_SIZE)


def test_a_validated_draft_has_the_nodes_and_the_confidence_but_not_the_padding() -> None:
    stated = Draft(
        [[0, 5, 6, 7, -1], [9, 0, 99, 99, 99]],
        [[5, 0, 1, 1, 77], [-1, 0, -7, 0, 0]],
        [4, 2],
        [[0.5, 0.25, 0.125], [1.0]],
        torch.ones(2, 5, VOCAB_SIZE),
    )
    found = validated(stated, BATCH, VOCAB_SIZE)
    assert found == Draft(
        [[0, 5, 6, 7], [9, 0, 9, 9]],
        [[-1, 0, 1, 1], [-1, 0, 0, 0]],
        [4, 2],
        [[0.5, 0.25, 0.125], [1.0]],
    )


def test_a_validated_draft_is_a_copy() -> None:
    stated = dataclasses.replace(VALID, confidence=[[0.5, 0.5], [0.5]])
    found = validated(stated, BATCH, VOCAB_SIZE)
    for one, other in zip(
        [found.tokens, found.parents, found.confidence or []],
        [stated.tokens, stated.parents, stated.confidence or []],
        strict=True,
    ):
        assert all(ours is not theirs for ours, theirs in zip(one, other, strict=True))
    assert found.num_nodes is not stated.num_nodes


# ------------------------------------------------------------------------------------- confidence


def confidence(*stated: Any, **fields: Any) -> Any:
    return validated_confidence(dataclasses.replace(VALID, confidence=[*stated], **fields))


def test_confidence_from_zero_to_one() -> None:
    assert confidence([0.0, 1.0], [0.5]) == [[0.0, 1.0], [0.5]]
    assert confidence([0, 1], (0.5,)) == [[0.0, 1.0], [0.5]]
    assert confidence([0.5, 0.5], [0.5], num_nodes=(3, 2)) == [[0.5, 0.5], [0.5]]
    assert confidence([], [0.5], num_nodes=[1, 2]) == [[], [0.5]]


def test_confidence_becomes_numbers_of_python() -> None:
    (first, second) = confidence(torch.tensor([0.5, 0.25]), np.array([0.5]))
    assert (first, second) == ([0.5, 0.25], [0.5])
    assert all(type(value) is float for value in first + second)


@pytest.mark.parametrize("value", [-0.001, 1.001, float("nan"), float("inf"), -float("inf")])
def test_confidence_with_one_value_that_is_no_probability_is_dropped(value: float) -> None:
    assert confidence([0.5, value], [0.5]) is None
    assert confidence([value, 0.5], [0.5]) is None
    assert confidence([0.5, 0.5], [value]) is None


@pytest.mark.parametrize(
    "stated", [[], [[0.5, 0.5]], [[0.5], [0.5]], [[0.5] * 3, [0.5]], [[0.5, 0.5], []]]
)
def test_confidence_of_another_number_of_nodes_is_dropped(stated: list[list[float]]) -> None:
    assert confidence(*stated) is None


def test_a_draft_without_confidence_has_none() -> None:
    assert validated_confidence(VALID) is None


def test_confidence_is_limited_to_that_of_the_parent() -> None:
    parents = [[-1, 0, 1, 0], [-1, 0, 0, 0]]
    assert confidence([0.25, 0.5], [0.75], parents=parents) == [[0.25, 0.25], [0.75]]


@given(
    stated=st.lists(st.floats(0, 1), min_size=0, max_size=12),
    parents=st.lists(st.integers(0, 100), min_size=12, max_size=12),
    count=st.integers(0, 13),
)
def test_the_most_confident_nodes_are_a_tree(
    stated: list[float], parents: list[int], count: int
) -> None:
    """Whatever a drafter states, no node is kept without its parent."""
    pairs = [(5, parent % (node + 1)) for node, parent in enumerate(parents[: len(stated)])]
    draft = Draft.trees([1], [pairs], [stated])
    (valid,) = validated_confidence(draft) or [[]]
    kept = tree.most_confident(valid, count)
    assert len(kept) == 1 + min(count, len(stated))
    assert all(draft.parents[0][node] in kept for node in kept[1:])


# ---------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("value", [1, 2, 63])
def test_whole_numbers_within_the_limit(value: int) -> None:
    assert positive_int("count", value) == value
    assert positive_int("count", value, default=7) == value


@pytest.mark.parametrize("value", [0, -1, 64, True, False, 1.0, 2.5, "3", None, [3]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(errors.ConfigError, match="count must be a whole number from 1 to 63, not"):
        positive_int("count", value)
    if value is not None:
        with pytest.raises(errors.ConfigError, match="not"):
            positive_int("count", value, default=7)


def test_the_limit_of_an_option_may_be_another() -> None:
    assert positive_int("layers", 4, 4) == 4
    with pytest.raises(errors.ConfigError, match="from 1 to 4, not 5"):
        positive_int("layers", 5, 4)


def test_an_option_without_a_value_has_its_default() -> None:
    assert positive_int("count", None, default=7) == 7


# ------------------------------------------------------------------------------------------ parts


def test_sequences_that_are_left_out_have_a_max_depth_of_0() -> None:
    batch = dataclasses.replace(BATCH, max_depths=(4, 5))
    found = with_drafts_for(batch, [False, True])
    assert found == dataclasses.replace(batch, max_depths=(0, 5))
    assert with_drafts_for(batch, [True, True]) == batch
    assert batch.max_depths == (4, 5)


def launched_draft() -> DeviceDraft:
    parts = [[1, 2, 3], [-1, 0, 0], [CONFIDENCE_SCALE, CONFIDENCE_SCALE // 2, 0]]
    return DeviceDraft.of_trees([1], torch.tensor([parts]), ZeroTimer())


def test_a_device_draft_as_it_was_built() -> None:
    cut = Draft.chains([1], [[2]], [[0.5]])
    assert as_built(launched_draft(), cut) == Draft.trees([1], [[(2, 0), (3, 0)]], [[0.5, 0.0]])


def test_a_device_draft_that_was_verified_whole_is_not_copied_again() -> None:
    verified = Draft.trees([1], [[(2, 0), (3, 0)]], [[0.5, 0.0]])
    assert as_built(launched_draft(), verified) is verified


def context_with(target: Any) -> DrafterContext:
    return DrafterContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=VOCAB_SIZE,
        tokenizer=None,
        max_batch=1,
        max_context=8,
        load=lambda name: (None, None),
        target=target,
    )


def test_a_drafter_gets_the_runner_of_the_target() -> None:
    runner = SimpleNamespace()
    assert context_with(runner).target_runner("eagle") is runner


def test_a_drafter_that_needs_a_target_refuses_to_work_without() -> None:
    with pytest.raises(errors.ConfigError, match="'eagle' drafts with the target itself"):
        context_with(None).target_runner("eagle")
