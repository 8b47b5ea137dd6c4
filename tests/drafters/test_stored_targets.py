"""Heads and trainings over a target whose weights stay as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.bench.latency import weight_bytes
from draftahead.drafters.eagle import io as eagle_io
from draftahead.drafters.eagle.head import new_head
from draftahead.drafters.early_exit import io as exit_io
from draftahead.drafters.early_exit.adapter import new_adapter
from draftahead.drafters.medusa import io as medusa_io
from draftahead.drafters.medusa.heads import MedusaHeads, new_heads
from draftahead.loader import hub
from draftahead.loader.stored import StoredLinear, stored_layers, weight_of
from draftahead.models.layer_subset import LayerSubset
from draftahead.train.dataset import digest
from draftahead.train.export import export_head
from eagle_heads import small_llama
from training import TASKS, held_out, random_data

GREEDY = SamplingParams(temperature=0, max_tokens=12)
DRAFT_TOKENS = torch.arange(1, zoo.VOCABULARY, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    small_llama().bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Any, Any]:
    """The same target, stored and widened."""
    stored, widened = (
        hub.load(folder, device="cpu", dtype=dtype)[0] for dtype in (None, "float32")
    )
    assert stored_layers(stored)
    return stored, widened


def save_eagle(model: Any, folder: Path) -> dict[str, Any]:
    head = TASKS[0](model, random_data()).module
    eagle_io.save(head, folder, with_lm_head=False)
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 2}


def save_medusa(model: Any, folder: Path) -> dict[str, Any]:
    heads = MedusaHeads(64, 2, draft_to_target=DRAFT_TOKENS)
    medusa_io.save(heads, folder, vocab_size=zoo.VOCABULARY)
    return {"method": "medusa", "model": str(folder), "num_speculative_tokens": 2}


def save_exit(model: Any, folder: Path) -> dict[str, Any]:
    adapter = new_adapter(model, 2, rank=8)
    exit_io.save(adapter, folder)
    return {"method": "early_exit", "adapter": str(folder), "num_speculative_tokens": 2}


@pytest.mark.parametrize("save", [save_eagle, save_medusa, save_exit])
def test_heads_draft_for_it_and_the_text_is_that_of_the_widened_model(
    save: Callable[..., dict[str, Any]], folder: Path, models: tuple[Any, Any], tmp_path: Path
) -> None:
    drafter = save(models[0], tmp_path)
    llm = LLM(folder, drafter, device="cpu")
    prompts = zoo.ragged_prompts(3)
    ours = llm.generate(prompts, GREEDY)
    theirs = LLM(models[1], "none").generate(prompts, GREEDY)
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert sum(one.stats.drafted for one in ours)


def test_draft_vocabularies_have_the_rows_of_the_widened_model(
    models: tuple[Any, Any], tmp_path: Path
) -> None:
    x, heads = torch.randn(3, 64), MedusaHeads(64, 2, draft_to_target=DRAFT_TOKENS)
    head = new_head(models[0], DRAFT_TOKENS, aux_layers=(1, 2))
    eagle_io.save(head, tmp_path, with_lm_head=False)
    parts = []
    for model in models:
        subset = LayerSubset(model, [0, 1], draft_to_target=DRAFT_TOKENS)
        medusa, eagle = heads.target_lm_head(model), eagle_io.load(tmp_path, model).lm_head
        assert torch.equal(eagle.weight, weight_of(model.lm_head)[DRAFT_TOKENS])
        parts.append([subset.head(x), medusa(x), eagle(x)])
    for ours, theirs in zip(*parts, strict=True):
        assert ours.shape == (3, len(DRAFT_TOKENS))
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(head.lm_head.weight, weight_of(models[1].lm_head)[DRAFT_TOKENS])


@pytest.mark.parametrize("make", TASKS, ids=lambda make: make.__name__)
def test_a_training_step_is_that_over_the_widened_model(make: Any, models: tuple[Any, Any]) -> None:
    data = random_data()
    losses = []
    for model in models:
        torch.manual_seed(0)
        task = make(model, data)
        batch = next(iter(held_out(model, data, task)))
        loss = task.loss(batch)
        loss.backward()
        assert any(p.grad is not None and p.grad.any() for p in task.module.parameters())
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_data_set_belongs_to_the_model_however_it_is_loaded(models: tuple[Any, Any]) -> None:
    data = random_data()
    assert digest(models[0], data, data) == digest(models[1], data, data)


def test_exported_heads_bring_float_weights(models: tuple[Any, Any], tmp_path: Path) -> None:
    stored, widened = models
    medusa_io.save(new_heads(stored, 2), tmp_path / "own", vocab_size=zoo.VOCABULARY)
    for name, model in (("stored", stored), ("widened", widened)):
        export_head(tmp_path / "own", model, tmp_path / name)
    heads = [medusa_io.load(tmp_path / name, widened).lm_heads[0] for name in ("stored", "widened")]
    assert torch.equal(heads[0].weight, heads[1].weight)


def test_the_bytes_of_a_forward_are_those_that_are_stored(models: tuple[Any, Any]) -> None:
    stored, widened = (weight_bytes(model) for model in models)
    assert 0.49 < stored / widened < 0.55


def test_a_subset_of_layers_drafts_with_stored_rows(models: tuple[Any, Any]) -> None:
    llm = LLM(models[0], {"method": "layer_skip", "skip": [1]})
    assert isinstance(llm.model.lm_head, StoredLinear)
    plain = LLM(models[1], "none")
    prompts = zoo.ragged_prompts(2)
    ours, theirs = (one.generate(prompts, GREEDY) for one in (llm, plain))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
