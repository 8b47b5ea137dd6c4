"""Noise is a pure function of its key: uniform, the same everywhere, independent by purpose."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Batch, ForwardOutput
from draftahead.sampling import accept, draft_sampler, noise
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    rng_key,
    sample_gumbel,
    step_rng_key,
    target_rng_key,
    uniforms,
    uniforms_at,
)
from toy import PLAIN, World, sampler_for


def test_uniforms_are_uniform_and_keyed() -> None:
    values = uniforms([rng_key(1, 2), rng_key(2, 1)], 20_000)
    assert 0 < float(values.min()) < float(values.max()) < 1
    for row in values:
        assert scipy_stats.kstest(row.numpy(), "uniform").pvalue > 1e-3
    assert abs(float(torch.corrcoef(values)[0, 1])) < 0.03
    assert torch.equal(uniforms([rng_key(1, 2)], 50)[0], values[0, :50])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**63 - 1))
def test_hash_is_the_same_on_the_host_and_in_torch(part: int) -> None:
    """splitmix64 in Python's integers and in torch's wrapping ones."""
    start = noise._signed((part + 1) * noise._GOLDEN)
    assert int(noise._mix(torch.tensor([start]))[0]) == rng_key(part)


KEY_1_2_3 = 2869315087210772132
UNIFORMS = [
    [0.8948145419814352, 0.45769561165979733, 0.4608060643011477],
    [0.7138577247376193, 0.3867680459839341, 0.752307015838224],
]


def test_a_seed_gives_the_same_noise_in_every_version() -> None:
    """Outputs of a seed are reproducible: these numbers do not change."""
    assert rng_key() == 0
    assert rng_key(0) == -2152535657050944081
    assert rng_key(1, 2, 3) == KEY_1_2_3
    assert rng_key(3, 2, 1) != KEY_1_2_3
    assert rng_key(-1) == rng_key(2**64 - 1)
    found = uniforms([KEY_1_2_3, 5], 3)
    assert found.dtype == torch.float64
    assert found.tolist() == UNIFORMS
    some = uniforms_at([KEY_1_2_3, 5], torch.tensor([[2, 0], [1, 1]]))
    assert some.tolist() == [[UNIFORMS[0][2], UNIFORMS[0][0]], [UNIFORMS[1][1]] * 2]
    assert (found * 2**53 % 2 == 1).all()  # 52 bits and a half


def test_keys_are_of_sequence_stream_and_position() -> None:
    context = NodeContext(World(0, PLAIN).sequence(), (1, 2))
    context.sequence.rng_key = 77
    context.sequence.tokens += [3]
    assert context.position == 5
    assert (int(RngStream.TARGET), int(RngStream.DRAFT), int(RngStream.ACCEPT)) == (0, 1, 2)
    assert target_rng_key(context) == rng_key(77, 0, 5)
    assert step_rng_key(RngStream.ACCEPT, context) == rng_key(77, 2, 3, 2)
    assert step_rng_key(RngStream.DRAFT, context) == rng_key(77, 1, 3, 2)


def test_samples_of_different_seeds_never_share_a_key() -> None:
    """Sample 1 of seed 1 is another output than sample 0 of seed 2: a sum would mix them up."""
    keys = {rng_key(seed, sample) for seed in range(40) for sample in range(40)}
    assert len(keys) == 1600


@pytest.mark.parametrize("key", range(30))
def test_sample_gumbel_takes_the_smallest_ratio_of_noise_to_probability(key: int) -> None:
    probs = torch.rand(6, generator=torch.Generator().manual_seed(key))
    numbers = uniforms([key], 6)[0].tolist()
    ratios = [-math.log(u) / p for u, p in zip(numbers, probs.tolist(), strict=True)]
    assert sample_gumbel(probs[None], [key]).tolist() == [ratios.index(min(ratios))]


def test_uniforms_never_reach_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_mix", lambda x: torch.full_like(x, -1))
    assert 0 < float(uniforms([0], 1)) < 1
    monkeypatch.setattr(noise, "_mix", lambda x: torch.zeros_like(x))
    assert 0 < float(uniforms([0], 1)) < 1


def test_keys_of_drafts_and_acceptance_change_with_every_step() -> None:
    """A position that is drafted again must not meet the random number that rejected it before."""
    sequence = World(0, SamplingParams(temperature=1.0)).sequence()
    before = step_rng_key(RngStream.ACCEPT, NodeContext(sequence, (1, 2)))
    sequence.tokens.append(1)
    after = step_rng_key(RngStream.ACCEPT, NodeContext(sequence, (2,)))
    assert NodeContext(sequence, (2,)).position == len(sequence.tokens) + 1
    assert before != after


def test_sample_gumbel_never_takes_a_token_of_probability_zero() -> None:
    probs = torch.zeros(4000, 8)
    probs[:, 3], probs[:, 5] = 0.25, 0.75
    sampled = sample_gumbel(probs, [rng_key(i) for i in range(4000)])
    counts = torch.bincount(sampled, minlength=8).tolist()
    assert sum(counts[i] for i in (0, 1, 2, 4, 6, 7)) == 0
    assert abs(counts[3] - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)


def first_token_error(rule: accept.AcceptanceRule, seed: int, num_texts: int) -> float:
    """Total variation between sampled and exact distribution of the first token, with real keys."""
    world, depth = World(seed, PLAIN), 3
    sequences = []
    for number in range(num_texts):
        sequences.append(world.sequence())
        sequences[-1].rng_key = rng_key(seed, number)
    sampler = sampler_for(sequences, [depth] * num_texts)
    for _ in range(depth):
        paths = [world.prompt + tuple(chain) for chain in sampler.chains]
        sampler.draw(torch.stack([world.logits("drafter", path) for path in paths]))
    logits = torch.stack(
        [
            torch.stack(
                [world.logits("target", world.prompt + tuple(chain[:i])) for i in range(depth + 1)]
            )
            for chain in sampler.chains
        ]
    )
    draft = sampler.draft()
    assert draft is not None
    batch = Batch(tuple(sequences), (depth,) * num_texts, sampler)
    verdict, _ = accept.accept(draft, ForwardOutput(logits), batch, rule)
    counts = Counter(tokens[0] for tokens in verdict.tokens)
    probs = world.probs(()).tolist()
    return sum(abs(counts[token] / num_texts - p) for token, p in enumerate(probs)) / 2


# The total variation that 12,000 samples of four tokens have by chance is about 0.005.
CHANCE = 0.015


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_drafting_and_acceptance_are_independent(seed: int) -> None:
    """The enumeration replaces random numbers; here the keyed noise itself is used."""
    assert first_token_error("block", seed, 12_000) < CHANCE


def test_a_stream_shared_by_drafting_and_acceptance_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def same_stream(stream: RngStream, context: NodeContext) -> int:
        sequence = context.sequence
        return rng_key(sequence.rng_key, 1, len(sequence.tokens), len(context.path))

    monkeypatch.setattr(draft_sampler, "step_rng_key", same_stream)
    monkeypatch.setattr(accept, "step_rng_key", same_stream)
    assert max(first_token_error("block", seed, 12_000) for seed in (1, 3, 4)) > CHANCE
