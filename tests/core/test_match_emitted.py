"""What the emitted tokens tell of every drafted node, verified or not."""

from __future__ import annotations

from draftahead.core import tree


def test_outcomes_of_nodes_by_the_emitted_tokens() -> None:
    """The target's own token tells of every node at its depth; nothing is known further down."""
    tokens, parents = [9, 1, 2, 3, 4, 5, 6], [-1, 0, 1, 2, 1, 4, 0]
    expected = [True, True, True, None, False, False, False]
    assert tree.match_emitted(tokens, parents, [1, 2]) == expected
