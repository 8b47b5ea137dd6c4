"""Medusa heads draft from the target's last state (Cai et al., arXiv 2401.10774).

Asked for a number of guesses, they draw a chain of so many, one by each head. Left to themselves
they make a tree of the likeliest products of candidates: of a shape that calibration data showed
to be good, if one came with the heads, else of the shape that this step's probabilities make the
best.

The state that they go by is that of the last token before the root, as the step that scored it
left it in the target's cache. The prompt's was not scored: the first step goes without guesses.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.backends.cpu.linear import SmallBatchLinears
from draftahead.backends.cpu.threads import one_thread
from draftahead.core.device import small_tensor
from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.medusa.heads import Branch, MedusaHeads, checked_tree, likeliest_tree
from draftahead.drafters.medusa.io import load_heads
from draftahead.drafters.registry import register
from draftahead.errors import ConfigError
from draftahead.models.support import text_config
from draftahead.sampling.draft_sampler import scatter_to_vocab

NODES = 15  # of a tree whose shape is free, the root aside
CANDIDATES = 8  # of each head, there
LEAST = 0.01  # likelihood below which a guess is not worth its row


@register("medusa")
class Medusa(Drafter):
    def __init__(
        self,
        context: DrafterContext,
        *,
        model: Any = None,
        num_speculative_tokens: int | None = None,
        tree: int | list[list[int]] | None = None,
    ) -> None:
        target = context.target_runner("medusa")
        text = text_config(target.model)
        self.target, self.depths = target, (int(text.num_hidden_layers),)
        self.heads = heads = _heads(model, target.model)
        self.count: int | None = None  # of guesses in a chain that is drawn
        if num_speculative_tokens is not None:
            if tree is not None:
                raise ConfigError("give medusa 'tree' or 'num_speculative_tokens', not both")
            self.count = positive("num_speculative_tokens", num_speculative_tokens, len(heads))
        # A tree that was asked for is scored as it is: of a shape, or of a number of guesses. One
        # that came along is scored as far as it pays.
        self.adaptive = self.count is None and tree is None
        self.nodes = positive("tree", tree) if isinstance(tree, int) else NODES
        self.tree = list(heads.choices) if tree is None else []
        if tree is not None and not isinstance(tree, int):
            self.tree = checked_tree("tree", tree, len(heads))
        self.candidates = 1 + max((max(branch) for branch in self.tree), default=CANDIDATES - 1)
        self.head = heads.output_for(target.model)
        parts = [heads] if self.head is None else [heads, self.head]
        self._linears = SmallBatchLinears(nn.ModuleList(parts))
        self._rows = torch.arange(context.max_batch, device=context.device)
        target.capture_hidden(self.depths)

    @one_thread()
    def propose(self, batch: Batch) -> Draft | None:
        max_depths = [
            room if sequence.num_generated else 0
            for sequence, room in zip(batch.sequences, batch.max_depths, strict=True)
        ]
        if not any(max_depths):
            return None
        logits = self._logits(batch)
        if self.count is None:
            return self._branch(batch, logits, max_depths)
        going = None if all(max_depths) else torch.tensor([room > 0 for room in max_depths])
        for index in range(min(self.count, max(max_depths))):
            said = logits[:, index]
            if self.heads.tokens is not None:
                said = scatter_to_vocab(said, self.heads.tokens, self.target.vocab_size)
            batch.draft_sampler.draw(said, going)
        return None  # the dice hold the draft

    def _logits(self, batch: Batch) -> Tensor:
        """What each head says for each text, over the draft vocabulary: [B, K, D]."""
        lengths = [len(sequence.tokens) for sequence in batch.sequences]
        before = [[max(0, length - 2)] for length in lengths]
        slots = small_tensor(before, torch.int64, self._rows.device)
        states = self.target.hidden_states(self.depths, self._rows[: len(slots)], slots)[:, 0, 0]
        with self._linears:
            return self.heads.logits(states, self.head)[..., : self.target.vocab_size]

    def _branch(self, batch: Batch, logits: Tensor, max_depths: list[int]) -> Draft | None:
        """Trees of the heads' best candidates; reads back once."""
        depth = min(len(self.heads), max(max_depths))
        at = [(row, index) for row, room in enumerate(max_depths) if room for index in range(depth)]
        rows = [row for row, _ in at]
        # Penalties look at the guesses before: taken to be each head's best.
        said = [[0] * depth] * len(max_depths)
        if any(sequence.has_processors for sequence in batch.sequences):
            best = logits.argmax(-1)
            said = (best if self.heads.tokens is None else self.heads.tokens[best]).tolist()
        paths = [tuple(said[row][:index]) for row, index in at]
        seen = logits[rows, [index for _, index in at]]
        draft_tokens = self.heads.tokens
        weights, tokens = batch.draft_sampler.noise_coupled_topk(
            seen, rows, paths, self.candidates, draft_tokens
        )
        both = torch.stack([weights, tokens.to(weights)], 1).tolist()
        found = dict(zip(at, both, strict=True))
        trees: list[list[tuple[int, int]]] = []
        confidence: list[list[float]] = []
        for row, room in enumerate(max_depths):
            levels = [found[row, index] for index in range(min(depth, room))]
            tree = self._shape([chances for chances, _ in levels])
            place: dict[Branch, int] = {(): 0}
            for branch, _ in tree:
                place[branch] = len(place)
            trees.append(
                [
                    (int(levels[len(branch) - 1][1][branch[-1]]), place[branch[:-1]])
                    for branch, _ in tree
                ]
            )
            confidence.append([chance for _, chance in tree])
        if not any(trees):
            return None
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def _shape(self, chances: list[list[float]]) -> list[tuple[Branch, float]]:
        """The nodes of one text's tree, and how likely each is reached and right."""
        if not self.tree:
            return likeliest_tree(chances, self.nodes, LEAST if self.adaptive else 0.0)
        return [
            (branch, math.prod(row[i] for row, i in zip(chances, branch, strict=False)))
            for branch in self.tree
            if len(branch) <= len(chances)
            and all(i < len(row) for row, i in zip(chances, branch, strict=False))
        ]


def _heads(wanted: Any, target: Any) -> MedusaHeads:
    if wanted is None:
        raise ConfigError("drafter 'medusa' needs 'model': the folder, file or hub id of its heads")
    if isinstance(wanted, str | Path):
        return load_heads(wanted, target)
    if not isinstance(wanted, MedusaHeads):
        raise ConfigError(f"drafter 'medusa': {wanted!r} is no Medusa heads and no path of them")
    hidden = int(text_config(target).hidden_size)
    if wanted.hidden != hidden:
        raise ConfigError(
            f"these heads are for a hidden size of {wanted.hidden}, and the target's is {hidden}"
        )
    return copy.deepcopy(wanted).to(device=target.device, dtype=target.dtype)
