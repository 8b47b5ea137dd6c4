"""Trains Medusa heads (Medusa-1: the target stays as it is). Head i learns the target's
distribution i + 2 tokens ahead of the hidden state; the draft tree is chosen by how often each
candidate of each head was correct."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftahead.drafters.candidates import DEFAULT_TREE_NODES
from draftahead.drafters.medusa import io
from draftahead.drafters.medusa.heads import MedusaHeads
from draftahead.drafters.medusa.tree import likeliest_tree
from draftahead.train.acceptance import Acceptance
from draftahead.train.batches import TrainBatch
from draftahead.train.task import Chains, ChainTask

CALIBRATION_CANDIDATES = 10  # top tokens of each head that the draft tree may use


class MedusaTask(ChainTask):
    method = "medusa"

    def __init__(
        self, heads: MedusaHeads, model: Any, *, depth_decay: float = 0.8, name: str = ""
    ) -> None:
        super().__init__(heads, model, depth=len(heads), draft_to_target=heads.draft_to_target)
        self.heads, self.depth_decay, self._name = heads, depth_decay, name
        self._vocab_size = int(model.get_output_embeddings().out_features)
        self._candidates = min(CALIBRATION_CANDIDATES, len(self.lm_head))

    def hidden(self, chains: Chains) -> Iterator[Tensor]:
        for head in range(self.depth):
            yield self.heads.forward_head(head, chains.last_hidden[chains.positions - 1 - head])

    def hits(self, batch: TrainBatch) -> Iterator[Tensor]:
        """Of the chain of top candidates; counts how often each candidate was correct."""
        chains = Chains(batch, self.depth)
        for head in range(self.depth):
            hidden = self.heads.forward_head(head, batch.last_hidden[:, chains.first : -2 - head])
            ranked = self.target_tokens(self.logits(hidden).topk(self._candidates).indices)
            predicted = chains.predicted(head)
            hit = ranked == batch.tokens[:, predicted, None]
            loss_mask = batch.loss_mask[:, predicted]
            self._correct[head] += hit[loss_mask].float().sum(0).cpu()
            self._count[head] += float(loss_mask.sum())
            yield hit[..., 0]

    def evaluate(self, held_out: Iterable[TrainBatch]) -> Acceptance:
        """Chooses the draft tree on the same texts."""
        self._correct = torch.zeros(self.depth, self._candidates)
        self._count = torch.zeros(self.depth, 1)
        acceptance = super().evaluate(held_out)
        tree = likeliest_tree(
            (self._correct / self._count.clamp(min=1)).tolist(), DEFAULT_TREE_NODES
        )
        self.heads.choices = tuple(node.path for node in tree)
        return acceptance

    def save(self, folder: Path) -> None:
        io.save(self.heads, folder, vocab_size=self._vocab_size, target=self._name)
