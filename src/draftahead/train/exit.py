"""Training an exit adapter: the states after a few layers, brought to say what the last ones say.

The adapter changes nothing below it, so its guesses after a right prefix are the same in a text as
in a draft: the hits of single tokens are all that must be known to walk chains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.drafters.early_exit import io
from draftahead.drafters.early_exit.adapter import ExitAdapter
from draftahead.models.support import last_norm
from draftahead.train.blocks import Block, Blocks
from draftahead.train.loop import Acceptance
from draftahead.train.losses import chained, law_over, soft_cross_entropy, walked


class ExitTask:
    def __init__(
        self, adapter: ExitAdapter, model: Any, held_out: Blocks, *, depth: int = 4
    ) -> None:
        self.module: nn.Module = adapter
        self.adapter, self._held_out, self._depth = adapter, held_out, depth
        self._norm = last_norm(model)
        rows: Tensor = model.get_output_embeddings().weight.detach()
        self._rows = rows if adapter.tokens is None else rows[adapter.tokens]

    def loss(self, block: Block) -> Tensor:
        before = block.learnt[:, 1:]  # at a token, the next one is foretold
        law = law_over(block.last[:, :-1][before], self._rows)
        said = self._norm(self.adapter(block.states[:, :-1, 0][before]))
        return soft_cross_entropy(said, self._rows, law)

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        found: list[tuple[Tensor, list[int]]] = []
        for block in self._held_out.once():
            # The first guess of a chain is made at the root, which is the token after its start.
            window = min(block.tokens.shape[1] - 1, block.window + 1)
            states = self._norm(self.adapter(block.states[:, -1 - window : -1, 0]))
            guess = (states.to(self._rows.dtype) @ self._rows.T).argmax(-1)
            if self.adapter.tokens is not None:
                guess = self.adapter.tokens[guess]
            hit = guess == block.tokens[:, -window:]
            found.append((chained(hit, self._depth).cpu(), block.learnt.sum(1).tolist()))
        return walked(found)

    def save(self, folder: Path) -> None:
        io.save(self.adapter, folder)
