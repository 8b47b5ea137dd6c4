"""Suffix automata against their definition, and the trees built from them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftahead.drafters.base import MIN_CONFIDENCE
from draftahead.drafters.suffix.automaton import (
    MAX_COUNTED,
    AutomatonCursor,
    Match,
    MatchRates,
    SharedCorpus,
    SuffixAutomaton,
    build_tree,
    followers,
)

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def automaton(tokens: list[int]) -> SuffixAutomaton:
    text = SuffixAutomaton()
    for token in tokens:
        text.extend(token)
    return text


def own_matches(tokens: list[int]) -> list[Match]:
    text = automaton(tokens)
    return [Match(text, *match, True) for match in text.repeated_suffixes()]


def occurrences(tokens: list[int], part: list[int]) -> list[int]:
    """The indices at which a part ends."""
    size = len(part)
    return [end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == part]


@given(tokens=texts)
def test_the_longest_match_is_the_longest_suffix_that_occurred_before(tokens: list[int]) -> None:
    longest = max(
        (n for n in range(len(tokens)) if len(occurrences(tokens, tokens[len(tokens) - n :])) > 1),
        default=0,
    )
    matches = automaton(tokens).repeated_suffixes()
    assert (matches[0][1] if matches else 0) == longest


@given(tokens=texts)
def test_followers_are_counted_as_they_occurred(tokens: list[int]) -> None:
    text = automaton(tokens)
    for state, length in text.repeated_suffixes():
        end = tokens[len(tokens) - length :]
        ends = occurrences(tokens, end)
        assert text.count[state] == len(ends)
        after = [tokens[at] for at in ends if at < len(tokens)]
        for token, then, share in followers(text, state, is_end=True):
            assert share == pytest.approx(after.count(token) / len(after))
            # A state holds all strings that end at the same places.
            assert text.count[then] == len(occurrences(tokens, [*end, token]))


def test_shares_are_probabilities_where_counts_are_incomplete() -> None:
    text = automaton([7] * (3 * MAX_COUNTED))
    for state, _ in [*text.repeated_suffixes(), (1, 1)]:
        assert all(share <= 1 for _, _, share in followers(text, state, is_end=True))


@given(tokens=texts, max_nodes=st.integers(1, 12), max_depth=st.integers(1, 6))
def test_trees_keep_to_their_limits(tokens: list[int], max_nodes: int, max_depth: int) -> None:
    nodes = build_tree(own_matches(tokens), MatchRates(), max_nodes, max_depth)
    assert len(nodes) <= max_nodes
    depths, paths = [0], [()]
    for index, node in enumerate(nodes, start=1):
        assert 0 <= node.parent < index
        depths.append(depths[node.parent] + 1)
        paths.append((*paths[node.parent], node.token))  # type: ignore[arg-type]
        assert node.confidence >= MIN_CONFIDENCE
        if node.parent:
            assert node.confidence <= nodes[node.parent - 1].confidence + 1e-12
    assert max(depths) <= max_depth
    assert len(set(paths)) == len(paths)  # every path once


def test_a_text_that_repeats_is_continued() -> None:
    line = [5, 6, 7, 8, 9, 10, 11, 12]
    nodes = build_tree(own_matches(line * 3 + line[:3]), MatchRates(), 5, 5)
    assert [node.token for node in nodes] == [8, 9, 10, 11, 12]


def test_a_periodic_text_is_continued_periodically() -> None:
    for period in (1, 2, 3):
        tokens = [7 + i % period for i in range(30)]
        nodes = build_tree(own_matches(tokens), MatchRates(), 8, 8)
        assert [node.token for node in nodes] == [7 + i % period for i in range(30, 38)]


def test_what_follows_more_often_comes_first() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    nodes = build_tree(own_matches(tokens), MatchRates(), 8, 1)
    assert [node.token for node in nodes][:2] == [3, 4]


def test_match_rates_follow_what_was_accepted() -> None:
    rates = MatchRates()
    before = rates[3]
    for _ in range(50):
        rates.note(3, False)
    assert rates[3] < 0.25 * before
    assert rates[4] == MatchRates()[4]


def test_the_automaton_grows_linearly() -> None:
    """On ten thousand tokens that repeat one, the worst case, two or seven."""
    for period in (1, 2, 7):
        text = automaton([i % period for i in range(10_000)])
        assert len(text.next) <= 2 * text.size
        assert sum(map(len, text.next)) <= 3 * text.size


@given(known=texts, more=texts, text=texts)
@example(known=[0, 0, 1, 0], more=[1, 1], text=[1, 1])  # the cursor's state is split
def test_a_cursor_finds_the_longest_suffix_that_occurs_in_another_text(
    known: list[int], more: list[int], text: list[int]
) -> None:
    """Also while the other text grows."""
    other, cursor = automaton(known), AutomatonCursor()
    for token in text[: len(text) // 2]:
        cursor.advance(other, token)
    for token in more:
        other.extend(token)
    for token in text[len(text) // 2 :]:
        cursor.advance(other, token)
    everything = known + more
    longest = max(n for n in range(len(text) + 1) if occurrences(everything, text[len(text) - n :]))
    # A match from before the growth may be longer by now than the cursor knows, never shorter.
    assert cursor.length <= longest
    if not more:
        assert cursor.length == longest
    if cursor.state:
        assert other.length[other.link[cursor.state]] < cursor.length
        assert cursor.length <= other.length[cursor.state]


def test_the_shared_corpus_is_bounded_and_drops_the_oldest_texts() -> None:
    corpus = SharedCorpus(100)
    for number in range(20):
        corpus.add("a" if number % 2 else "b", [number] * 10)
        assert corpus.num_tokens <= 100
    kept = [text[0] for _, text in corpus.texts]
    assert kept == sorted(kept)
    assert kept[-1] == 19
    assert 0 not in kept
    for namespace in "ab":
        known = {token for state in corpus.automaton(namespace).next for token in state} - {-1}
        assert known == {text[0] for owner, text in corpus.texts if owner == namespace}
