"""Recycled successors of tokens: from the text itself, from its namespace, or from a table."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zoo
from draftahead import LLM, Batch, Draft, ForwardOutput, SamplingParams, errors
from draftahead.core.types import Verdict
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
    """With the target's predictions after it, rejected nodes included."""
    llm, drafter = recycling(target)
    seen: dict[int, list[int]] = {}
    real = drafter.learn

    def learn(batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        real(batch, draft, output, verdict)
        (path,), (tokens,) = verdict.paths, draft.tokens
        best = output.logits[0].topk(SUCCESSORS).indices.tolist()
        order = [n for n in range(draft.num_nodes[0]) if n not in path] + path
        seen.update({tokens[node]: best[node] for node in order})
        assert drafter._by_sequence[batch.sequences[0].id] == seen

    drafter.learn = learn  # type: ignore[method-assign]
    out = llm.generate([PROMPT], GREEDY)[0]
    assert out.token_ids == zoo.reference(target, PROMPT, 30)
    assert len(seen) > len(set(out.token_ids))  # more than the text alone would teach
    assert not drafter._by_sequence and not drafter._drafts  # forgotten with the text


def test_what_is_remembered_of_a_namespace_drafts_for_no_other(target: Any) -> None:
    llm, drafter = recycling(target, shared=True)
    first = llm.generate([PROMPT], GREEDY, namespace="ann")[0].stats
    again = llm.generate([PROMPT], GREEDY, namespace="ann")[0].stats
    assert again.steps < first.steps
    for namespace in ("bob", None):
        assert llm.generate([PROMPT], GREEDY, namespace=namespace)[0].stats.steps > again.steps
    assert set(drafter._by_namespace) == {"ann", "bob"}
    for number in range(80):
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2), namespace=str(number))
    assert len(drafter._by_namespace) <= 64
    assert "ann" not in drafter._by_namespace
    alone, drafter = recycling(target)  # shares nothing unless the drafter is asked to
    alone.generate([PROMPT], GREEDY, namespace="ann")
    assert not drafter._by_namespace


def test_the_oldest_tokens_are_dropped(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycle, "MAX_TOKENS", 5)
    llm, drafter = recycling(target, shared=True)
    out = llm.generate([PROMPT], GREEDY, namespace="ann")[0]
    memory = drafter._by_namespace["ann"]
    assert len(memory) == 5
    assert out.token_ids[-2] in memory  # the newest stay


def table(file: Path, vocab_size: int) -> Path:
    successors = torch.arange(vocab_size)[:, None].repeat(1, SUCCESSORS)
    save_file({"successors": successors}, file)
    return file


def test_a_table_drafts_before_anything_is_remembered(target: Any, tmp_path: Path) -> None:
    """One with the target's predictions after each single token adds drafts."""
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


def test_a_table_that_comes_with_the_model_is_ignored_if_it_does_not_fit(target: Any) -> None:
    """The vocabulary of the model was changed."""
    target.draftahead_alias = "smollm2"
    try:
        assert not recycling(target)[1].table
    finally:
        del target.draftahead_alias


def test_a_wrong_table_is_refused(target: Any, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    for file, message in (
        (table(tmp_path / "small", vocab_size=7), "another vocabulary"),
        (tmp_path / "junk", "no table"),
        (tmp_path / "none", "no table"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            recycling(target, successors=file)


@pytest.mark.model
def test_the_embedded_models_table_comes_with_it(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    drafter = LLM(model, "recycle", tokenizer=tokenizer, max_context=256).engine.drafter
    assert isinstance(drafter, Recycle)
    (token,) = tokenizer(" United", add_special_tokens=False).input_ids
    assert tokenizer.decode([drafter.table[token][0]]) == " States"


def test_the_script_makes_a_table_that_the_drafter_reads(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's most likely tokens after each token of the vocabulary alone."""
    script = Path(__file__).parents[2] / "scripts/successors.py"
    monkeypatch.setattr("sys.argv", ["", "--model", model_folder, "--out", str(tmp_path / "file")])
    runpy.run_path(str(script), run_name="__main__")
    llm, drafter = recycling(zoo.tiny("llama").float(), successors=tmp_path / "file")
    assert len(drafter.table) == zoo.VOCABULARY
    prompt = LLM(model_folder).encode([{"role": "user", "content": "Go on."}])
    for token in (0, 70):
        logits = llm.model(torch.tensor([[*prompt, token]])).logits[0, -1]
        assert drafter.table[token] == logits.topk(SUCCESSORS).indices.tolist()
