"""What drafters that build trees from logits share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftahead.drafters.tree_builder import top_candidates


def test_candidates_of_large_vocabularies_are_exact() -> None:
    """Beyond 2**24 float32 does not hold every integer."""
    ids = torch.tensor([[(1 << 24) + 1, (1 << 24) + 3]])

    def noise_coupled_topk(*_: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor([[0.75, 0.25]]), ids

    batch: Any = SimpleNamespace(
        draft_sampler=SimpleNamespace(noise_coupled_topk=noise_coupled_topk)
    )
    logits = torch.zeros(1, 1, 4)
    assert top_candidates(batch, logits, [(0, 0)], [()], 2, None) == [([0.75, 0.25], *ids.tolist())]
