"""The probs is transformers' own, and noise is a pure function of its key."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftahead.core.sampling_params import SamplingParams
from draftahead.sampling import accept, draft_sampler, noise
from draftahead.sampling.draft_sampler import RecordedDraftSampler
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    rng_key,
    sample_gumbel,
    step_rng_key,
    uniforms,
)
from draftahead.sampling.processors import probs_of
from toy import World


def context(**fields: object) -> NodeContext:
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    return NodeContext(World(0, SamplingParams(**(base | fields))).sequence())  # type: ignore[arg-type]


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([5, 60, 3000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_law_equals_transformers(
    seed: int,
    vocabulary: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, vocabulary, generator=generator, dtype=torch.float64)
    at = context(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    theirs.append(TemperatureLogitsWarper(temperature))
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    if min_p:
        theirs.append(MinPLogitsWarper(min_p))
    expected = theirs(torch.tensor([at.sequence.tokens]), logits.clone()).softmax(-1)
    torch.testing.assert_close(probs_of(logits, [at]), expected, rtol=1e-9, atol=1e-12)


def test_rows_of_a_batch_are_processed_apart() -> None:
    """Every row by its own settings, greedy ones among sampled ones."""
    logits = 2 * torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    rows = [
        context(),
        context(temperature=0.0),
        context(top_k=3),
        context(top_p=0.4, temperature=0.5),
        context(min_p=0.2),
    ]
    together = probs_of(logits, rows)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i], probs_of(logits[i : i + 1], [row])[0])
    assert together[1].max() == 1


def test_top_p_beyond_the_first_thousand() -> None:
    """A flat probs over many tokens: the nucleus is wider than the first look at it."""
    logits = 0.01 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(2))
    probs = probs_of(logits, [context(top_p=0.9)])
    assert 4400 < int((probs > 0).sum()) < 4600
    expected = TopPLogitsWarper(0.9)(None, logits.clone()).softmax(-1)
    torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-9)


def test_uniforms_are_uniform_and_keyed() -> None:
    values = uniforms([rng_key(1, 2), rng_key(2, 1)], 20_000)
    assert 0 < float(values.min()) < float(values.max()) < 1
    for row in values:
        assert scipy_stats.kstest(row.numpy(), "uniform").pvalue > 1e-3
    assert abs(float(torch.corrcoef(values)[0, 1])) < 0.03
    assert torch.equal(uniforms([rng_key(1, 2)], 50)[0], values[0, :50])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**63 - 1))
def test_hash_on_the_host_and_in_torch_agree(part: int) -> None:
    """The same splitmix64 in Python's integers and in torch's wrapping ones."""
    start = noise._signed((part + 1) * noise._GOLDEN)
    assert int(noise._mix(torch.tensor([start]))[0]) == rng_key(part)


def test_noise_for_drafts_and_coins_is_new_in_every_step() -> None:
    """A position drafted again must not meet the coin that rejected it before."""
    sequence = World(0, SamplingParams(temperature=1.0)).sequence()
    before = step_rng_key(RngStream.ACCEPT, NodeContext(sequence, (1, 2)))
    sequence.tokens.append(1)
    after = step_rng_key(RngStream.ACCEPT, NodeContext(sequence, (2,)))
    assert NodeContext(sequence, (2,)).position == len(sequence.tokens) + 1
    assert before != after


def test_race_never_draws_the_impossible() -> None:
    probs = torch.zeros(4000, 8)
    probs[:, 3], probs[:, 5] = 0.25, 0.75
    drawn = sample_gumbel(probs, [rng_key(i) for i in range(4000)])
    counts = torch.bincount(drawn, minlength=8).tolist()
    assert sum(counts[i] for i in (0, 1, 2, 4, 6, 7)) == 0
    assert abs(counts[3] - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 6),
    vocabulary=st.integers(2, 40),
    zeros=st.floats(0, 0.7),
)
def test_block_acceptance_is_sound_for_any_laws(
    seed: int, length: int, vocabulary: int, zeros: float
) -> None:
    """Chances lie in [0, 1], an impossible token is never kept, residuals are distributions."""
    generator = torch.Generator().manual_seed(seed)

    def probs(count: int) -> torch.Tensor:
        values = torch.rand(1, count, vocabulary, generator=generator, dtype=torch.float64)
        values[torch.rand(values.shape, generator=generator) < zeros] = 0
        values[..., 0] += 1e-3
        return values / values.sum(-1, keepdim=True)

    p, q = probs(length + 1), probs(length)
    tokens = torch.multinomial(q[0], 1, generator=generator).T
    keep, weight = accept.block_keep_probabilities(p, q, tokens, torch.tensor([length]))
    for chances in (keep, weight):
        assert 0 <= float(chances.min()) <= float(chances.max()) <= 1 + 1e-12
    for i in range(1, length + 1):
        if p[0, i - 1, tokens[0, i - 1]] == 0:
            assert not keep[0, i:].any()
    for i in range(length):
        probs = accept.block_residual(p[:, i], q[:, i], weight[:, i], torch.tensor([False]))
        assert float(probs.min()) >= 0
        assert float(probs.sum()) == pytest.approx(1)


def test_uniforms_never_reach_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_mix", lambda x: torch.full_like(x, -1))
    assert 0 < float(uniforms([0], 1)) < 1
    monkeypatch.setattr(noise, "_mix", lambda x: torch.zeros_like(x))
    assert 0 < float(uniforms([0], 1)) < 1


def first_token_error(rule: accept.AcceptanceRule, seed: int, texts: int) -> float:
    """Total variation between drawn and exact probs of the first token, by the real keys."""
    from collections import Counter

    from draftahead.core.types import Batch, ForwardOutput
    from toy import VOCABULARY

    base = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    world, depth, counts = World(seed, base), 3, Counter[int]()
    sequences = []
    for number in range(texts):
        sequences.append(world.sequence())
        sequences[-1].rng_key = rng_key(seed, number)
    dice = RecordedDraftSampler(sequences, [depth] * texts, VOCABULARY, "distribution")
    for _ in range(depth):
        paths = [world.prompt + tuple(chain) for chain in dice.chains]
        dice.draw(torch.stack([world.logits("drafter", path) for path in paths]))
    logits = torch.stack(
        [
            torch.stack(
                [world.logits("target", world.prompt + tuple(chain[:i])) for i in range(depth + 1)]
            )
            for chain in dice.chains
        ]
    )
    draft = dice.draft()
    assert draft is not None
    batch = Batch(tuple(sequences), (depth,) * texts, dice)
    verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, rule)
    counts.update(tokens[0] for tokens in verdict.tokens)
    probs = world.probs(()).tolist()
    return sum(abs(counts[token] / texts - chance) for token, chance in enumerate(probs)) / 2


NOISE = 0.015  # half the distance that 12,000 draws of four tokens have by chance is about 0.005


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_draws_and_coins_are_independent(seed: int) -> None:
    """The enumeration replaces chance; here the keyed noise itself is at work."""
    assert first_token_error("block", seed, 12_000) < NOISE


def test_shared_noise_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: coins that share the stream of the draws."""

    def same_stream(stream: RngStream, at: NodeContext) -> int:
        return rng_key(at.sequence.rng_key, 1, len(at.sequence.tokens), len(at.path))

    monkeypatch.setattr(draft_sampler, "step_rng_key", same_stream)
    monkeypatch.setattr(accept, "step_rng_key", same_stream)
    assert max(first_token_error("block", seed, 12_000) for seed in (1, 3, 4)) > NOISE


def test_a_draft_without_a_law_ends_before_the_draw() -> None:
    """A processor may forbid everything a drafter would say: then there is no guess, and the
    guesses before it stay lawful."""
    from toy import VOCABULARY

    at = context(processors=[lambda ids, scores: torch.full_like(scores, -torch.inf)])
    dice = RecordedDraftSampler([at.sequence], [4], VOCABULARY, "distribution")
    dice.draw(torch.zeros(1, VOCABULARY))
    assert dice.chains == [[]]
    assert dice.draft() is None
