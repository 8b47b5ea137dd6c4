"""The look-up drafter copies what its definition says, and forgets ended texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from draftahead import LLM, SamplingParams
from draftahead.drafters.lookup import NgramIndex


def slow_lookup(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The definition: longest n-gram first, newest occurrence, copied past its own end."""
    for size in range(longest, shortest - 1, -1):
        tail = tokens[len(tokens) - size :]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tail) == size and tokens[end - size : end] == tail:
                known = list(tokens)
                for offset in range(count):
                    known.append(known[end + offset])
                return known[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    shortest=st.integers(1, 2),
    extra=st.integers(0, 2),
    count=st.integers(1, 8),
    cuts=st.lists(st.integers(0, 40)),
)
def test_lookup_finds_what_its_definition_says(
    tokens: list[int], shortest: int, extra: int, count: int, cuts: list[int]
) -> None:
    """Also when the index grows piece by piece."""
    index = NgramIndex(shortest, shortest + extra)
    for cut in sorted(cut for cut in cuts if cut <= len(tokens)):
        index.extend(tokens[:cut])
    index.extend(tokens)
    expected = slow_lookup(tokens, shortest, shortest + extra, count)
    assert index.continuation(tokens, count) == expected


def test_lookup_forgets_ended_texts() -> None:
    llm = LLM(zoo.tiny("llama"), drafter="lookup")
    llm.generate(zoo.ragged_prompts(4), SamplingParams(temperature=0, max_tokens=30))
    assert not llm.engine.drafter._indexes  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["lookup", "ngram"])
def test_vllms_options_are_understood(method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    drafter: Any = LLM(zoo.tiny("llama"), drafter=config).engine.drafter
    assert (drafter.count, drafter.longest) == (3, 4)
