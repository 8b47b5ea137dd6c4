"""Trains an early-exit adapter: it maps hidden states of an early layer to those before the LM
head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from draftahead.drafters.early_exit import io
from draftahead.drafters.early_exit.adapter import ExitAdapter
from draftahead.models.support import final_norm
from draftahead.train.batches import TrainBatch
from draftahead.train.task import NextTokenTask


class ExitTask(NextTokenTask):
    method, file_key = "early_exit", "adapter"

    def __init__(self, adapter: ExitAdapter, model: Any, *, depth: int = 4) -> None:
        layers, vocab = [adapter.config.num_layers], adapter.draft_to_target
        super().__init__(adapter, model, depth=depth, aux_layers=layers, draft_to_target=vocab)
        self.adapter, self._norm = adapter, final_norm(model)

    def hidden(self, batch: TrainBatch, at: Any) -> Tensor:
        hidden: Tensor = self._norm(self.adapter(batch.aux_hidden[:, :, 0][at]))
        return hidden

    def save(self, folder: Path) -> None:
        io.save(self.adapter, folder)
