"""Losses and simulated acceptance, against torch and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import zoo
from draftahead.train.acceptance import Acceptance, AcceptanceSimulation
from draftahead.train.batches import TrainBatches
from draftahead.train.distill import DistillTask, new_draft_model
from draftahead.train.losses import soft_cross_entropy
from training import random_data


def test_soft_cross_entropy_is_torchs_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftahead.train.losses.CHUNK", 3)
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=True)
    probs = torch.randn(7, 11).softmax(-1)
    ours = soft_cross_entropy(hidden, weight, probs)
    ours.backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    theirs = F.cross_entropy(hidden @ weight.T, probs)
    theirs.backward()
    assert torch.allclose(ours, theirs, atol=1e-6)
    for mine, other in zip(found, (hidden.grad, weight.grad), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def simulated(hits: torch.Tensor, generated: int) -> Acceptance:
    simulation = AcceptanceSimulation(hits.shape[-1])
    loss_mask = torch.zeros(1, hits.shape[1] + 2, dtype=torch.bool)
    loss_mask[:, -generated:] = True
    simulation.add(hits.unbind(-1), loss_mask)
    return simulation.result()


def test_simulated_acceptance_by_hand() -> None:
    # Four tokens; the first chain is correct twice, then wrong: three tokens, then one more step.
    hits = torch.tensor([[[True, True, False], [False] * 3, [False] * 3, [False] * 3]])
    found = simulated(hits, 4)
    assert found.length == 2.0
    assert found.by_depth == [0.5, 1.0, 0.0]
    # The last token may be an accepted one: none of the target's own follows.
    hits = torch.tensor([[[False] * 3, [True, False, False]]])
    assert simulated(hits, 1).length == 1.0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_the_distillation_loss_is_that_of_whole_models(name: str) -> None:
    """Each text by itself and without padding: checks positions, masks and shifts."""
    model = zoo.tiny(name, dtype=torch.float32)
    data = random_data()
    (batch,) = TrainBatches(data, model, (), tokens=1000)
    draft = new_draft_model(model, num_layers=2)
    task = DistillTask(draft, model, depth=2)
    total, count = 0.0, 0
    for index in range(len(data)):
        text, first = data.text(index)[None].long(), int(data.prompt_lengths[index])
        probs = model(text).logits[0, first - 1 : -1].softmax(-1)
        logits = draft(text).logits[0, first - 1 : -1]
        total += float(F.cross_entropy(logits, probs, reduction="sum"))
        count += len(probs)
    assert count == data.num_learned
    assert float(task.loss(batch)) == pytest.approx(total / count, rel=1e-4)
