"""What `generate` does with sampling parameters: samples, seeds, processors, defaults, stats."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from transformers import LogitsProcessor

import zoo
from draftahead import LLM, Completion, SamplingParams
from draftahead.errors import ProcessorError

PROMPTS = zoo.ragged_prompts(3)
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def test_samples_of_a_prompt_differ_and_can_be_repeated(drafted: LLM, plain: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, n=5, seed=3)
    outs = drafted.generate(PROMPTS[0], params)
    assert [out.sample for out in outs] == [0, 1, 2, 3, 4]
    assert len({tuple(out.token_ids) for out in outs}) == 5
    again = plain.generate(PROMPTS[0], params)
    assert [out.token_ids for out in again] == [out.token_ids for out in outs]


def test_a_fresh_seed_can_be_repeated(drafted: LLM) -> None:
    fresh = drafted.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=16))[0]
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=fresh.seed)
    assert drafted.generate(PROMPTS[0], params)[0].token_ids == fresh.token_ids


def test_parameters_may_be_given_for_some_prompts_only(plain: LLM) -> None:
    one, other = plain.generate(PROMPTS[:2], [None, SamplingParams(max_tokens=3)])
    assert len(one.token_ids) > len(other.token_ids) == 3


def test_samples_of_one_seed_are_not_those_of_the_next(plain: LLM) -> None:
    """Sample 1 of seed 1 and sample 0 of seed 2, and so on: all different."""
    found = []
    for seed in (1, 2, 3):
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=seed, n=3)
        found += [tuple(out.token_ids) for out in plain.generate(PROMPTS[0], params)]
    assert len(set(found)) == 9


class Alternate(LogitsProcessor):
    """Even ids after odd ones and the other way round: depends on the path's last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, last in enumerate(input_ids[:, -1].tolist()):
            scores[row, last % 2 :: 2] = -torch.inf
        return scores


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_users_logits_processor_sees_the_nodes_path(
    both: Callable[..., Completion], temperature: float
) -> None:
    out = both(temperature=temperature, seed=1, processors=[Alternate()])
    ids = [*PROMPTS[1][-1:], *out.token_ids]
    assert all((a + b) % 2 for a, b in itertools.pairwise(ids))


def test_a_processor_that_fails_ends_its_own_request(drafted: LLM, plain: LLM) -> None:
    def fails_late(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPTS[1]) + 3:
            raise RuntimeError("boom")
        return scores

    def too_narrow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :-1]

    params = [
        SamplingParams(temperature=0, max_tokens=40, processors=processors)
        for processors in ([], [fails_late], [too_narrow])
    ]
    for llm in (drafted, plain):
        outs = llm.generate(PROMPTS, params, errors="return")
        assert [out.finish_reason for out in outs] == ["length", "error", "error"]
        assert isinstance(outs[1].error, ProcessorError)
        assert "boom" in str(outs[1].error)
        assert len(outs[1].token_ids) == 4


def test_stats_add_up(drafted: LLM) -> None:
    out = drafted.generate(PROMPTS[0], GREEDY)[0]
    stats = out.stats
    assert stats.tokens == len(out.token_ids) == stats.steps + stats.accepted
    assert sum(out.drafted) == stats.accepted == sum(stats.accepted_at)
    assert stats.mean_acceptance_length == 1 + stats.accepted / stats.steps
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert all(a <= b for a, b in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert stats.prompt_tokens == len(PROMPTS[0])
    assert min(stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds) > 0
