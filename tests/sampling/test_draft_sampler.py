"""The draft sampler: what it draws is the draft, and who sees the target's noise may not draw."""

from __future__ import annotations

import warnings

import pytest
import torch

import zoo
from draftahead import LLM, Batch, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from toy import VOCAB_SIZE, context_of

SAMPLED = SamplingParams(temperature=0.9, max_tokens=20, seed=3)


def test_a_node_without_a_distribution_ends_the_chain() -> None:
    """A processor may forbid every token: then nothing is drawn there, and what was drawn before
    keeps its distribution."""

    def forbid_everything(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    sequence = context_of(processors=[forbid_everything]).sequence
    sampler = RecordedDraftSampler([sequence], [4], VOCAB_SIZE, "distribution")
    sampler.draw(torch.zeros(1, VOCAB_SIZE))
    assert sampler.chains == [[]]
    assert sampler.draft() is None


def test_drafts_are_no_deeper_than_max_depths() -> None:
    sequences = [context_of().sequence, context_of().sequence]
    sampler = RecordedDraftSampler(sequences, [1, 3], VOCAB_SIZE, "distribution")
    for _ in range(4):
        sampler.draw(torch.zeros(2, VOCAB_SIZE))
    draft = sampler.draft()
    assert draft is not None
    assert (draft.num_nodes, draft.width) == ([2, 4], 4)
    known, others = draft.read(torch.tensor([[7], [8]]))
    assert others == [[7], [8]]
    assert [tokens[1:size] for tokens, size in zip(known.tokens, known.num_nodes, strict=True)] == (
        sampler.chains
    )
    assert known.is_chain


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


class SeesNoiseThenDraws(Drafter):
    """Looks at the target's noise, and draws afterwards."""

    def propose(self, batch: Batch) -> Draft | None:
        logits = torch.zeros(len(batch.sequences), zoo.VOCABULARY)
        sequences = list(range(len(batch.sequences)))
        batch.draft_sampler.noise_coupled_topk(logits, sequences, [()] * len(sequences), 1)
        batch.draft_sampler.draw(logits)
        return None


def test_a_drafter_that_has_seen_the_targets_noise_may_not_draw() -> None:
    """In no later step either: draws chosen with that knowledge are biased."""
    target = zoo.tiny("llama")
    with pytest.warns(DrafterFaultWarning, match="seen the target's noise must not draw"):
        out = LLM(target, SeesNoiseThenDraws()).generate([[1, 2, 3]], SAMPLED)[0]
    assert out.stats.drafted == 0
    assert out.token_ids == LLM(target, "none").generate([[1, 2, 3]], SAMPLED)[0].token_ids


def test_noise_coupled_topk_is_led_by_the_token_that_the_target_samples() -> None:
    """Given the target's own logits."""
    from draftahead.sampling.sample import sample_target

    generator = torch.Generator().manual_seed(0)
    for temperature in (0.0, 0.8):
        context = context_of(temperature=temperature)
        for path in ((), (1,), (1, 2)):
            logits = torch.randn(1, VOCAB_SIZE, generator=generator)
            sampler = RecordedDraftSampler([context.sequence], [4], VOCAB_SIZE, "distribution")
            probs, tokens = sampler.noise_coupled_topk(logits, [0], [path], 2)
            own, _ = sample_target(logits, [context._replace(path=path)])
            assert tokens[0, 0] == own[0]
            assert probs[0, 0] >= probs[0, 1]
