"""Small data sets and tasks for the tests of trainings."""

from __future__ import annotations

from dataclasses import dataclass
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
from draftahead.train.loop import TrainTask
from draftahead.train.medusa import MedusaTask

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


@dataclass
class Example:
    """A task for a tiny target, and the drafter that loads what it saves."""

    task: TrainTask
    aux_layers: tuple[int, ...]
    method: str


def held_out(model: Any, data: Dataset, aux_layers: tuple[int, ...]) -> TrainBatches:
    return TrainBatches(data, model, aux_layers, tokens=400)


def eagle_example(model: Any, data: Dataset) -> Example:
    tokens = data.most_frequent(zoo.VOCABULARY, zoo.VOCABULARY)
    head = new_head(model, tokens, depths=AUX_LAYERS)
    task = EagleTask(head, model, held_out(model, data, AUX_LAYERS), depth=3)
    return Example(task, AUX_LAYERS, "eagle")


def medusa_example(model: Any, data: Dataset) -> Example:
    task = MedusaTask(new_heads(model, 3), model, held_out(model, data, ()))
    return Example(task, (), "medusa")


def exit_example(model: Any, data: Dataset) -> Example:
    adapter = new_adapter(model, 2, rank=48)
    task = ExitTask(adapter, model, held_out(model, data, (2,)), depth=3)
    return Example(task, (2,), "early_exit")


def distill_example(model: Any, data: Dataset) -> Example:
    draft = new_draft_model(model, layers=2)
    words = zoo.tokenizer()
    task = DistillTask(draft, model, held_out(model, data, ()), tokenizer=words, depth=3)
    return Example(task, (), "draft_model")


EXAMPLES = [eagle_example, medusa_example, exit_example, distill_example]
