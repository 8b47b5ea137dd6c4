"""What a drafter must not be able to do: drop what it drew, or change what it is shown."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Batch, Draft, Drafter, SamplingParams
from draftahead.core.draft import DeviceDraft
from draftahead.core.types import ForwardOutput, Verdict
from draftahead.engine import engine
from drafted import KnowsOutput

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, seed=4)
PROMPTS = zoo.ragged_prompts(3)
COUNTS = ("steps", "steps_by_nodes", "drafted", "accepted", "drafted_at", "accepted_at")


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def answers(target: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): zoo.reference(target, prompt, 24) for prompt in PROMPTS}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("deeper", [True, False])
def test_what_was_drawn_is_the_draft_whatever_is_returned(
    deeper: bool, params: SamplingParams, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that draws one token and returns another would bend the distribution."""
    drawn: list[list[int]] = []
    real = engine.accept

    class DrawsOneReturnsAnother(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            tokens = batch.draft_sampler.draw(torch.zeros(len(batch.sequences), zoo.VOCABULARY))
            drawn.append(tokens.tolist())
            others = [[(token + 1) % zoo.VOCABULARY] * (1 + deeper) for token in drawn[-1]]
            return Draft.chains(batch.roots, others)

    def checked(
        draft: Draft | DeviceDraft, output: ForwardOutput, batch: Batch, *rest: Any, **options: Any
    ) -> tuple[Verdict, Draft]:
        verdict, known = real(draft, output, batch, *rest, **options)
        for b, tokens in enumerate(known.tokens):
            expected = drawn[-1][b : b + 1] if batch.max_depths[b] else []
            assert tokens[1 : known.num_nodes[b]] == expected
        if any(batch.max_depths):
            assert (draft.probs is not None) == (not params.is_greedy)
        return verdict, known

    monkeypatch.setattr(engine, "accept", checked)
    outs = LLM(target, DrawsOneReturnsAnother()).generate(PROMPTS, params)
    assert [len(out.token_ids) for out in outs] == [24] * 3
    assert all(out.stats.drafted for out in outs)


class SpoilsWhatItLearns(KnowsOutput):
    """Guesses well, and then overwrites all that it is told."""

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        lists: list[list[Any]] = [*draft.tokens, *draft.parents, *(draft.confidence or [])]
        lists += [draft.num_nodes, *verdict.paths, *verdict.tokens]
        for values in lists:
            values[:] = [0] * 9
        verdict.errors[0] = AssertionError("not an error")  # type: ignore[assignment]
        draft.token_tensor.zero_()
        draft.parent_tensor.zero_()
        output.logits.fill_(torch.nan)


class StatesConfidence(SpoilsWhatItLearns):
    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        draft = super().propose(batch)
        assert isinstance(draft, Draft)
        confidence = [[0.9] * (size - 1) for size in draft.num_nodes]
        return dataclasses.replace(draft, confidence=confidence)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("drafter", [SpoilsWhatItLearns, StatesConfidence])
def test_learn_may_overwrite_what_it_is_given(
    drafter: type[KnowsOutput], target: Any, answers: Any
) -> None:
    """Paths, tokens, errors, draft and logits: output, statistics and log-probabilities stay."""
    params = dataclasses.replace(GREEDY, logprobs=2)
    expected = LLM(target, KnowsOutput(answers)).generate(PROMPTS, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = LLM(target, drafter(answers)).generate(PROMPTS, params)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.drafted == other.drafted
        assert one.logprobs == other.logprobs
        for name in COUNTS:
            assert getattr(one.stats, name) == getattr(other.stats, name), name
    assert sum(out.stats.accepted for out in found) > 20
