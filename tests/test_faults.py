"""A fault in a drafter costs speed and one warning. Nothing else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Batch, Draft, Drafter, DrafterFaultWarning, SamplingParams
from drafted import Garbage

GREEDY = SamplingParams(temperature=0, max_tokens=30)
WARM = SamplingParams(temperature=1.0, max_tokens=30, seed=4)


def chain(batch: Batch, tokens: list[int]) -> Draft:
    return Draft.chains(batch.roots, [tokens] * len(batch.sequences))


def raises(batch: Batch) -> Draft:
    raise RuntimeError("out of ideas")


def wrong_rows(batch: Batch) -> Draft:
    draft = chain(batch, [1, 2])
    return Draft(draft.tokens.repeat(2, 1), draft.parents.repeat(2, 1), draft.num_nodes * 2)


def wrong_shape(batch: Batch) -> Draft:
    draft = chain(batch, [1, 2])
    return Draft(draft.tokens[:, :-1], draft.parents, draft.num_nodes)


def wrong_root(batch: Batch) -> Draft:
    draft = chain(batch, [1, 2])
    return Draft((draft.tokens + 1) % zoo.VOCABULARY, draft.parents, draft.num_nodes)


def floats(batch: Batch) -> Draft:
    draft = chain(batch, [1, 2])
    return Draft(draft.tokens * torch.nan, draft.parents, draft.num_nodes)


def looping_parents(batch: Batch) -> Draft:
    draft = chain(batch, [1, 2])
    return Draft(draft.tokens, torch.tensor([[-1, 2, 1]] * len(batch.sequences)), draft.num_nodes)


FAULTS = {
    "raises": raises,
    "outside the vocabulary": lambda batch: chain(batch, [10**6]),
    "negative id": lambda batch: chain(batch, [-1]),
    "wrong rows": wrong_rows,
    "wrong shape": wrong_shape,
    "wrong root": wrong_root,
    "NaN": floats,
    "sizes too large": lambda batch: Draft(*_parts(chain(batch, [1])), [9] * len(batch.sequences)),
    "looping parents": looping_parents,
    "no draft at all": lambda batch: "guess",
}


def _parts(draft: Draft) -> tuple[torch.Tensor, torch.Tensor]:
    return draft.tokens, draft.parents


class Faulty(Drafter):
    def __init__(self, fault: Any) -> None:
        self.fault, self.calls = fault, 0

    def propose(self, batch: Batch) -> Draft | None:
        self.calls += 1
        return self.fault(batch)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def expected(target: Any) -> dict[SamplingParams, list[list[int]]]:
    llm = LLM(target, drafter="none")
    prompts = zoo.ragged_prompts(3)
    return {s: [c.token_ids for c in llm.generate(prompts, s)] for s in (GREEDY, WARM)}


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_propose(name: str, sampling: SamplingParams, target: Any, expected: Any) -> None:
    drafter = Faulty(FAULTS[name])
    with pytest.warns(DrafterFaultWarning) as caught:
        outs = LLM(target, drafter=drafter).generate(zoo.ragged_prompts(3), sampling)
    assert [out.token_ids for out in outs] == expected[sampling]
    assert len(caught) == 1  # one warning, however often it fails
    assert drafter.calls == 8  # and after a while it is not asked any more


def test_fault_in_learn_and_release(target: Any, expected: Any) -> None:
    class Forgetful(Garbage):
        def learn(self, *args: Any) -> None:
            raise ValueError("no memory")

        def release(self, *args: Any) -> None:
            raise ValueError("no memory")

    with pytest.warns(DrafterFaultWarning, match="no memory"):
        outs = LLM(target, drafter=Forgetful()).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]


def test_a_passing_fault_is_forgiven(target: Any, expected: Any) -> None:
    class Moody(Garbage):
        calls = 0

        def propose(self, batch: Batch) -> Draft | None:
            self.calls += 1
            if self.calls % 3:
                raise RuntimeError("not now")
            return super().propose(batch)

    drafter = Moody()
    with pytest.warns(DrafterFaultWarning):
        outs = LLM(target, drafter=drafter).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]
    assert drafter.calls > 20


def test_too_deep_drafts_are_cut(target: Any, expected: Any) -> None:
    """Deeper than max_tokens, more nodes than a pass takes: no fault, only cut."""
    drafter = Faulty(lambda batch: chain(batch, list(range(1, 90))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = LLM(target, drafter=drafter).generate(zoo.ragged_prompts(3), GREEDY)
    assert [out.token_ids for out in outs] == expected[GREEDY]


def test_claimed_laws_are_not_believed(target: Any, expected: Any) -> None:
    """A drafter that lies about its law would bend the output if it were trusted."""

    def lies(batch: Batch) -> Draft:
        draft = chain(batch, [3, 4])
        probs = torch.full((len(batch.sequences), 3, zoo.VOCABULARY), 1 / zoo.VOCABULARY)
        return Draft(draft.tokens, draft.parents, draft.num_nodes, probs)

    outs = LLM(target, drafter=Faulty(lies)).generate(zoo.ragged_prompts(3), WARM)
    assert [out.token_ids for out in outs] == expected[WARM]


def test_dice_decide_even_if_the_drafter_fails_afterwards(target: Any) -> None:
    """Failing after a draw one dislikes is a way of dropping it: the draw must stand."""
    seen: list[int] = []

    class Picky(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            drawn = batch.draft_sampler.draw(torch.zeros(len(batch.sequences), zoo.VOCABULARY))
            seen.append(int(drawn[0]))
            raise RuntimeError("I did not like that one")

    llm = LLM(target, drafter=Picky())
    with pytest.warns(DrafterFaultWarning):
        out = llm.generate(zoo.ragged_prompts(1), WARM)[0]
    assert out.stats.drafted == len(seen) == 8


def test_nan_logits_of_a_drafter_are_only_a_bad_guess(target: Any) -> None:
    class Dizzy(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            batch.draft_sampler.draw(torch.full((len(batch.sequences), zoo.VOCABULARY), torch.nan))
            return None

    for sampling in (GREEDY, WARM):
        out = LLM(target, drafter=Dizzy()).generate(zoo.ragged_prompts(1), sampling)[0]
        assert len(out.token_ids) == 30
        assert out.finish_reason == "length"


def test_non_finite_target_ends_its_row_only(target: Any) -> None:
    """The target's own NaN is an error of that request; its mates go on."""
    from draftahead.errors import NonFiniteLogitsError

    prompts = zoo.ragged_prompts(3)
    expected = [c.token_ids for c in LLM(target, drafter="none").generate(prompts, GREEDY)]

    def at_the_fifth(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        late = input_ids.shape[1] >= len(prompts[1]) + 5
        return torch.full_like(scores, torch.nan) if late else scores

    broken = SamplingParams(temperature=0, max_tokens=30, processors=[at_the_fifth])
    for drafter in ("none", "lookup"):
        llm = LLM(target, drafter=drafter)
        with pytest.raises(NonFiniteLogitsError) as caught:
            llm.generate(prompts, [GREEDY, broken, GREEDY])
        outs = caught.value.completions
        assert outs is not None
        assert [o.finish_reason for o in outs] == ["length", "error", "length"]
        assert [o.token_ids for o in outs] == [expected[0], expected[1][:5], expected[2]]


@pytest.mark.parametrize("kernels", [True, False])
def test_nan_in_the_prompt_is_an_error_not_a_text(kernels: bool) -> None:
    """The target's own NaN must show, also from a token that is only read; and it leaves nothing
    behind for the next text in that row."""
    from draftahead import errors

    model = zoo.tiny("llama", dtype=torch.float32)
    poison, clean = 50, [3, 5, 7]
    expected = LLM(model, drafter="none").generate(clean, GREEDY)[0].token_ids
    assert poison not in expected
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    llm = LLM(model, drafter="lookup", max_batch=2)
    if not kernels:
        llm.engine.verifier.runner._decoder = None
    outs = llm.generate([[3, poison, 5], clean], GREEDY, errors="return")
    assert isinstance(outs[0].error, errors.NonFiniteLogitsError)
    assert outs[1].token_ids == expected
    with pytest.raises(errors.NonFiniteLogitsError):
        list(llm.stream([3, poison, 5], GREEDY, reuse=True))
    with pytest.raises(errors.NonFiniteLogitsError):
        list(llm.stream([3, poison, 5, 9], GREEDY, reuse=True))
    assert llm.generate(clean, GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("shape", [(1, 1, zoo.VOCABULARY), (2, zoo.VOCABULARY), (zoo.VOCABULARY,)])
def test_dice_refuse_wrong_shapes(shape: tuple[int, ...], target: Any, expected: Any) -> None:
    class Clumsy(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            batch.draft_sampler.draw(torch.zeros(shape))
            return None

    with pytest.warns(DrafterFaultWarning, match="dice want logits"):
        out = LLM(target, drafter=Clumsy()).generate(zoo.ragged_prompts(1), WARM)[0]
    assert out.token_ids == expected[WARM][0]
