"""What a drafter must not be able to do: drop what it drew, or change what it is shown."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Batch, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.core.draft import DeviceDraft
from draftahead.core.types import ForwardOutput, SequenceView, Verdict
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


# ------------------------------------------------------------------------------ what is read-only


def write_everywhere(*roots: Any) -> int:
    """Overwrites whatever can be reached from these objects by public names, items and attributes;
    returns how many objects that were."""
    found, todo = dict[int, Any](), list(roots)
    while todo:
        one = todo.pop()
        if id(one) in found or isinstance(one, int | float | str | type(None)) or callable(one):
            continue
        found[id(one)] = one
        if isinstance(one, torch.Tensor):
            one.fill_(7)
            continue
        names = [name for name in dir(one) if not name.startswith("_")]
        for name in names:
            with suppress(Exception):
                todo.append(getattr(one, name))
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, Sequence | set | frozenset):
            todo += itertools.islice(one, 20)
        for name, junk in itertools.product(names, ([], None, lambda *_: None)):
            with suppress(Exception):
                setattr(one, name, junk)
        for write in ("clear()", "append(7)", "__setitem__(0, 7)", "__setitem__(-1, 7)"):
            with suppress(Exception):
                eval(f"one.{write}")
    return len(found)


class Vandal(KnowsOutput):
    """Proposes what it would, and writes to everything that it is given, before and after."""

    writes = True

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        self.write(batch)
        draft = super().propose(batch)
        self.write(batch)
        return draft

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        self.write(batch, draft, output, verdict)

    def release(self, sequence: SequenceView) -> None:
        self.write(sequence)

    def write(self, *things: Any) -> None:
        if self.writes:
            assert write_everywhere(*things) > 1


class DrawingVandal(Vandal):
    """Draws its chains, and overwrites what it drew."""

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        for depth in range(2):
            logits = torch.zeros(len(batch.sequences), zoo.VOCABULARY)
            logits[:, 10 * depth : 10 * depth + 30] = 2.0
            drawn = batch.draft_sampler.draw(logits)
            self.write(logits, [drawn], batch, batch.draft_sampler, batch.draft_sampler.draft())
        return None


def forbids_seven(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(-1, torch.tensor([7]), -torch.inf)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("drafter", [Vandal, DrawingVandal])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_may_write_to_all_that_it_is_given(
    drafter: type[Vandal], params: SamplingParams, target: Any, answers: Any
) -> None:
    """Everything that a request may ask for is the same as with a drafter that does not."""
    everything = dataclasses.replace(
        params,
        logit_bias={3: 1.0},
        bad_words=[[4], [5, 6]],
        stop_token_ids=[96],
        presence_penalty=0.5,
        min_tokens=3,
        logprobs=2,
        processors=[forbids_seven],
    )
    for one in (params, everything):
        careful = drafter(answers)
        careful.writes = False
        expected = LLM(target, careful).generate(PROMPTS, one)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = LLM(target, drafter(answers)).generate(PROMPTS, one)
        assert [out.stats.drafted for out in found] == [out.stats.drafted for out in expected]
        assert sum(out.stats.drafted for out in found) > 20
        for name in ("token_ids", "drafted", "logprobs", "finish_reason"):
            assert [getattr(out, name) for out in found] == [getattr(out, name) for out in expected]


def set_item(tokens: Any) -> None:
    tokens[-1] = 7


WRITES: dict[str, Callable[[Batch], Any]] = {
    "appends a token": lambda batch: batch.sequences[0].tokens.append(7),  # type: ignore[attr-defined]
    "replaces a token": lambda batch: set_item(batch.sequences[0].tokens),
    "replaces the tokens": lambda batch: setattr(batch.sequences[0], "tokens", [7]),
    "makes it greedy": lambda batch: setattr(batch.sequences[0], "temperature", 0.0),
    "asks for deeper drafts": lambda batch: setattr(batch, "max_depths", (99,) * 3),
    "replaces the sampler's draft": lambda batch: setattr(batch.draft_sampler, "draft", None),
    "replaces the costs": lambda batch: setattr(batch.step_cost, "of", None),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_is_a_fault_of_the_drafter(name: str, target: Any, answers: Any) -> None:
    class Writes(KnowsOutput):
        def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
            WRITES[name](batch)
            return super().propose(batch)

    expected = LLM(target, "none").generate(PROMPTS, SAMPLED)
    with pytest.warns(DrafterFaultWarning, match="raised an exception and is ignored"):
        found = LLM(target, Writes(answers)).generate(PROMPTS, SAMPLED)
    assert [out.token_ids for out in found] == [out.token_ids for out in expected]
    assert not any(out.stats.drafted for out in found)


def test_an_argmax_outside_the_vocabulary_is_a_bad_draft_and_no_more(
    target: Any, answers: Any
) -> None:
    class Wrong(Drafter):
        def propose(self, batch: Batch) -> None:
            size = len(batch.sequences)
            logits, argmax = torch.zeros(size, zoo.VOCABULARY), torch.full((size,), 10**6)
            batch.draft_sampler.draw(logits, argmax=argmax)

    outs = LLM(target, Wrong()).generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == [answers[tuple(prompt)] for prompt in PROMPTS]
    assert all(out.stats.drafted for out in outs)


def test_a_sequence_looks_to_a_drafter_as_it_does_to_the_engine(target: Any, answers: Any) -> None:
    """Its view grows with it."""
    seen: list[tuple[int, list[int], int]] = []

    class Looks(KnowsOutput):
        def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
            (one,) = batch.sequences
            assert batch.roots == [one.tokens[-1]] == [[*one.tokens][-1]]
            assert one.output == one.tokens[len(one.prompt) :]
            assert (one.namespace, one.temperature, one.is_greedy) == ("mine", 0.0, True)
            seen.append((one.id, one.tokens[:], one.num_generated))
            return super().propose(batch)

    (out,) = LLM(target, Looks(answers)).generate(PROMPTS[:1], GREEDY, namespace="mine")
    assert len(seen) == out.stats.steps
    for id, tokens, count in seen:
        assert tokens == [*PROMPTS[0], *out.token_ids[:count]]
        assert id == seen[0][0]
    assert [count for *_, count in seen] == sorted({count for *_, count in seen})
