"""A fault in a drafter costs speed and one warning, nothing else."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Batch, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.drafters.guard import GIVE_UP_AFTER
from drafted import Garbage, KnowsOutput

GREEDY = SamplingParams(temperature=0, max_tokens=30)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=30, seed=4)


def chain(batch: Batch, tokens: list[int]) -> Draft:
    return Draft.chains(batch.roots, [tokens] * len(batch.sequences))


def changed(**fields: Callable[[Draft], Any]) -> Callable[[Batch], Draft]:
    """A chain of two tokens with some fields changed."""

    def propose(batch: Batch) -> Draft:
        draft = chain(batch, [1, 2])
        return dataclasses.replace(draft, **{name: make(draft) for name, make in fields.items()})

    return propose


def raises(batch: Batch) -> Draft:
    raise RuntimeError("broken")


FAULTS: dict[str, Callable[[Batch], Any]] = {
    "raises": raises,
    "outside the vocabulary": lambda batch: chain(batch, [10**6]),
    "negative id": lambda batch: chain(batch, [-1]),
    "trees of too many sequences": changed(
        tokens=lambda draft: draft.tokens * 2,
        parents=lambda draft: draft.parents * 2,
        num_nodes=lambda draft: draft.num_nodes * 2,
    ),
    "trees of too few sequences": changed(
        tokens=lambda draft: draft.tokens[1:],
        parents=lambda draft: draft.parents[1:],
        num_nodes=lambda draft: draft.num_nodes[1:],
    ),
    "fewer tokens than parents": changed(tokens=lambda draft: [t[:-1] for t in draft.tokens]),
    "wrong root": changed(
        tokens=lambda draft: [[(t[0] + 1) % zoo.VOCABULARY, *t[1:]] for t in draft.tokens]
    ),
    "no root": changed(num_nodes=lambda draft: [0] * len(draft.tokens)),
    "NaN as a token": changed(tokens=lambda draft: [[*t[:-1], torch.nan] for t in draft.tokens]),
    "a tensor of tokens": changed(tokens=lambda draft: draft.token_tensor),
    "more nodes than tokens": changed(num_nodes=lambda draft: [9] * len(draft.tokens)),
    "parents behind their children": changed(parents=lambda d: [[-1, 2, 1]] * len(d.tokens)),
    "a node that is its own parent": changed(parents=lambda d: [[-1, 1, 1]] * len(d.tokens)),
    "not a draft": lambda batch: "guess",
}


class Proposes(Drafter):
    """What a function returns or raises."""

    def __init__(self, propose: Callable[[Batch], Any]) -> None:
        self.function, self.calls = propose, 0

    def propose(self, batch: Batch) -> Draft | None:
        self.calls += 1
        return self.function(batch)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def expected(target: Any) -> dict[SamplingParams, list[list[int]]]:
    llm = LLM(target, drafter="none")
    prompts = zoo.ragged_prompts(3)
    return {s: [c.token_ids for c in llm.generate(prompts, s)] for s in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_propose(name: str, params: SamplingParams, target: Any, expected: Any) -> None:
    drafter = Proposes(FAULTS[name])
    with pytest.warns(DrafterFaultWarning) as caught:
        outs = LLM(target, drafter=drafter).generate(zoo.ragged_prompts(3), params)
    assert [out.token_ids for out in outs] == expected[params]
    assert len(caught) == 1  # one warning, however often it fails
    assert drafter.calls == GIVE_UP_AFTER == 8
    assert not any(out.stats.drafted for out in outs)


def test_fault_in_learn_and_release(target: Any, expected: Any) -> None:
    class FailsToLearn(Garbage):
        def learn(self, *args: Any) -> None:
            raise ValueError("no memory")

        def release(self, *args: Any) -> None:
            raise ValueError("no memory")

    with pytest.warns(DrafterFaultWarning, match="no memory"):
        outs = LLM(target, drafter=FailsToLearn()).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]


def test_a_drafter_that_fails_now_and_then_is_still_asked(target: Any, expected: Any) -> None:
    class FailsTwiceInThree(Garbage):
        calls = 0

        def propose(self, batch: Batch) -> Any:
            self.calls += 1
            if self.calls % 3:
                raise RuntimeError("not now")
            return super().propose(batch)

    drafter = FailsTwiceInThree()
    with pytest.warns(DrafterFaultWarning):
        outs = LLM(target, drafter=drafter).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]
    assert drafter.calls > 20


@pytest.mark.usefixtures("generous_policy")
def test_fault_in_what_a_drafter_reports_of_itself(target: Any, expected: Any) -> None:
    """Its offer, its idle work, its explanation: it is asked for drafts all the same."""

    class FailsToReport(KnowsOutput):
        adaptive = True

        @property
        def expected_offer(self) -> Any:
            raise RuntimeError("no offer")

        def idle_work(self) -> None:
            raise RuntimeError("no time")

        def explain(self) -> list[str]:
            raise RuntimeError("no reason")

    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): tokens for p, tokens in zip(prompts, expected[GREEDY], strict=True)}
    llm = LLM(target, FailsToReport(answers), max_batch=2)
    llm.engine._launches_ahead = True
    with pytest.warns(DrafterFaultWarning, match="FailsToReport raised an exception"):
        outs = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]
    assert sum(out.stats.accepted for out in outs) > 10
    assert llm.explain()


@pytest.mark.usefixtures("generous_policy")
def test_nonsense_that_a_drafter_reports_of_itself(target: Any, expected: Any) -> None:
    """A method in place of a property, nothing in place of a list."""

    class ReportsNonsense(KnowsOutput):
        adaptive = True

        def expected_offer(self) -> Any: ...

        def explain(self) -> Any: ...

    prompts = zoo.ragged_prompts(3)
    answers = {tuple(p): tokens for p, tokens in zip(prompts, expected[GREEDY], strict=True)}
    llm = LLM(target, ReportsNonsense(answers))
    with pytest.warns(DrafterFaultWarning, match="expected_offer is method, not an Offer or None"):
        outs = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]
    assert sum(out.stats.accepted for out in outs) > 10
    assert llm.explain()


def test_an_object_with_the_three_methods_is_a_drafter(target: Any, expected: Any) -> None:
    """It need not subclass Drafter."""

    class ThreeMethods:
        def propose(self, batch: Batch) -> Draft:
            return chain(batch, [1, 2])

        def learn(self, *args: Any) -> None: ...

        def release(self, *args: Any) -> None: ...

    llm = LLM(target, drafter=ThreeMethods())  # type: ignore[arg-type]
    llm.engine._launches_ahead = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = llm.generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]
    assert all(out.stats.drafted for out in outs)
    assert llm.explain()
    assert any("ThreeMethods, fixed size" in line for line in llm.describe())


def test_drafts_that_are_too_deep_are_cut(target: Any, expected: Any) -> None:
    """Deeper than max_tokens, more nodes than a forward takes: no fault."""
    drafter = Proposes(lambda batch: chain(batch, list(range(1, 90))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = LLM(target, drafter=drafter).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]
    assert all(out.stats.drafted for out in outs)


def test_probs_that_a_drafter_states_are_ignored(target: Any, expected: Any) -> None:
    """False ones would bias the output if they were trusted."""

    def stated(draft: Draft) -> torch.Tensor:
        return torch.full((len(draft.tokens), draft.width, zoo.VOCABULARY), 1 / zoo.VOCABULARY)

    outs = LLM(target, Proposes(changed(probs=stated))).generate(zoo.ragged_prompts(3), SAMPLED)
    assert [out.token_ids for out in outs] == expected[SAMPLED]
    assert all(out.stats.drafted for out in outs)
