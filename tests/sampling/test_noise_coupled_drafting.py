"""Drafting with the target's noise: what the target would sample comes first, and a drafter that
has seen the noise may not draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead import LLM, Batch, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.core.types import Exact
from draftahead.sampling.draft_sampler import RecordedDraftSampler, scatter_to_vocab
from draftahead.sampling.noise import NodeContext, rng_key, target_rng_key, uniforms
from draftahead.sampling.sample import sample_target
from toy import VOCAB_SIZE, context_of, sampler_for

SAMPLED = SamplingParams(temperature=0.9, max_tokens=20, seed=3)
GREEDY: dict[str, Any] = {"temperature": 0.0}


def sampler_of(
    *params: dict[str, Any], exact: Exact = "distribution", vocab_size: int = VOCAB_SIZE
) -> RecordedDraftSampler:
    sequences = [context_of(**one).sequence for one in params]
    for number, sequence in enumerate(sequences):
        sequence.rng_key = rng_key(number)
    return sampler_for(sequences, [3] * len(params), vocab_size, exact)


def random_logits(seed: int, count: int, size: int = VOCAB_SIZE) -> Tensor:
    return 2 * torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


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


def test_greedy_tokens_involve_no_noise() -> None:
    """Beside a sampled sequence that has not been drafted for, a drafter may draw."""
    sampler = sampler_of(GREEDY, {"temperature": 0.9})
    sampler.noise_coupled_topk(random_logits(0, 1), [0], [()], 1)
    assert sampler.draw(random_logits(1, 2)).shape == (2,)
    sampler = sampler_of(GREEDY, {"temperature": 0.9})
    sampler.noise_coupled_topk(random_logits(0, 1), [1], [()], 1)
    with pytest.raises(ValueError, match="must not draw"):
        sampler.draw(random_logits(1, 2))


def test_noise_coupled_topk_is_led_by_the_token_that_the_target_samples() -> None:
    """Given the target's own logits."""
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.0, 0.8):
        context = context_of(temperature=temperature)
        for path in ((), (1,), (1, 2)):
            logits = torch.randn(1, VOCAB_SIZE, generator=generator)
            sampler = sampler_for([context.sequence], [4])
            probs, tokens = sampler.noise_coupled_topk(logits, [0], [path], 2)
            own, _ = sample_target(logits, [context._replace(path=path)])
            assert tokens[0, 0] == own[0]
            assert probs[0, 0] >= probs[0, 1]


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_noise_coupled_topk_over_a_draft_vocabulary(penalty: float) -> None:
    """Noise and penalties go by the target's ids, wherever a token is in the draft vocabulary."""
    sequence = context_of(temperature=0.9, repetition_penalty=penalty).sequence
    sampler = sampler_for([sequence], [4], zoo.VOCABULARY)
    tokens = torch.randperm(zoo.VOCABULARY, generator=torch.Generator().manual_seed(0))[:30]
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    paths, whole = [(), (9,)], scatter_to_vocab(logits, tokens, zoo.VOCABULARY)
    expected = sampler.noise_coupled_topk(whole, [0, 0], paths, 5)
    found = sampler.noise_coupled_topk(logits, [0, 0], paths, 5, tokens)
    torch.testing.assert_close(found, expected)
    assert set(expected[1].flatten().tolist()) <= set(tokens.tolist())


@pytest.mark.parametrize("exact", ["distribution", "replay"])
def test_weights_are_probability_over_noise(exact: Exact) -> None:
    """Normalised over the likeliest 64 tokens."""
    sampler = sampler_of({}, {"temperature": 0.6}, exact=exact, vocab_size=90)
    sequences, paths = [0, 1, 1], [(), (1,), (1, 2)]
    logits = random_logits(5, 3, 90)
    weights, ids = sampler.noise_coupled_topk(logits, sequences, paths, 5)
    assert weights.shape == ids.shape == (3, 5)
    for i, (b, path) in enumerate(zip(sequences, paths, strict=True)):
        probs, likely = (logits[i] / (1.0, 0.6)[b]).softmax(-1).topk(64)
        key = target_rng_key(NodeContext(sampler._sequences[b], path))
        expected = probs.double() / -uniforms([key], 90)[0][likely].log()
        best, index = (expected / expected.sum()).topk(5)
        assert ids[i].tolist() == likely[index].tolist()
        assert weights[i].tolist() == pytest.approx(best.tolist())
    assert all(sequence.target_noise_used for sequence in sampler._sequences)


