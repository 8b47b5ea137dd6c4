"""The suffix drafter: its automaton against the definition, its trees against their promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.drafters.suffix.automaton import (
    LEAST,
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


def own(tokens: list[int]) -> list[Match]:
    text = automaton(tokens)
    return [Match(text, *match, True) for match in text.repeated_suffixes()]


def occurrences(tokens: list[int], part: list[int]) -> list[int]:
    """Where a part ends."""
    size = len(part)
    return [end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == part]


@given(tokens=texts)
def test_the_longest_match_is_the_longest_end_seen_before(tokens: list[int]) -> None:
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


@given(tokens=texts, most=st.integers(1, 12), room=st.integers(1, 6))
def test_trees_keep_to_what_they_are_given(tokens: list[int], most: int, room: int) -> None:
    nodes = build_tree(own(tokens), MatchRates(), most, room)
    assert len(nodes) <= most
    depths, paths = [0], [()]
    for index, node in enumerate(nodes, start=1):
        assert 0 <= node.parent < index
        depths.append(depths[node.parent] + 1)
        paths.append((*paths[node.parent], node.token))  # type: ignore[arg-type]
        assert node.confidence >= LEAST
        if node.parent:
            assert node.confidence <= nodes[node.parent - 1].confidence + 1e-12
    assert max(depths) <= room
    assert len(set(paths)) == len(paths)  # no guess twice


def test_a_text_that_repeats_is_continued() -> None:
    line = [5, 6, 7, 8, 9, 10, 11, 12]
    nodes = build_tree(own(line * 3 + line[:3]), MatchRates(), 5, 5)
    assert [node.token for node in nodes] == [8, 9, 10, 11, 12]


def test_a_text_that_goes_round_is_continued_round() -> None:
    for period in (1, 2, 3):
        tokens = [7 + i % period for i in range(30)]
        nodes = build_tree(own(tokens), MatchRates(), 8, 8)
        assert [node.token for node in nodes] == [7 + i % period for i in range(30, 38)]


def test_what_follows_more_often_comes_first() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    nodes = build_tree(own(tokens), MatchRates(), 8, 1)
    assert [node.token for node in nodes][:2] == [3, 4]


def test_trust_follows_what_happens() -> None:
    trust = MatchRates()
    before = trust[3]
    for _ in range(50):
        trust.note(3, False)
    assert trust[3] < 0.25 * before
    assert trust[4] == MatchRates()[4]


def test_the_automaton_stays_linear() -> None:
    """Ten thousand tokens of one kind, the worst there is, and of two."""
    for period in (1, 2, 7):
        text = automaton([i % period for i in range(10_000)])
        assert len(text.next) <= 2 * text.size
        assert sum(map(len, text.next)) <= 3 * text.size


def test_it_drafts_and_forgets() -> None:
    target: Any = zoo.tiny("llama")
    prompts = zoo.ragged_prompts(3)
    plain = LLM(target, "none", max_batch=3).generate(
        prompts, SamplingParams(temperature=0, max_tokens=60)
    )
    llm = LLM(target, {"method": "suffix", "num_speculative_tokens": 7}, max_batch=3)
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60))
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.accepted for out in outs) > 0
    assert not llm.engine.drafter._indexes  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------- earlier outputs


@given(known=texts, more=texts, text=texts)
@example(known=[0, 0, 1, 0], more=[1, 1], text=[1, 1])  # the cursor's state is split under it
def test_a_cursor_finds_the_longest_end_that_occurs_elsewhere(
    known: list[int], more: list[int], text: list[int]
) -> None:
    """Also when the other text grows meanwhile."""
    other, cursor = automaton(known), AutomatonCursor()
    for token in text[: len(text) // 2]:
        cursor.advance(other, token)
    for token in more:
        other.extend(token)
    for token in text[len(text) // 2 :]:
        cursor.advance(other, token)
    everything = known + more
    longest = max(n for n in range(len(text) + 1) if occurrences(everything, text[len(text) - n :]))
    # What began before the growth may be found shorter than it is by now, never longer.
    assert cursor.length <= longest
    if not more:
        assert cursor.length == longest
    if cursor.state:
        assert other.length[other.link[cursor.state]] < cursor.length
        assert cursor.length <= other.length[cursor.state]


def test_the_store_is_bounded_and_forgets_the_oldest() -> None:
    store = SharedCorpus(100)
    for number in range(20):
        store.add("a" if number % 2 else "b", [number] * 10)
        assert store.tokens <= 100
    kept = [text[0] for _, text in store.texts()]
    assert kept == sorted(kept)
    assert kept[-1] == 19
    assert 0 not in kept
    for scope in "ab":
        known = {token for state in store.automaton(scope).next for token in state} - {-1}
        assert known == {text[0] for owner, text in store.texts() if owner == scope}


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


GREEDY = SamplingParams(temperature=0, max_tokens=40)
SHARED = {"method": "suffix", "shared_tokens": 1000, "num_speculative_tokens": 7}


def test_earlier_outputs_draft_for_their_own_scope_only(target: Any) -> None:
    prompt = zoo.ragged_prompts(1)[0]

    def accepted(llm: LLM, scope: str | None) -> int:
        return llm.generate([prompt], GREEDY, namespace=scope)[0].stats.accepted

    forced = {"method": "suffix", "num_speculative_tokens": 7}
    alone = accepted(LLM(target, forced, max_batch=1), None)
    llm = LLM(target, SHARED, max_batch=1)
    assert accepted(llm, "ann") == alone  # nothing to learn from yet
    with_own = accepted(llm, "ann")
    assert with_own > max(alone, 25)  # the same text once more
    assert accepted(llm, "bob") < with_own
    before = len(llm.engine.drafter.corpus.texts())  # type: ignore[attr-defined]
    accepted(llm, None)
    assert len(llm.engine.drafter.corpus.texts()) == before  # type: ignore[attr-defined]


def test_what_is_shared_survives(target: Any, tmp_path: Path) -> None:
    prompt, file = zoo.ragged_prompts(1)[0], tmp_path / "texts.jsonl"
    first = LLM(target, SHARED, max_batch=1)
    text = first.generate([prompt], GREEDY, namespace="ann")[0].token_ids
    first.engine.drafter.save(file)  # type: ignore[attr-defined]
    second = LLM(target, SHARED, max_batch=1)
    second.engine.drafter.load(file)  # type: ignore[attr-defined]
    again = second.generate([prompt], GREEDY, namespace="ann")[0]
    assert again.token_ids == text
    assert again.stats.accepted > 25
    for bad in ("{", '{"namespace": "a"}', '{"namespace": "a", "vocab_size": 3, "tokens": [1]}'):
        file.write_text(bad)
        with pytest.raises(errors.ConfigError, match="line 1"):
            second.engine.drafter.load(file)  # type: ignore[attr-defined]
    with pytest.raises(errors.ConfigError, match="shares nothing"):
        LLM(target, "suffix").engine.drafter.save(file)  # type: ignore[attr-defined]
    with pytest.raises(errors.ConfigError, match="shared_tokens"):
        LLM(target, {"method": "suffix", "shared_tokens": -1})
