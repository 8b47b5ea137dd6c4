"""What a GPU needs of the engine, without one: a pass is sent before the last one is finished with,
its tokens may be known to the device alone, and its inputs travel in one block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Sampling
from draftahead.runtime.graphs import Inputs
from draftahead.types import Draft
from drafted import ALL

PROMPTS = zoo.ragged_prompts(4)
GREEDY = Sampling(temperature=0, max_tokens=24)
WARM = Sampling(temperature=0.9, top_p=0.95, max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def ahead(target: Any, drafter: str, **options: Any) -> LLM:
    llm = LLM(target, ALL[drafter](target), max_batch=2, **options)
    llm.engine._ahead = True
    return llm


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("drafter", ["none", "lookup", "draft_model_self", "garbage_tree"])
def test_texts_are_the_same(target: Any, drafter: str, sampling: Sampling) -> None:
    """More prompts than rows: sequences come and go between two passes."""
    there = LLM(target, ALL[drafter](target), max_batch=2).generate(PROMPTS, sampling)
    outs = ahead(target, drafter).generate(PROMPTS, sampling)
    assert [out.token_ids for out in outs] == [out.token_ids for out in there]
    assert [out.stats.steps for out in outs] == [out.stats.steps for out in there]
    assert [out.stats.accepted for out in outs] == [out.stats.accepted for out in there]


@pytest.mark.parametrize("drafter", ["lookup", "draft_model_self"])
def test_a_stream_that_is_dropped_leaves_its_mate_alone(target: Any, drafter: str) -> None:
    llm = ahead(target, drafter)
    expected = llm.generate([PROMPTS[1]], GREEDY)[0].token_ids
    for steps in range(1, 4):
        dropped, kept = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
        first = next(kept)
        for _ in range(steps):
            next(dropped)
        dropped.close()
        assert llm.engine._flight is None  # what was under way had another row in it
        tokens = first.token_ids + [token for piece in kept for token in piece.token_ids]
        assert tokens == expected
    assert not llm.engine.scheduler.running


def test_a_request_may_come_while_a_pass_is_under_way(target: Any) -> None:
    llm = ahead(target, "lookup")
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS[:2]]
    one = llm.stream(PROMPTS[0], GREEDY)
    tokens = next(one).token_ids
    assert llm.engine._flight is not None
    assert llm.generate([PROMPTS[1]], GREEDY)[0].token_ids == alone[1]
    tokens += [token for piece in one for token in piece.token_ids]
    assert tokens == alone[0]


def test_a_pass_reads_its_inputs_from_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 1]])
    for with_tokens in (True, False):
        inputs = Inputs(2, 3, torch.device("cpu"), with_tokens=with_tokens)
        inputs.write(tokens, [10, 20], None, 1)
        inputs.fetch()
        assert inputs.real.tolist() == [1]
        assert inputs.lengths.tolist() == [10, 20]
        assert inputs.tokens.tolist() == tokens.tolist()
        assert inputs.depths.tolist() == [[0, 1, 2]] * 2
        assert inputs.ancestors.tolist() == [[0b1, 0b11, 0b111]] * 2
        inputs.write(tokens, [11, 21], [[-1, 0, 0], [-1, 0, 1]], 2)
        assert inputs.lengths.tolist() == [10, 20]  # nothing moves before the pass itself
        inputs.fetch()
        assert inputs.lengths.tolist() == [11, 21]
        assert inputs.depths.tolist() == [[0, 1, 1], [0, 1, 2]]
        assert inputs.ancestors.tolist() == [[0b1, 0b11, 0b101], [0b1, 0b11, 0b111]]


def test_host_memory_goes_to_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    first = Inputs(3, 11, torch.device("cpu"), with_tokens=True)
    second = Inputs(3, 11, torch.device("cpu"), with_tokens=True)
    place = first._here.data_ptr()
    assert second._here.data_ptr() != place
    del first
    assert Inputs(3, 11, torch.device("cpu"), with_tokens=True)._here.data_ptr() == place


def test_tokens_and_verdict_are_read_together() -> None:
    draft = Draft(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-1, 0]] * 2), [2, 2])
    assert draft.read_with(torch.tensor([[7], [8]])) == [[7], [8]]
    assert draft.__dict__["rows"] == [[1, 2], [3, 4]]
