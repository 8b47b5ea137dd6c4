"""Training tasks: a drafter, its loss, and the comparison of its drafts with held-out texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.loader.stored import weight_of
from draftahead.train.acceptance import Acceptance, AcceptanceSimulation
from draftahead.train.batches import TrainBatch
from draftahead.train.losses import soft_cross_entropy, target_probs


class TrainTask(ABC):
    """`depth`: drafted tokens of a chain. `aux_layers`: of the target, whose hidden states are
    read. `lm_head`: the drafter's weights; None: the target's. `draft_to_target` [D]: the tokens
    of the draft vocabulary; None: the whole one."""

    method: ClassVar[str]  # the drafter that loads what is saved
    file_key: ClassVar[str] = "model"  # of its configuration

    def __init__(
        self,
        module: nn.Module,
        model: Any,
        *,
        depth: int,
        aux_layers: Sequence[int] = (),
        lm_head: Tensor | None = None,
        draft_to_target: Tensor | None = None,
    ) -> None:
        self.module, self.depth, self.aux_layers = module, depth, tuple(aux_layers)
        weight = weight_of(model.get_output_embeddings(), draft_to_target)
        self.target_lm_head = weight.detach()
        self.lm_head = self.target_lm_head if lm_head is None else lm_head
        self.draft_to_target = draft_to_target

    @abstractmethod
    def loss(self, batch: TrainBatch) -> Tensor: ...

    @abstractmethod
    def hits(self, batch: TrainBatch) -> Iterator[Tensor]:
        """By depth: whether the chains' drafted tokens are the text's, [B, chains - depth]. The
        last chain starts two tokens before a text's end."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the trained drafter as it will be loaded."""

    @torch.no_grad()
    def evaluate(self, held_out: Iterable[TrainBatch]) -> Acceptance:
        simulation = AcceptanceSimulation(self.depth)
        for batch in held_out:
            simulation.add(self.hits(batch), batch.loss_mask)
        return simulation.result()

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary, [..., H] -> [..., D]."""
        return hidden.to(self.lm_head.dtype) @ self.lm_head.T

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """The target's tokens of indices into the draft vocabulary."""
        return drafted if self.draft_to_target is None else self.draft_to_target[drafted]


class NextTokenTask(TrainTask):
    """A drafter that reads the text alone, so that a draft equals its predictions at its tokens."""

    @abstractmethod
    def hidden(self, batch: TrainBatch, at: Any) -> Tensor:
        """Inputs of the LM head at some tokens; `at` indexes [B, T]."""

    def loss(self, batch: TrainBatch) -> Tensor:
        predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))
        probs = target_probs(batch.last_hidden[predicts], self.target_lm_head)
        return soft_cross_entropy(self.hidden(batch, predicts), self.lm_head, probs)

    def hits(self, batch: TrainBatch) -> Iterator[Tensor]:
        # A chain's first token is predicted at the root, one token after the chain's start.
        window = min(batch.tokens.shape[1] - 1, batch.window + 1)
        hidden = self.hidden(batch, (slice(None), slice(-1 - window, -1)))
        hit = self.target_tokens(self.logits(hidden).argmax(-1)) == batch.tokens[:, -window:]
        return (hit[:, depth:] for depth in range(self.depth))


class ChainTask(TrainTask):
    """A drafter of chains that start from the target's hidden states of any token."""

    depth_decay: float  # weight of a depth's loss relative to the depth before

    @abstractmethod
    def hidden(self, chains: Chains) -> Iterator[Tensor]:
        """Inputs of the LM head at the nodes that predict the tokens to learn, by depth."""

    def loss(self, batch: TrainBatch) -> Tensor:
        chains = Chains(batch, self.depth)
        probs = target_probs(chains.last_hidden[chains.positions], self.target_lm_head)
        total = probs.new_zeros((), dtype=torch.float32)
        for depth, hidden in enumerate(self.hidden(chains)):
            loss = soft_cross_entropy(hidden, self.lm_head, probs)
            total = total + self.depth_decay**depth * loss
        return total


class Chains:
    """All chains of a batch. Chain i starts from the hidden states of token `first + i`; its
    drafted token at depth d predicts token `first + i + 2 + d`.

    last_hidden: the target's, of the flattened window.
    positions: in it, of the tokens before those to learn: where the target's distribution is the
        label. Only tokens that chains of every depth can reach.
    """

    def __init__(self, batch: TrainBatch, depth: int) -> None:
        self.batch, self.depth = batch, depth
        length = batch.tokens.shape[1]
        self.window = min(length, batch.window + 2 + depth)
        self.first = length - self.window
        self.last_hidden = batch.last_hidden[:, self.first :].flatten(0, 1)
        learned = batch.loss_mask[:, self.first + 1 :].clone()
        learned[:, :depth] = False
        self._texts, self._columns = learned.nonzero(as_tuple=True)
        self.positions = self._texts * self.window + self._columns

    def nodes(self, depth: int) -> Tensor:
        """Indices into the flattened outputs of a depth, of the nodes that predict those tokens."""
        return self._texts * (self.window - 2 - depth) + self._columns - 1 - depth

    def predicted(self, depth: int) -> slice:
        """The tokens of a text that its chains predict at a depth."""
        return slice(self.first + 2 + depth, None)
