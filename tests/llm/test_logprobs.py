"""Log-probabilities are those of the distribution that was sampled from, drafted or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Completion, SamplingParams
from draftahead.core.detokenizer import Detokenizer, no_text
from draftahead.core.types import Request, SequenceState
from draftahead.sampling.noise import NodeContext
from draftahead.sampling.processors import probs_of
from drafted import ALL

PROMPTS = zoo.ragged_prompts(3)
PROCESSED = SamplingParams(
    temperature=0.8,
    top_k=30,
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.3,
    logit_bias={5: 1.0},
    max_tokens=24,
    seed=6,
    logprobs=3,
)


def test_logprobs_are_of_the_distribution_sampled_from(
    both: Callable[..., Completion], target: Any
) -> None:
    out = both(temperature=0.7, top_k=5, max_tokens=12, seed=2, logprobs=5)
    assert out.logprobs is not None
    ids = list(PROMPTS[1])
    for found in out.logprobs:
        values, top = target(torch.tensor([ids])).logits[0, -1].topk(5)
        expected = (values / 0.7).log_softmax(-1)
        assert list(found.top) == top.tolist()
        assert list(found.top.values()) == pytest.approx(expected.tolist(), abs=1e-4)
        assert found.logprob == pytest.approx(found.top[found.token_id], abs=1e-6)
        ids.append(found.token_id)


def test_raw_logprobs_are_the_models_own(both: Callable[..., Completion], target: Any) -> None:
    out = both(max_tokens=3, logprobs=0, raw_logprobs=True)
    assert out.logprobs is not None
    expected = target(torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
    assert out.logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)
    assert out.logprobs[0].top == {}


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("raw", [False, True])
def test_logprobs_with_penalties_inside_accepted_sampled_runs(target: Any, raw: bool) -> None:
    """Each is that after the tokens before it, accepted ones too: computed anew, one at a time."""
    params = dataclasses.replace(PROCESSED, raw_logprobs=raw)
    llm = LLM(target, ALL["draft_model_self"](target), max_batch=3)
    outs = llm.generate(PROMPTS, params)
    assert all(out.stats.acceptance_rate > 0.9 for out in outs)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.logprobs is not None
        assert [found.token_id for found in out.logprobs] == out.token_ids
        logits = target(torch.tensor([prompt + out.token_ids])).logits[0]
        request = Request(tuple(prompt), params, seed=0)
        for at, found in enumerate(out.logprobs):
            tokens = prompt + out.token_ids[:at]
            sequence = SequenceState(request, 0, 0, 0, tokens, Detokenizer(no_text))
            row = logits[len(tokens) - 1]
            expected = probs_of(row[None], [NodeContext(sequence)])[0].log()
            if raw:
                expected = row.float().log_softmax(-1)
            values, ids = expected.topk(3)
            assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-4)
            assert list(found.top) == ids.tolist()
            assert list(found.top.values()) == pytest.approx(values.tolist(), abs=1e-4)
