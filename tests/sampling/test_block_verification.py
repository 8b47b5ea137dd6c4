"""Block verification: the paper's formulas, number by number, and for arbitrary distributions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batched_worlds import BatchedWorlds, likely_chains, residual_by_hand
from draftahead.core.draft import DeviceDraft
from draftahead.sampling import accept
from toy import PARAMS, PLAIN, VOCAB_SIZE


def random_probs(
    batch: int, count: int, size: int, zeros: float, generator: torch.Generator
) -> Tensor:
    values = torch.rand(batch, count, size, generator=generator, dtype=torch.float64)
    values[torch.rand(values.shape, generator=generator) < zeros] = 0
    values[..., 1] += 0.05
    return values / values.sum(-1, keepdim=True)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 6),
    vocab_size=st.integers(2, 40),
    zeros=st.floats(0, 0.7),
)
def test_probabilities_and_residuals_are_valid(
    seed: int, length: int, vocab_size: int, zeros: float
) -> None:
    """They lie in [0, 1], an impossible token is never kept, residuals are distributions."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (random_probs(1, n, vocab_size, zeros, generator) for n in (length + 1, length))
    tokens = torch.multinomial(q[0], 1, generator=generator).T
    keep, weight = accept.block_keep_probabilities(p, q, tokens, torch.tensor([length]))
    for values in (keep, weight):
        assert 0 <= float(values.min()) <= float(values.max()) <= 1 + 1e-12
    for i in range(1, length + 1):
        if p[0, i - 1, tokens[0, i - 1]] == 0:
            assert not keep[0, i:].any()
    for i in range(length):
        residual = accept.block_residual(p[:, i], q[:, i], weight[:, i], torch.tensor([False]))
        assert float(residual.min()) >= 0
        assert float(residual.sum()) == pytest.approx(1)


def block_by_hand(
    p: list[list[float]], q: list[list[float]], tokens: list[int]
) -> tuple[list[float], list[float]]:
    """h_0..h_n and P_0..P_n of block verification (arXiv 2403.10444), for one chain."""
    weights, keep = [1.0], [1.0]
    for i, token in enumerate(tokens, start=1):
        p_token, q_token = p[i - 1][token], q[i - 1][token]
        ratio = p_token / q_token if q_token else (math.inf if p_token else 0.0)
        weights.append(min(1.0, weights[-1] * ratio) if weights[-1] else 0.0)
        if i == len(tokens):
            keep.append(weights[i])
            continue
        excess = sum(max(0.0, weights[i] * a - b) for a, b in zip(p[i], q[i], strict=True))
        below = excess + 1 - weights[i]
        keep.append(excess / below if below else 1.0)
    return keep, weights


@pytest.mark.parametrize("seed", range(0, 240, 10))
def test_verdict_of_a_ragged_batch_is_that_of_each_sequence(seed: int) -> None:
    """Probabilities, weights, kept prefixes and the own token, as the paper has them."""
    params = [*PARAMS.values(), PLAIN]
    worlds = BatchedWorlds(likely_chains(seed, params), params, seed=seed, sampled=True)
    verdict = worlds.accept()
    for b, tree in enumerate(worlds.trees):
        tokens, path = [token for token, _ in tree], worlds.paths[b]
        p = [worlds.target_probs(b, node).tolist() for node in range(len(tokens) + 1)]
        q = [worlds.draft_probs(b, node).tolist() for node in range(len(tokens))]
        keep, weights = block_by_hand(p, q, tokens)
        kept = max(i for i in range(len(keep)) if i == 0 or worlds.uniform(b, path[i]) < keep[i])
        own_probs = p[kept]
        if kept < len(tokens):
            own_probs = residual_by_hand(p[kept], q[kept], weights[kept])
        own = worlds.own_token(torch.tensor(own_probs, dtype=torch.float64), b, path[kept])
        assert verdict.paths[b] == list(range(kept + 1))
        assert verdict.tokens[b] == [*tokens[:kept], own]
    assert not verdict.errors


@pytest.mark.parametrize("presence_penalty", [0.0, 3.0])
def test_chains_on_a_device_get_the_verdict_of_the_same_chains_on_the_host(
    presence_penalty: float,
) -> None:
    """With a penalty for one sequence they are read: distributions depend on drafted tokens."""
    params = [PLAIN, dataclasses.replace(PLAIN, presence_penalty=presence_penalty)]
    longest = 0
    for seed in range(12):
        worlds = BatchedWorlds(likely_chains(seed, params), params, seed=seed, sampled=True)
        expected, host = worlds.accept(), worlds.draft
        roots = [tokens[0] for tokens in host.tokens]
        worlds.draft = DeviceDraft(roots, host.token_tensor, host.num_nodes, host.probs)
        verdict = worlds.accept()
        assert (verdict.tokens, verdict.paths) == (expected.tokens, expected.paths)
        longest = max(longest, *map(len, expected.paths))
    assert longest >= 3


@pytest.mark.parametrize("seed", range(6))
def test_probabilities_and_weights_of_a_ragged_batch(seed: int) -> None:
    """With zeros in both distributions, ratios above one, and chains that end early."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 1, 2, 0]
    p, q = (random_probs(4, count, VOCAB_SIZE, 0.3, generator) for count in (4, 3))
    p[0, 1], p[0, 0] = q[0, 1], q[0, 0]  # equal: nothing is in excess, and all is kept
    tokens = torch.stack([torch.multinomial(one, 1, generator=generator)[:, 0] for one in q])
    keep, weight = accept.block_keep_probabilities(p, q, tokens, torch.tensor(lengths))
    for b, length in enumerate(lengths):
        expected = block_by_hand(p[b].tolist(), q[b].tolist(), tokens[b, :length].tolist())
        assert keep[b, : length + 1].tolist() == pytest.approx(expected[0], abs=1e-12)
        assert weight[b, : length + 1].tolist() == pytest.approx(expected[1], abs=1e-12)
        assert not keep[b, length + 1 :].any()  # beyond its end nothing can be kept
        assert (keep[b] <= 1).all()  # not by rounding either


def test_a_probability_of_one_is_one_after_rounding() -> None:
    """excess / (excess + 1 - weight) is 1 where the weight is, but 0.2 / (0.2 + 1 - 1) is not."""
    assert 0.2 / (0.2 + 1 - 1) > 1
    p = torch.tensor([[[1.0, 0.0], [0.2, 0.8], [0.5, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]], dtype=torch.float64)
    keep, weight = accept.block_keep_probabilities(p, q, torch.tensor([[0, 1]]), torch.tensor([2]))
    assert weight[0].tolist() == [1, 1, 0.8]
    assert keep[0].tolist() == [1, 1, 0.8]


def test_residual_inside_and_at_the_end_of_a_chain() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.6, 0.2, 0.1]], dtype=torch.float64)
    at_the_end, inside = torch.tensor([True]), torch.tensor([False])
    weight = torch.tensor([0.5], dtype=torch.float64)
    assert accept.block_residual(p, q, weight, at_the_end).tolist() == p.tolist()
    assert accept.block_residual(p, q, weight, inside).tolist() == [[1, 0, 0, 0]]
    # What the weight leaves is nowhere above the draft's: only rounding leads here.
    low = torch.tensor([0.1], dtype=torch.float64)
    assert accept.block_residual(p, q + 0.1, low, inside).tolist() == p.tolist()


def test_the_last_prefix_whose_test_passes_is_kept() -> None:
    accepted = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]).bool()
    assert accept.longest_kept(accepted).tolist() == [2, 0, 3, 1]
