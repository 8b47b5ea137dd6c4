"""The distribution after all processors is that of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftahead.core.sampling_params import SamplingParams
from draftahead.sampling.noise import NodeContext
from draftahead.sampling.processors import probs_of, processed
from draftahead.sampling.sample import sample_target
from toy import World, context_of


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.sampled_from([5, 60, 3000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_probs_equal_transformers(
    seed: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, vocab_size, generator=generator, dtype=torch.float64)
    context = context_of(
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
    expected = theirs(torch.tensor([context.sequence.tokens]), logits.clone()).softmax(-1)
    torch.testing.assert_close(probs_of(logits, [context]), expected, rtol=1e-9, atol=1e-12)


def test_each_sequence_of_a_batch_follows_its_own_parameters() -> None:
    """Greedy ones among sampled ones."""
    logits = 2 * torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    contexts = [
        context_of(),
        context_of(temperature=0.0),
        context_of(top_k=3),
        context_of(top_p=0.4, temperature=0.5),
        context_of(min_p=0.2),
    ]
    together = probs_of(logits, contexts)
    for i, context in enumerate(contexts):
        torch.testing.assert_close(together[i], probs_of(logits[i : i + 1], [context])[0])
    assert together[1].max() == 1


def test_top_p_with_a_nucleus_wider_than_what_is_sorted_first() -> None:
    logits = 0.01 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(2))
    probs = probs_of(logits, [context_of(top_p=0.9)])
    assert 4400 < int((probs > 0).sum()) < 4600
    expected = TopPLogitsWarper(0.9)(None, logits.clone()).softmax(-1)
    torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-9)


def test_penalties_by_hand() -> None:
    """Repetition over prompt and output, the other two over the output alone, counted."""
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={3: 1.0},
    )
    sequence = World(0, params, prompt=(0, 1)).sequence()
    sequence.tokens += [2, 2]
    found = processed(torch.tensor([[4.0, -4.0, 4.0, 4.0]]), [NodeContext(sequence, (1,))])
    # 0: in the prompt. 1: in the prompt, and drafted once. 2: twice in the output. 3: biased.
    assert found.tolist() == [[2.0, -8.0 - 0.75, 2.0 - 1.0, 5.0]]


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    context = context_of(temperature=0.0)
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    assert sample_target(logits, [context])[0].tolist() == [1]
    assert probs_of(logits, [context]).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("logits", [[torch.nan, 1.0], [-torch.inf, -torch.inf], [torch.inf, 1.0]])
def test_logits_that_allow_no_token_are_reported(logits: list[float]) -> None:
    for temperature in (0.0, 1.0):
        context = context_of(temperature=temperature)
        _, finite = sample_target(torch.tensor([logits]), [context])
        assert finite.tolist() == [False]
        assert probs_of(torch.tensor([logits]), [context]).isnan().all()
