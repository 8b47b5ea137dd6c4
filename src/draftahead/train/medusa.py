"""Trains Medusa heads (Medusa-1: the target stays as it is). Head i learns the target's
distribution i + 2 tokens ahead of the hidden state; the draft tree is chosen by how often each
candidate of each head was correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.drafters.medusa.heads import MedusaHeads, likeliest_tree
from draftahead.drafters.medusa.io import save_heads
from draftahead.train.acceptance import Acceptance, AcceptanceSimulation, stack_depths
from draftahead.train.batches import TrainBatch, TrainBatches
from draftahead.train.eagle import Chains
from draftahead.train.losses import soft_cross_entropy, target_probs

CANDIDATES = 10  # top tokens of each head that the draft tree may use
TREE_NODES = 15  # of the draft tree that is saved with the heads


class MedusaTask:
    """The loss of each further head counts `depth_decay` as much."""

    def __init__(
        self,
        heads: MedusaHeads,
        model: Any,
        held_out: TrainBatches,
        *,
        depth_decay: float = 0.8,
        name: str = "",
    ) -> None:
        self.module: nn.Module = heads
        self.heads, self._held_out = heads, held_out
        self._depth_decay, self._name = depth_decay, name
        lm_head: Tensor = model.get_output_embeddings().weight.detach()
        self._vocab_size = len(lm_head)
        self._lm_head = lm_head if heads.tokens is None else lm_head[heads.tokens]

    def loss(self, batch: TrainBatch) -> Tensor:
        chains = Chains(batch, len(self.heads))
        states = batch.last_hidden[:, chains.first :].flatten(0, 1)
        probs = target_probs(states[chains.positions], self._lm_head)
        total = probs.new_zeros((), dtype=torch.float32)
        for head in range(len(self.heads)):
            hidden = self.heads.of(head, states[chains.positions - 1 - head])
            loss = soft_cross_entropy(hidden, self._lm_head, probs)
            total = total + self._depth_decay**head * loss
        return total

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        """Of the chain of top candidates. Chooses the draft tree on the same texts."""
        candidates = min(CANDIDATES, len(self._lm_head))
        correct = torch.zeros(len(self.heads), candidates)
        count = torch.zeros(len(self.heads), 1)
        simulation = AcceptanceSimulation(len(self.heads))
        for batch in self._held_out.once():
            chains, hits = Chains(batch, len(self.heads)), []
            for head in range(len(self.heads)):
                states = batch.last_hidden[:, chains.first : -2 - head]
                logits = self.heads.of(head, states).to(self._lm_head.dtype) @ self._lm_head.T
                ranked = logits.topk(candidates).indices
                if self.heads.tokens is not None:
                    ranked = self.heads.tokens[ranked]
                predicted = slice(chains.first + 2 + head, None)
                hit = ranked == batch.tokens[:, predicted, None]
                loss_mask = batch.loss_mask[:, predicted]
                correct[head] += hit[loss_mask].float().sum(0).cpu()
                count[head] += float(loss_mask.sum())
                hits.append(hit[..., 0])
            simulation.add(stack_depths(hits), batch.loss_mask)
        tree = likeliest_tree((correct / count.clamp(min=1)).tolist(), TREE_NODES)
        self.heads.choices = tuple(path for path, _ in tree)
        return simulation.result()

    def save(self, folder: Path) -> None:
        save_heads(self.heads, folder, vocabulary=self._vocab_size, base=self._name or None)
