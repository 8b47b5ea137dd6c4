"""Block verification for arbitrary distributions: probabilities are probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftahead.sampling import accept


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

    def random_probs(count: int) -> torch.Tensor:
        values = torch.rand(1, count, vocab_size, generator=generator, dtype=torch.float64)
        values[torch.rand(values.shape, generator=generator) < zeros] = 0
        values[..., 0] += 1e-3
        return values / values.sum(-1, keepdim=True)

    p, q = random_probs(length + 1), random_probs(length)
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
