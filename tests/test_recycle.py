"""Successors of tokens, remembered: from the text's own verdicts, a scope's, or a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.drafters import recycle
from draftahead.drafters.recycle import SUCCESSORS, Recycle

GREEDY = SamplingParams(temperature=0, max_tokens=30)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def recycling(target: Any, **options: Any) -> tuple[LLM, Recycle]:
    llm = LLM(target, {"method": "recycle", "num_speculative_tokens": 8, **options})
    assert isinstance(llm.engine.drafter, Recycle)
    return llm, llm.engine.drafter


def test_every_verified_node_is_remembered(target: Any) -> None:
    """As the target scored it, with guesses that were turned down among them."""
    llm, drafter = recycling(target)
    seen: dict[int, list[int]] = {}
    real = drafter.learn

    def learn(batch: Any, verdict: Any, scores: Any) -> None:
        real(batch, verdict, scores)
        (path,), (tokens,) = verdict.paths, scores.draft.tokens
        best = scores.logits[0].topk(SUCCESSORS).indices.tolist()
        order = [n for n in range(scores.draft.num_nodes[0]) if n not in path] + path
        seen.update({tokens[node]: best[node] for node in order})
        assert drafter._own[batch.sequences[0].id] == seen

    drafter.learn = learn  # type: ignore[method-assign]
    out = llm.generate([PROMPT], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, PROMPT, 30)
    assert len(seen) > len(set(out.token_ids))  # more than the text alone would teach
    assert not drafter._own and not drafter._drafts  # and forgotten with it


def test_a_scope_remembers_and_nobody_else_profits(target: Any) -> None:
    llm, drafter = recycling(target, shared=True)
    first = llm.generate([PROMPT], GREEDY, namespace="ann")[0].stats
    again = llm.generate([PROMPT], GREEDY, namespace="ann")[0].stats
    assert again.steps < first.steps
    for scope in ("bob", None):
        assert llm.generate([PROMPT], GREEDY, namespace=scope)[0].stats.steps > again.steps
    assert set(drafter._shared) == {"ann", "bob"}
    for number in range(80):
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2), namespace=str(number))
    assert len(drafter._shared) <= 64
    assert "ann" not in drafter._shared
    alone, drafter = recycling(target)  # nothing is shared unless the drafter is asked to, either
    alone.generate([PROMPT], GREEDY, namespace="ann")
    assert not drafter._shared


def test_memory_is_bounded(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycle, "MAX_TOKENS", 5)
    llm, drafter = recycling(target, shared=True)
    out = llm.generate([PROMPT], GREEDY, namespace="ann")[0]
    memory = drafter._shared["ann"]
    assert len(memory) == 5
    assert out.token_ids[-2] in memory  # the newest stay


def table(file: Path, rows: int = zoo.VOCABULARY) -> Path:
    save_file({"successors": torch.arange(rows)[:, None].repeat(1, SUCCESSORS) % rows}, file)
    return file


def test_a_table_is_a_start(target: Any, tmp_path: Path) -> None:
    """One that says what the target says after each token alone is right now and then."""
    with torch.no_grad():
        logits = target(torch.arange(zoo.VOCABULARY)[:, None]).logits[:, -1]
    found = logits.topk(SUCCESSORS).indices
    file = tmp_path / "table.safetensors"
    save_file({"successors": found.to(torch.uint16)}, file)
    llm, drafter = recycling(target, successors=file)
    assert drafter.table[3] == found[3].tolist()
    with_table = llm.generate(zoo.ragged_prompts(3), GREEDY)
    without = recycling(target)[0].generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in with_table] == [out.token_ids for out in without]
    assert sum(o.stats.drafted for o in with_table) > sum(o.stats.drafted for o in without)


def test_a_table_that_fits_no_more_is_left_alone(target: Any) -> None:
    """One that nobody asked for, of a model whose vocabulary was changed."""
    target.draftahead_alias = "smollm2"
    try:
        assert not recycling(target)[1].table
    finally:
        del target.draftahead_alias


def test_a_wrong_table_is_refused(target: Any, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    for file, says in (
        (table(tmp_path / "small", rows=7), "another vocabulary"),
        (tmp_path / "junk", "no table"),
        (tmp_path / "none", "no table"),
    ):
        with pytest.raises(errors.ConfigError, match=says):
            recycling(target, successors=file)


@pytest.mark.model
def test_the_embedded_models_table_comes_with_it(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    drafter = LLM(model, "recycle", tokenizer=tokenizer, max_context=256).engine.drafter
    assert isinstance(drafter, Recycle)
    (token,) = tokenizer(" United", add_special_tokens=False).input_ids
    assert tokenizer.decode([drafter.table[token][0]]) == " States"
