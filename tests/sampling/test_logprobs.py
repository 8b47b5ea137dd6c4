"""Log-probabilities of emitted tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftahead.core.types import TokenLogprob
from draftahead.sampling.sample import token_logprobs
from toy import context_of

LOGITS = torch.tensor([[1.0, 2.0, 0.5, -torch.inf]], dtype=torch.float64)
RAW = LOGITS[0].log_softmax(-1)


def logprob_of(token: int, **params: Any) -> TokenLogprob:
    """After a path of token 2."""
    return token_logprobs(LOGITS, [context_of(**params)._replace(path=(2,))], [token])[0]


def test_the_most_likely_tokens_are_listed_best_first() -> None:
    found = logprob_of(0, logprobs=2, temperature=0.0)
    assert found.token_id == 0
    assert found.logprob == pytest.approx(float(RAW[0]))
    assert found.top == {1: pytest.approx(float(RAW[1])), 0: pytest.approx(float(RAW[0]))}
    assert list(logprob_of(0, logprobs=99).top) == [1, 0, 2]  # impossible ones are not listed
    assert logprob_of(0, logprobs=0).top == {}
    assert logprob_of(3, logprobs=1).logprob == -torch.inf


def test_truncation_counts() -> None:
    found = logprob_of(1, logprobs=4, top_k=1)
    assert (found.logprob, found.top) == (pytest.approx(0), {1: pytest.approx(0)})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.5}, torch.tensor([2.0, 4.0, -1.0]).log_softmax(-1)[2]),
        ({"temperature": 0.5, "raw_logprobs": True}, RAW[2]),
        ({"temperature": 0.0}, torch.tensor([1.0, 2.0, -0.5]).log_softmax(-1)[2]),
    ],
)
def test_penalties_count_and_temperature_does_where_it_is_sampled(
    params: dict[str, Any], expected: torch.Tensor
) -> None:
    found = logprob_of(2, logprobs=1, presence_penalty=1.0, **params)
    assert found.logprob == pytest.approx(float(expected), abs=1e-6)
