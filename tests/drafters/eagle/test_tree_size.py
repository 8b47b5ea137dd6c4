"""The size of the trees that a GPU builds follows their confidence and the cost of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft, Draft
from draftahead.drafters.eagle.tree_size import REMEASURE_EVERY, TreeSize
from eagle_heads import eagle_llm

CONFIDENCE = [0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1] + [0.01] * 99


class StepCost:
    def of(self, num_nodes: int) -> float:
        return 1.0 + 0.04 * num_nodes


class Timer:
    def mark(self) -> None: ...

    def laps(self) -> list[float]:
        return [2.0, 1.0]


def batch_of(size: int) -> Any:
    return SimpleNamespace(sequences=(None,) * size, step_cost=StepCost())


def note(tree_size: TreeSize, batch_size: int, size: int) -> None:
    """Trees of this size were built and verified."""
    trees = torch.zeros(batch_size, 3, size, dtype=torch.int64)
    launched = DeviceDraft.of_trees([0] * batch_size, trees, Timer())
    tokens, parents = [[0] * size] * batch_size, [[-1, *[0] * (size - 1)]] * batch_size
    confidence = [CONFIDENCE[: size - 1]] * batch_size
    tree_size.note(launched, Draft(tokens, parents, [size] * batch_size, confidence))


def test_sizes_are_learnt_from_trees_as_they_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the target takes host drafts only, of which the policy cuts some nodes."""
    _, _, drafter = eagle_llm(monkeypatch, kernels=False)
    confidence = [int(CONFIDENCE_SCALE * value) for value in (1.0, *CONFIDENCE[:31])]
    trees = torch.tensor([[[5] * 32, [-1] + [0] * 31, confidence]])
    drafter._launched = launched = DeviceDraft.of_trees([5], trees, Timer())
    whole, _ = launched.to_host()
    drafter.learn(*[None, whole.subset([[0, 1, 2]]), None, None])  # type: ignore[arg-type]
    assert drafter.tree_size.choose(batch_of(1)) == 8


def test_size_with_the_most_tokens_per_second_is_chosen_for_each_batch_size() -> None:
    """From the largest trees, the head's time included; they are built again now and then."""
    tree_size = TreeSize()
    assert [tree_size.choose(batch_of(size)) for size in (1, 5, 40)] == [32, 16, 2]
    note(tree_size, 40, 2)  # the largest size for forty, which tells nothing of one
    assert tree_size.choose(batch_of(1)) == 32
    note(tree_size, 1, 32)
    assert tree_size.choose(batch_of(1)) == 8  # 4.5 tokens in 3.32; of 4 nodes 3.4 in 3.16
    for _ in range(REMEASURE_EVERY):
        note(tree_size, 1, 8)
    assert tree_size.choose(batch_of(1)) == 32
    note(tree_size, 1, 32)
    assert tree_size.choose(batch_of(1)) == 8
