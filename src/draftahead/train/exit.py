"""Trains an early-exit adapter: it maps hidden states of an early layer to those before the LM
head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.drafters.early_exit.adapter import ExitAdapter
from draftahead.models.support import last_norm
from draftahead.train.acceptance import Acceptance, next_token_acceptance
from draftahead.train.batches import TrainBatch, TrainBatches
from draftahead.train.losses import next_token_targets, soft_cross_entropy


class ExitTask:
    """`depth`: drafted tokens of a chain, in evaluations."""

    def __init__(
        self, adapter: ExitAdapter, model: Any, held_out: TrainBatches, *, depth: int = 4
    ) -> None:
        self.module: nn.Module = adapter
        self.adapter, self._held_out, self._depth = adapter, held_out, depth
        self._norm = last_norm(model)
        lm_head: Tensor = model.get_output_embeddings().weight.detach()
        self._lm_head = lm_head if adapter.tokens is None else lm_head[adapter.tokens]

    def loss(self, batch: TrainBatch) -> Tensor:
        predicts, probs = next_token_targets(batch, self._lm_head)
        hidden = self._norm(self.adapter(batch.aux_hidden[:, :-1, 0][predicts]))
        return soft_cross_entropy(hidden, self._lm_head, probs)

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        return next_token_acceptance(self._held_out, self._depth, self._predict)

    def _predict(self, batch: TrainBatch, part: slice) -> Tensor:
        hidden = self._norm(self.adapter(batch.aux_hidden[:, part, 0]))
        token = (hidden.to(self._lm_head.dtype) @ self._lm_head.T).argmax(-1)
        return token if self.adapter.tokens is None else self.adapter.tokens[token]

    def save(self, folder: Path) -> None:
        self.adapter.save(folder)
