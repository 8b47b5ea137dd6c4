"""Drafting over a draft vocabulary: logits of some of the target's tokens only."""

from __future__ import annotations

import pytest
import torch

import zoo
from draftahead.sampling.draft_sampler import scatter_to_vocab
from toy import context_of, sampler_for


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_noise_and_penalties_go_by_the_targets_token_ids(penalty: float) -> None:
    """Wherever a token is in the draft vocabulary."""
    sequence = context_of(temperature=0.9, repetition_penalty=penalty).sequence
    sampler = sampler_for([sequence], [4], zoo.VOCABULARY)
    tokens = torch.randperm(zoo.VOCABULARY, generator=torch.Generator().manual_seed(0))[:30]
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    paths, whole = [(), (int(tokens[7]),)], scatter_to_vocab(logits, tokens, zoo.VOCABULARY)
    expected = sampler.noise_coupled_topk(whole, [0, 0], paths, 5)
    found = sampler.noise_coupled_topk(logits, [0, 0], paths, 5, tokens)
    torch.testing.assert_close(found, expected)
    assert set(expected[1].flatten().tolist()) <= set(tokens.tolist())
