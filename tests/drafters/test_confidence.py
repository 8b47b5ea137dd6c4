"""Confidence that drafters state: what is invalid is dropped, what is kept is a tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftahead import Draft
from draftahead.core import tree
from draftahead.drafters.base import validated_confidence


@given(
    confidence=st.lists(st.floats(0, 1), min_size=0, max_size=12),
    parents=st.lists(st.integers(0, 100), min_size=12, max_size=12),
    count=st.integers(0, 13),
)
def test_the_most_confident_nodes_are_a_tree(
    confidence: list[float], parents: list[int], count: int
) -> None:
    """Whatever a drafter states, no node is kept without its parent."""
    pairs = [(5, parent % (node + 1)) for node, parent in enumerate(parents[: len(confidence)])]
    draft = Draft.trees([1], [pairs], [confidence])
    (valid,) = validated_confidence(draft) or [[]]
    kept = tree.most_confident(valid, count)
    assert len(kept) == 1 + min(count, len(confidence))
    assert all(draft.parents[0][node] in kept for node in kept[1:])


@pytest.mark.parametrize(
    "stated", [[[0.5]], [[0.5, 1.5]], [[float("nan"), 0.1]], [[0.1, 0.2, 0.3]], [[-0.1, 0.2]]]
)
def test_invalid_confidence_is_dropped(stated: list[list[float]]) -> None:
    assert validated_confidence(Draft.chains([1], [[2, 3]], stated)) is None


def test_no_node_is_more_confident_than_its_parent() -> None:
    assert validated_confidence(Draft.chains([1], [[2, 3]], [[0.5, 0.9]])) == [[0.5, 0.5]]
