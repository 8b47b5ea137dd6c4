"""The suffix drafter: drafts from the text itself, and from earlier outputs of its namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams, errors

GREEDY = SamplingParams(temperature=0, max_tokens=40)
OWN_TEXT = {"method": "suffix", "num_speculative_tokens": 7}
SHARED = {**OWN_TEXT, "shared_tokens": 1000}


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def test_it_drafts_and_forgets_ended_texts(target: Any) -> None:
    prompts, params = zoo.ragged_prompts(3), SamplingParams(temperature=0, max_tokens=60)
    plain = LLM(target, "none", max_batch=3).generate(prompts, params)
    llm = LLM(target, OWN_TEXT, max_batch=3)
    outs = llm.generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.accepted for out in outs) > 0
    assert not llm.engine.drafter._indexes  # type: ignore[attr-defined]


def test_earlier_outputs_draft_for_their_own_namespace_only(target: Any) -> None:
    prompt = zoo.ragged_prompts(1)[0]

    def accepted(llm: LLM, namespace: str | None) -> int:
        return llm.generate([prompt], GREEDY, namespace=namespace)[0].stats.accepted

    alone = accepted(LLM(target, OWN_TEXT, max_batch=1), None)
    llm = LLM(target, SHARED, max_batch=1)
    assert accepted(llm, "ann") == alone  # there are no earlier outputs yet
    with_own = accepted(llm, "ann")
    assert with_own > max(alone, 25)  # the same text once more
    assert accepted(llm, "bob") < with_own
    before = len(llm.engine.drafter.corpus.texts)  # type: ignore[attr-defined]
    accepted(llm, None)
    assert len(llm.engine.drafter.corpus.texts) == before  # type: ignore[attr-defined]


def test_earlier_outputs_can_be_saved_and_loaded(target: Any, tmp_path: Path) -> None:
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
