"""On a device the next forward is launched before the last step is finished with, and trees are
verified before the host has read them. Neither changes the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.base import DeviceTree
from draftahead.core.draft import DeviceDraft
from draftahead.core.types import ForwardOutput
from draftahead.models.runner import ModelRunner
from drafted import ALL, KnowsOutput, OnDevice, ZeroTimer, add_request, next_batch
from emulated_gpu import emulated_gpu

PROMPTS = zoo.ragged_prompts(4)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=3)
PARAMS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def launching_ahead(target: Any, drafter: Any, max_batch: int = 2) -> LLM:
    llm = LLM(target, drafter, max_batch=max_batch)
    llm.engine._launches_ahead = True
    return llm


@PARAMS
@pytest.mark.parametrize("drafter", ["none", "lookup", "draft_model_self", "garbage_tree"])
def test_output_and_steps_are_the_same(target: Any, drafter: str, params: SamplingParams) -> None:
    """More prompts than slots: sequences come and go between two forwards."""
    expected = LLM(target, ALL[drafter](target), max_batch=2).generate(PROMPTS, params)
    outs = launching_ahead(target, ALL[drafter](target)).generate(PROMPTS, params)
    for out, known in zip(outs, expected, strict=True):
        assert out.token_ids == known.token_ids
        assert out.stats.steps == known.stats.steps
        assert out.stats.accepted == known.stats.accepted


@pytest.mark.parametrize("drafter", ["lookup", "draft_model_self"])
def test_a_closed_stream_does_not_change_another_one(target: Any, drafter: str) -> None:
    llm = launching_ahead(target, ALL[drafter](target))
    expected = llm.generate([PROMPTS[1]], GREEDY)[0].token_ids
    for steps in range(1, 4):
        dropped, kept = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
        first = next(kept)
        for _ in range(steps):
            next(dropped)
        dropped.close()
        assert llm.engine._in_flight is None  # slots have moved: it is launched again
        assert first.token_ids + [t for chunk in kept for t in chunk.token_ids] == expected
    assert not llm.engine.scheduler.running


def test_a_request_may_arrive_while_a_forward_is_under_way(target: Any) -> None:
    llm = launching_ahead(target, "lookup")
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS[:2]]
    one = llm.stream(PROMPTS[0], GREEDY)
    tokens = next(one).token_ids
    assert llm.engine._in_flight is not None
    assert llm.generate([PROMPTS[1]], GREEDY)[0].token_ids == alone[1]
    assert tokens + [token for chunk in one for token in chunk.token_ids] == alone[0]


def test_entries_of_an_interrupted_move_are_computed_again(target: Any) -> None:
    """They are not reused, neither by the next sequence nor by the one that goes on."""
    llm = launching_ahead(target, "none")
    engine, cache = llm.engine, llm.engine.verifier.cache
    expected = llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    sequence = add_request(llm, PROMPTS[0], GREEDY)
    for _ in range(3):
        engine.step()
    engine._in_flight = None

    def interrupted(moves: Any) -> bool:
        raise KeyboardInterrupt

    last = len(cache.tokens_in[0]) - 1
    cache.graphed_copy, cache._pending = interrupted, {(0, last - 1): last}
    with pytest.raises(KeyboardInterrupt):
        cache.compact()
    assert len(cache.tokens_in[0]) == last - 1
    cache.graphed_copy = None
    for stored in cache.tensors():
        stored[:, 0, :, last - 1 :] = 7.0
    while sequence.finish_reason is None:
        engine.step()
    assert list(sequence.output) == expected


# ------------------------------------------------------------------------------- device drafts


@pytest.fixture
def supports_device_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target verifies trees unseen, as our GPU kernels do: whatever stands there becomes a
    valid tree, as the kernel that reads it makes one."""
    forward = ModelRunner.forward

    def unseen(
        self: ModelRunner, tokens: Any, *, parents: Any = None, **options: Any
    ) -> ForwardOutput:
        if isinstance(parents, DeviceTree):
            tokens = tokens.clamp(0, zoo.VOCABULARY - 1)
            tokens[:, 0] = torch.tensor(parents.roots)
            before = torch.arange(tokens.shape[1]) - 1
            parents = parents.trees[:, 1].clamp(min=0).minimum(before)
        return forward(self, tokens, parents=parents, **options)

    monkeypatch.setattr(ModelRunner, "forward", unseen)
    monkeypatch.setattr(ModelRunner, "supports_device_drafts", lambda *_: True)


