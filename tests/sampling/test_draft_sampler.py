"""The draft sampler: what it draws is the draft, with the distribution that it was drawn from."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead import LLM, Batch, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.core.types import Exact
from draftahead.sampling import draft_sampler
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    rng_key,
    sample_gumbel,
    step_rng_key,
)
from draftahead.sampling.processors import probs_of
from draftahead.sampling.sample import sample_target
from toy import VOCAB_SIZE, context_of, sampler_for

SAMPLED = SamplingParams(temperature=0.9, max_tokens=20, seed=3)


def test_a_node_without_a_distribution_ends_the_chain() -> None:
    """A processor may forbid every token: then nothing is drawn there, and what was drawn before
    keeps its distribution."""

    def forbid_everything(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    sequence = context_of(processors=[forbid_everything]).sequence
    sampler = sampler_for([sequence], [4])
    sampler.draw(torch.zeros(1, VOCAB_SIZE))
    assert sampler.chains == [[]]
    assert sampler.draft() is None


def test_drafts_are_no_deeper_than_max_depths() -> None:
    sequences = [context_of().sequence, context_of().sequence]
    sampler = sampler_for(sequences, [1, 3])
    for _ in range(4):
        sampler.draw(torch.zeros(2, VOCAB_SIZE))
    draft = sampler.draft()
    assert draft is not None
    assert (draft.num_nodes, draft.width) == ([2, 4], 4)
    assert draft.probs is not None
    assert draft.probs.shape == (2, 4, VOCAB_SIZE)  # of every node
    known, others = draft.to_host(torch.tensor([[7], [8]]))
    assert others == [[7], [8]]
    assert [tokens[1:size] for tokens, size in zip(known.tokens, known.num_nodes, strict=True)] == (
        sampler.chains
    )
    assert known.is_chain


def sampler_of(
    *params: dict[str, Any], exact: Exact = "distribution", max_depths: list[int] | None = None
) -> RecordedDraftSampler:
    """For one sequence with each of these parameters; the noise of each its own."""
    sequences = [context_of(**one).sequence for one in params]
    for number, sequence in enumerate(sequences):
        sequence.rng_key = rng_key(number)
    return sampler_for(sequences, max_depths or [3] * len(params), VOCAB_SIZE, exact)


def logits_at(depth: int, batch: int, size: int = VOCAB_SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(depth)
    return 2 * torch.randn(batch, size, generator=generator)


def contexts_of(sampler: RecordedDraftSampler) -> list[NodeContext]:
    """Where the next tokens are drawn."""
    chains = zip(sampler._sequences, sampler.chains, strict=True)
    return [NodeContext(sequence, tuple(chain)) for sequence, chain in chains]


PENALTIES = {"presence_penalty": 1.0, "repetition_penalty": 1.5}


@pytest.mark.parametrize(
    "params",
    [[{}, {"temperature": 0.5}], [{}, PENALTIES], [PENALTIES, {"temperature": 0.0}]],
    ids=["sampled", "penalties", "greedy beside it"],
)
def test_tokens_are_drawn_from_the_recorded_distributions_with_keys_of_their_own(
    params: list[dict[str, Any]],
) -> None:
    sampler, recorded = sampler_of(*params), []
    for depth in range(3):
        contexts = contexts_of(sampler)
        drawn = sampler.draw(logits_at(depth, 2))
        recorded.append(probs_of(logits_at(depth, 2), contexts))
        keys = [step_rng_key(RngStream.DRAFT, context) for context in contexts]
        assert drawn.tolist() == sample_gumbel(recorded[-1], keys).tolist()
        assert [chain[-1] for chain in sampler.chains] == drawn.tolist()
    draft = sampler.draft()
    assert draft is not None
    assert draft.probs is not None
    assert torch.equal(draft.probs[:, :3], torch.stack(recorded, 1))
    assert not draft.probs[:, 3].any()  # a leaf has no children
    known, _ = draft.to_host()
    assert known.num_nodes == [4, 4]
    assert known.tokens == [[1, *chain] for chain in sampler.chains]
    assert known.parents == [[-1, 0, 1, 2]] * 2


@pytest.mark.parametrize("params", [{}, {"presence_penalty": 0.5}], ids=["plain", "processors"])
def test_a_chain_ends_at_its_depth_or_where_the_drafter_stops(params: dict[str, Any]) -> None:
    sampler = sampler_of(*[params] * 4, max_depths=[3, 1, 0, 3])
    assert sampler.chains == [[]] * 4
    assert sampler.draft() is None
    active = torch.tensor([True, True, True, True])
    for depth, lengths in enumerate([[1, 1, 0, 1], [1, 1, 0, 2], [1, 1, 0, 3]]):
        if depth:
            active[0] = depth == 2  # ends after one token; going on later changes nothing
        sampler.draw(logits_at(depth, 4), active)
        assert [len(chain) for chain in sampler.chains] == lengths
        draft = sampler.draft()
        assert draft is not None
        assert draft.num_nodes == [1 + n for n in lengths]
        assert draft.width == 2 + depth
    sampler.draw(logits_at(3, 4))
    assert [len(chain) for chain in sampler.chains] == [1, 1, 0, 3]
    draft = sampler.draft()
    assert draft is not None
    assert draft.width == 4  # as wide as the longest, and no wider


def test_a_sequence_without_a_distribution_ends_its_own_chain_only() -> None:
    def nothing(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if ids.shape[1] > 3 else scores

    sampler = sampler_of({"processors": [nothing]}, {"presence_penalty": 0.5})
    for depth in range(3):
        sampler.draw(logits_at(depth, 2))
    assert [len(chain) for chain in sampler.chains] == [2, 3]
    draft = sampler.draft()
    assert draft is not None
    assert draft.num_nodes == [3, 4]
    assert draft.probs is not None
    assert draft.probs.isfinite().all()


@pytest.mark.parametrize(
    ("exact", "params"),
    [
        ("distribution", [{"temperature": 0.0}, {"temperature": 0.0}]),
        ("replay", [{}, {"temperature": 0.5, "presence_penalty": 0.5}]),
    ],
)
def test_drafts_that_are_accepted_by_equality_use_the_targets_noise(
    exact: Exact, params: list[dict[str, Any]]
) -> None:
    """All sequences greedy, or replay: no distribution is recorded."""
    sampler = sampler_of(*params, exact=exact)
    for depth in range(2):
        logits, contexts = logits_at(depth, 2), contexts_of(sampler)
        assert sampler.draw(logits).tolist() == sample_target(logits, contexts)[0].tolist()
    draft = sampler.draft()
    assert draft is not None
    assert draft.probs is None


def test_one_sampled_sequence_decides_for_all_that_distributions_are_recorded() -> None:
    sampler = sampler_of({}, {"temperature": 0.0})
    sampler.draw(logits_at(0, 2))
    draft = sampler.draft()
    assert draft is not None
    assert draft.probs is not None


def test_greedy_draws_take_a_known_argmax_within_the_vocabulary() -> None:
    greedy = {"temperature": 0.0}
    sampler = sampler_of(greedy, greedy)
    known = torch.tensor([2, -1])  # -1: no logit was finite
    assert sampler.draw(logits_at(0, 2), argmax=known).tolist() == [2, 0]
    assert sampler.draw(logits_at(0, 2)).tolist() == logits_at(0, 2).argmax(-1).tolist()
    wide = logits_at(0, 2, VOCAB_SIZE + 3)
    wide[:, VOCAB_SIZE:] = 99.0  # tokens that the target does not have
    expected = wide[:, :VOCAB_SIZE].argmax(-1).tolist()
    assert sampler.draw(wide, argmax=torch.tensor([5, 6])).tolist() == expected
    biased = sampler_of({"temperature": 0.0, "logit_bias": {3: 99.0}})
    assert biased.draw(logits_at(0, 1), argmax=torch.tensor([2])).tolist() == [3]
    sampled = sampler_of({})  # there the argmax has no meaning
    drawn = sampled.draw(logits_at(0, 1), argmax=torch.tensor([9]))
    assert drawn.tolist() == sampler_of({}).draw(logits_at(0, 1)).tolist()


def test_what_cannot_be_drawn_is_refused_before_the_draw() -> None:
    sampler = sampler_of({}, {})
    for wrong in (torch.zeros(VOCAB_SIZE), torch.zeros(1, VOCAB_SIZE), torch.zeros(2, 1, 4)):
        with pytest.raises(ValueError, match="draw takes logits"):
            sampler.draw(wrong)
    sampler._sequences[1].target_noise_used = True
    with pytest.raises(ValueError, match="seen the target's noise"):
        sampler.draw(logits_at(0, 2))
    assert sampler.chains == [[], []]
    replay = sampler_of({}, exact="replay")
    replay._sequences[0].target_noise_used = True
    replay.draw(logits_at(0, 1))  # there drafts use that noise anyway
    assert len(replay.chains[0]) == 1


@pytest.mark.parametrize("size", [1, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_logits_are_fitted_to_the_vocabulary_and_made_finite(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut or padded; half precision is computed in single, double stays double."""
    seen = []

    def noted(logits: Tensor, contexts: Any) -> Tensor:
        seen.append(logits)
        return probs_of(logits, contexts)

    monkeypatch.setattr(draft_sampler, "probs_of", noted)
    sampler = sampler_for([context_of().sequence], [3], size)
    sampler.draw(torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf]], dtype=dtype))
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    assert seen[0].dtype == computed
    lowest = torch.finfo(computed).min / 4
    assert seen[0].tolist() == [[1, lowest, -lowest, lowest, lowest, lowest][:size]]