def test_only_sequences_that_were_asked_about_have_their_noise_seen() -> None:
    sampler = sampler_of({}, {})
    sampler.noise_coupled_topk(random_logits(0, 1), [1], [()], 2)
    assert [sequence.target_noise_used for sequence in sampler._sequences] == [False, True]


def test_a_device_gets_the_keys_of_the_targets_noise_and_may_not_draw_any_more() -> None:
    sampler = sampler_of({}, {})
    keys = sampler.target_rng_keys(3)
    for sequence, found in zip(sampler._sequences, keys, strict=True):
        contexts = [NodeContext(sequence, (5,) * depth) for depth in range(3)]
        assert found == [target_rng_key(context) for context in contexts]
    with pytest.raises(ValueError, match="has seen the target's noise"):
        sampler.draw(torch.zeros(2, VOCAB_SIZE))


def test_greedy_sequences_are_ranked_by_probability_alone() -> None:
    logits = random_logits(1, 2)
    probs, order = logits.softmax(-1).topk(3)
    weights, ids = sampler_of(GREEDY, GREEDY).noise_coupled_topk(logits, [0, 1], [(), ()], 3)
    assert ids.tolist() == order.tolist()
    assert weights.tolist() == probs.tolist()
    weights, ids = sampler_of(GREEDY, {}).noise_coupled_topk(logits, [0, 1], [(), ()], 3)
    assert ids[0].tolist() == order[0].tolist()
    assert weights[0].tolist() == pytest.approx(probs[0].tolist())
    assert float(weights[1].sum()) <= 1


@pytest.mark.parametrize("params", [GREEDY, {}])
def test_no_more_tokens_than_the_vocabulary_has(params: dict[str, Any]) -> None:
    _, ids = sampler_of(params).noise_coupled_topk(random_logits(1, 1), [0], [()], 9)
    assert ids.shape == (1, VOCAB_SIZE)


@pytest.mark.parametrize("params", [{}, GREEDY, {"logit_bias": {2: 9.0}}])
def test_tokens_of_a_draft_vocabulary_become_the_targets_ids(params: dict[str, Any]) -> None:
    """Noise and processors go by the target's ids, whatever the drafter's are."""
    tokens = torch.tensor([3, 2, 0])
    logits = random_logits(2, 1, 3)
    whole = torch.full((1, VOCAB_SIZE), -1e30)
    whole[0, tokens] = logits[0]
    weights, ids = sampler_of(params).noise_coupled_topk(logits, [0], [()], 2, tokens)
    expected_weights, expected = sampler_of(params).noise_coupled_topk(whole, [0], [()], 2)
    assert ids.tolist() == expected.tolist()
    torch.testing.assert_close(weights, expected_weights)
    assert int(ids[0, 0]) == 2 or "logit_bias" not in params


def test_logits_of_a_draft_vocabulary_are_scattered() -> None:
    whole = scatter_to_vocab(torch.tensor([[[1.0, 2.0]]]), torch.tensor([3, 0]), 5)
    inf = torch.inf
    assert whole.tolist() == [[[2, -inf, -inf, 1, -inf]]]
    assert scatter_to_vocab(whole, None, 5) is whole


def test_greedy_sequences_keep_their_probabilities_beside_sampled_ones() -> None:
    """Of the whole vocabulary, not only of the tokens that compete with the noise."""
    logits = 0.1 * random_logits(0, 2, size=200)
    sampler = sampler_of(GREEDY, {}, vocab_size=200)
    found, tokens = sampler.noise_coupled_topk(logits, [0, 1], [(), ()], 3)
    probs, best = logits[0].softmax(-1).topk(3)
    assert tokens[0].tolist() == best.tolist()
    assert torch.allclose(found[0].float(), probs)


def test_weights_at_the_lowest_temperature_are_numbers() -> None:
    """In single precision 90 over it is infinite."""
    logits = torch.full((1, VOCAB_SIZE), 90.0)
    logits[0, 2] = 95.0
    weights, tokens = sampler_of({"temperature": 5e-324}).noise_coupled_topk(logits, [0], [()], 1)
    assert (weights.tolist(), tokens.tolist()) == ([[1.0]], [[2]])