def answers_of(target: Any, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    outs = LLM(target, "none", max_batch=4).generate(PROMPTS, params)
    return {tuple(prompt): out.token_ids for prompt, out in zip(PROMPTS, outs, strict=True)}


@pytest.mark.parametrize("corrupts", [False, True])
@PARAMS
@pytest.mark.usefixtures("supports_device_drafts", "generous_policy")
def test_device_drafts_do_not_change_the_output(
    target: Any, params: SamplingParams, corrupts: bool
) -> None:
    answers = answers_of(target, params)
    for other in (KnowsOutput(answers), ALL["garbage_tree"](target)):
        drafter = OnDevice(other, corrupts=corrupts)
        llm = launching_ahead(target, drafter, max_batch=4)
        outs = llm.generate(PROMPTS, params)
        assert [out.token_ids for out in outs] == list(answers.values())
        assert drafter.steps
        texts = [prompt + out.token_ids for prompt, out in zip(PROMPTS, outs, strict=True)]
        for held in llm.engine.verifier.cache.tokens_in:  # what may be reused
            assert any(text[: len(held)] == held for text in texts)
        if isinstance(other, KnowsOutput) and not corrupts:
            assert sum(out.stats.accepted for out in outs) > sum(out.stats.steps for out in outs)


def test_a_device_draft_is_read_first_where_it_cannot_be_verified_unseen(target: Any) -> None:
    answers = answers_of(target, GREEDY)
    llm = LLM(target, OnDevice(KnowsOutput(answers), corrupts=False), max_batch=4)
    outs = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == list(answers.values())
    assert sum(out.stats.accepted for out in outs) > 0


@pytest.mark.parametrize("corrupts", [False, True])
def test_a_device_draft_is_read_where_its_graph_cannot_be_captured(
    target: Any, corrupts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of memory, after the draft was launched."""
    answers = answers_of(target, GREEDY)
    drafter = OnDevice(KnowsOutput(answers), corrupts=corrupts)
    llm = launching_ahead(target, drafter, max_batch=4)
    monkeypatch.setattr(ModelRunner, "supports_device_drafts", lambda *_: True)
    monkeypatch.setattr(llm.engine.verifier.runner, "_backend", None)
    outs = llm.generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == list(answers.values())
    assert sum(out.stats.accepted for out in outs) > 10


@pytest.mark.usefixtures("supports_device_drafts")
def test_only_trees_on_the_roots_of_the_batch_are_verified_unseen(target: Any) -> None:
    llm = LLM(target, "none", max_batch=2)
    batch = next_batch(llm, PROMPTS[:2], GREEDY)
    verifier = llm.engine.verifier
    for roots, slots, nodes, verified in (
        (batch.roots, 2, 4, True),
        (batch.roots, 2, 64, True),
        (batch.roots, 2, 65, False),
        (batch.roots, 1, 4, False),
        ([1, 2], 2, 4, False),
    ):
        trees = torch.zeros(slots, 3, nodes, dtype=torch.int64)
        draft = DeviceDraft.of_trees(roots, trees, ZeroTimer())
        assert verifier.supports_device_draft(draft, batch) == verified
    trees = DeviceDraft.of_trees(batch.roots, torch.zeros(2, 3, 4, dtype=torch.int64), ZeroTimer())
    replay = LLM(target, "none", max_batch=2, exact="replay").engine.verifier
    assert replay.fixed_shape and not replay.supports_device_draft(trees, batch)


def test_a_gpu_launches_ahead(target: Any) -> None:
    with emulated_gpu():
        assert LLM(target, "none").engine._launches_ahead
    assert not LLM(target, "none").engine._launches_ahead
