"""Training Medusa heads (Medusa-1): the target stays as it is, and every head learns what it will
think some tokens later. The best tree is found by how often each head's candidates were right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.drafters.medusa import io
from draftahead.drafters.medusa.heads import MedusaHeads
from draftahead.drafters.medusa.tree import likeliest_tree
from draftahead.train.blocks import Block, Blocks
from draftahead.train.eagle import Chains
from draftahead.train.loop import Acceptance
from draftahead.train.losses import law_over, side_by_side, soft_cross_entropy, walked

CANDIDATES = 10  # of a head, in trees
NODES = 15  # of the tree that is kept with the heads


class MedusaTask:
    """One head further counts `fade` as much."""

    def __init__(
        self, heads: MedusaHeads, model: Any, held_out: Blocks, *, fade: float = 0.8, name: str = ""
    ) -> None:
        self.module: nn.Module = heads
        self.heads, self._held_out, self._fade, self._name = heads, held_out, fade, name
        rows: Tensor = model.get_output_embeddings().weight.detach()
        self._vocabulary = len(rows)
        self._rows = rows if heads.tokens is None else rows[heads.tokens]

    def loss(self, block: Block) -> Tensor:
        chains = Chains(block, len(self.heads))
        states = block.last[:, chains.first :].flatten(0, 1)
        law = law_over(states[chains.places], self._rows)
        total = law.new_zeros((), dtype=torch.float32)
        for ahead in range(len(self.heads)):
            said = self.heads.of(ahead, states[chains.places - 1 - ahead])
            total = total + self._fade**ahead * soft_cross_entropy(said, self._rows, law)
        return total

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        """Of the likeliest chain; the tree is chosen by the same texts."""
        found: list[tuple[Tensor, list[int]]] = []
        candidates = min(CANDIDATES, len(self._rows))
        right = torch.zeros(len(self.heads), candidates)
        tried = torch.zeros(len(self.heads), 1)
        for block in self._held_out.once():
            chains, hits = Chains(block, len(self.heads)), []
            for ahead in range(len(self.heads)):
                states = block.last[:, chains.first : -2 - ahead]
                logits = self.heads.of(ahead, states).to(self._rows.dtype) @ self._rows.T
                ranked = logits.topk(candidates).indices
                if self.heads.tokens is not None:
                    ranked = self.heads.tokens[ranked]
                after = slice(chains.first + 2 + ahead, None)
                hit = ranked == block.tokens[:, after, None]
                learnt = block.learnt[:, after]
                right[ahead] += hit[learnt].float().sum(0).cpu()
                tried[ahead] += float(learnt.sum())
                hits.append(hit[..., 0])
            found.append((side_by_side(hits).cpu(), block.learnt.sum(1).tolist()))
        tree = likeliest_tree((right / tried.clamp(min=1)).tolist(), NODES)
        self.heads.choices = tuple(node.path for node in tree)
        return walked(found)

    def save(self, folder: Path) -> None:
        io.save(self.heads, folder, vocab_size=self._vocabulary, target=self._name)
