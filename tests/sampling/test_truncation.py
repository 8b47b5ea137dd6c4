"""Top-k, top-p and min-p: ties at the cut, sequences with different parameters, wide nuclei."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftahead.core.sampling_params import SamplingParams
from draftahead.sampling.processors import probs_of
from toy import context_of


def truncated(probs: list[float], **params: Any) -> list[float]:
    """What is left of a distribution."""
    logits = torch.tensor([probs], dtype=torch.float64).log()
    found: list[float] = probs_of(logits, [context_of(**params)])[0].tolist()
    return found


def by_hand(logits: Tensor, params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, one after the other, in Python's own numbers."""
    scaled = [x / (params.temperature or 1) for x in logits.double().tolist()]
    probs = [math.exp(x - max(scaled)) for x in scaled]

    def at_least(lowest: float) -> list[float]:
        left = [x if x >= lowest else 0.0 for x in probs]
        return [x / sum(left) for x in left]

    probs = at_least(0.0)
    if params.top_k:
        probs = at_least(sorted(probs, reverse=True)[: params.top_k][-1])
    if params.top_p not in (None, 1.0):
        mass, lowest = 0.0, 2.0
        for x in sorted(probs, reverse=True):
            if mass < params.top_p:
                lowest = x
            mass += x
        probs = at_least(lowest)
    if params.min_p:
        probs = at_least(params.min_p * max(probs))
    return probs


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.5, [1, 0, 0]),  # the first one alone has it
        (0.5000001, [0.5, 0.25, 0.25]),  # equals at the cut stay together
        (0.75, [0.5, 0.25, 0.25]),
        (0.4, [1, 0, 0]),
        (1e-9, [1, 0, 0]),  # one token always stays
        (5e-324, [1, 0, 0]),
        (0, [1, 0, 0]),
    ],
)
def test_top_p_at_an_exact_tie(top_p: float, expected: list[float]) -> None:
    """[.5, .25, .25] at .5: a token stays if the mass before it is below top-p, not if equal."""
    logits = torch.tensor([[0.0, -math.log(2), -math.log(2)]], dtype=torch.float64)
    assert probs_of(logits, [context_of()])[0].tolist() == [0.5, 0.25, 0.25]  # exactly
    assert probs_of(logits, [context_of(top_p=top_p)])[0].tolist() == expected


def test_top_k_keeps_equals_at_the_cut_and_may_exceed_the_vocabulary() -> None:
    assert truncated([0.4, 0.2, 0.2, 0.2], top_k=1) == pytest.approx([1, 0, 0, 0])
    assert truncated([0.4, 0.2, 0.2, 0.2], top_k=2) == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert truncated([0.4, 0.3, 0.2, 0.1], top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert truncated([0.4, 0.3, 0.2, 0.1], top_k=3) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert truncated([0.4, 0.3, 0.2, 0.1], top_k=99) == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_min_p_is_relative_to_the_largest_probability_and_keeps_what_equals_it() -> None:
    assert truncated([0.5, 0.25, 0.125, 0.125], min_p=0.5) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert truncated([0.5, 0.25, 0.125, 0.125], min_p=0.51) == pytest.approx([1, 0, 0, 0])
    assert truncated([0.5, 0.25, 0.125, 0.125], min_p=1.0) == pytest.approx([1, 0, 0, 0])


@pytest.mark.parametrize("seed", range(4))
def test_each_sequence_is_truncated_by_its_own_parameters(seed: int) -> None:
    """Also where only some are truncated at all, and where a greedy one stands among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(8, 30, generator=generator, dtype=torch.float64)
    params: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_k": 7, "top_p": 0.6},
        {"top_p": 0.3, "temperature": 0.5},
        {"min_p": 0.1},
        {"min_p": 0.3, "top_k": 1},
        {"temperature": 2.5},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
    ]
    for group in (params, params[:2], params[3:5], params[6:], params[::-1], params[:1]):
        contexts = [context_of(**one) for one in group]
        found = probs_of(logits[: len(group)], contexts)
        for i, (context, probs) in enumerate(zip(contexts, found, strict=True)):
            expected = torch.tensor(by_hand(logits[i], context.sequence.params))
            if context.sequence.is_greedy:
                expected = torch.zeros(30).index_fill(0, logits[i].argmax(), 1.0)
            assert torch.allclose(probs, expected.double(), atol=1e-12)


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.97])
def test_top_p_with_a_nucleus_wider_than_what_is_sorted_first(top_p: float) -> None:
    """For one sequence of several, or because the mass is reached with the very last token."""
    generator = torch.Generator().manual_seed(3)
    flat = 0.1 * torch.randn(1, 3000, generator=generator, dtype=torch.float64)
    sharp = 5 * torch.randn(1, 3000, generator=generator, dtype=torch.float64)
    logits = torch.cat([sharp, flat, sharp])
    contexts = [context_of(top_p=top_p), context_of(top_p=top_p), context_of()]
    found = probs_of(logits, contexts)
    for probs, one, context in zip(found, logits, contexts, strict=True):
        expected = torch.tensor(by_hand(one, context.sequence.params), dtype=torch.float64)
        assert torch.allclose(probs, expected, atol=1e-12)
    assert torch.allclose(probs_of(flat, contexts[1:2])[0], found[1], atol=1e-12)


@pytest.mark.parametrize("size", [1023, 1024, 1025])
def test_top_p_with_a_nucleus_as_wide_as_what_is_sorted_first(size: int) -> None:
    """All tokens alike: equals stay together, so all of them do."""
    probs = probs_of(torch.zeros(1, size, dtype=torch.float64), [context_of(top_p=0.5)])
    assert torch.allclose(probs, torch.full_like(probs, 1 / size))


def test_a_top_p_of_one_keeps_every_token_beside_a_sequence_with_a_lower_one() -> None:
    """In single precision the mass before the last tokens is 1."""
    logits = torch.linspace(0, -80, 50).expand(2, 50)
    contexts = [context_of(top_p=1.0), context_of(top_p=0.5)]
    assert torch.equal(probs_of(logits, contexts)[0], logits[0].softmax(-1))


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_sequence_without_truncation_keeps_its_bits_beside_one_with(
    params: dict[str, float],
) -> None:
    for seed in range(5):
        logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(seed))
        beside = probs_of(logits, [context_of(), context_of(**params)])
        assert torch.equal(beside[0], probs_of(logits, [context_of(), context_of()])[0])
