"""Small data sets and tasks for the tests of trainings."""

from __future__ import annotations

from typing import Any

import torch

import zoo
from draftahead.drafters.eagle.head import new_head
from draftahead.drafters.early_exit.adapter import new_adapter
from draftahead.drafters.medusa.heads import new_heads
from draftahead.train.batches import TrainBatches
from draftahead.train.dataset import Dataset
from draftahead.train.distill import DistillTask, new_draft_model
from draftahead.train.eagle import EagleTask
from draftahead.train.exit import ExitTask
from draftahead.train.medusa import MedusaTask
from draftahead.train.task import TrainTask

AUX_LAYERS = (1, 2)


def random_data(count: int = 6, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)

    def ids(least: int, most: int) -> list[int]:
        size = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(0, zoo.VOCABULARY, (size,), generator=generator).tolist()

    return Dataset.of([(ids(8, 14), ids(3, 12)) for _ in range(count)])


def generated_data(model: Any, count: int = 12, length: int = 24) -> Dataset:
    """The target's own greedy continuations."""
    return Dataset.of([(p, zoo.reference(model, p, length)) for p in zoo.ragged_prompts(count)])


def held_out(model: Any, data: Dataset, task: TrainTask) -> TrainBatches:
    return TrainBatches(data, model, task.aux_layers, tokens=400)


def eagle_task(model: Any, data: Dataset) -> TrainTask:
    tokens = data.most_frequent(zoo.VOCABULARY, zoo.VOCABULARY)
    return EagleTask(new_head(model, tokens, aux_layers=AUX_LAYERS), model, depth=3)


def medusa_task(model: Any, data: Dataset) -> TrainTask:
    return MedusaTask(new_heads(model, 3), model)


def exit_task(model: Any, data: Dataset) -> TrainTask:
    return ExitTask(new_adapter(model, 2, rank=48), model, depth=3)


def distill_task(model: Any, data: Dataset) -> TrainTask:
    draft = new_draft_model(model, num_layers=2)
    return DistillTask(draft, model, tokenizer=zoo.tokenizer(), depth=3)


TASKS = [eagle_task, medusa_task, exit_task, distill_task]