@pytest.mark.parametrize("shape", [(1, 1, zoo.VOCABULARY), (2, zoo.VOCABULARY), (zoo.VOCABULARY,)])
def test_logits_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    class WrongShape(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            batch.draft_sampler.draw(torch.zeros(shape))
            return None

    target = zoo.tiny("llama")
    plain = LLM(target, "none").generate(zoo.ragged_prompts(1), SAMPLED)[0]
    with pytest.warns(DrafterFaultWarning, match="draw takes logits"):
        out = LLM(target, drafter=WrongShape()).generate(zoo.ragged_prompts(1), SAMPLED)[0]
    assert out.token_ids == plain.token_ids


def test_draws_count_even_if_the_drafter_fails_afterwards() -> None:
    """To fail after an unwelcome draw would be a way of dropping it, which biases the output."""
    drawn: list[int] = []

    class FailsAfterDraw(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            tokens = batch.draft_sampler.draw(torch.zeros(len(batch.sequences), zoo.VOCABULARY))
            drawn.append(int(tokens[0]))
            raise RuntimeError("not this token")

    llm = LLM(zoo.tiny("llama"), drafter=FailsAfterDraw())
    with pytest.warns(DrafterFaultWarning):
        out = llm.generate(zoo.ragged_prompts(1), SAMPLED)[0]
    assert out.stats.drafted == len(drawn) == 8


def test_nan_logits_of_a_drafter_are_drawn_from_without_a_fault() -> None:
    class NanLogits(Drafter):
        def propose(self, batch: Batch) -> Draft | None:
            batch.draft_sampler.draw(torch.full((len(batch.sequences), zoo.VOCABULARY), torch.nan))
            return None

    llm = LLM(zoo.tiny("llama"), drafter=NanLogits())
    for temperature in (0, 0.9):
        params = SamplingParams(temperature=temperature, max_tokens=30, seed=4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = llm.generate(zoo.ragged_prompts(1), params)[0]
        assert len(out.token_ids) == 30
        assert out.finish_reason == "length"
