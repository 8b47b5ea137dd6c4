"""Trains an EAGLE-3 head unrolled over its own outputs (training-time test).

At every token of a text the head drafts a chain: the first token from the target's hidden states,
the next ones from its own output. All chains of a text run at once, one depth at a time. The labels
are the target's distributions over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.screening import fit
from draftahead.train.acceptance import Acceptance, AcceptanceSimulation, stack_depths
from draftahead.train.batches import TrainBatch, TrainBatches
from draftahead.train.losses import soft_cross_entropy, target_probs


class EagleTask:
    """Chains of `depth` tokens; the loss at each further depth counts `depth_decay` as much."""

    def __init__(
        self,
        head: EagleHead,
        model: Any,
        held_out: TrainBatches,
        *,
        depth: int = 5,
        depth_decay: float = 0.8,
        train_lm_head: bool = False,
        name: str = "",
    ) -> None:
        self.module: nn.Module = head
        self.head = head
        self._held_out, self._depth, self._depth_decay = held_out, depth, depth_decay
        self._embed: nn.Module = model.get_input_embeddings()
        self._lm_head = model.get_output_embeddings().weight.detach()[head.tokens]
        head.lm_head.weight.requires_grad_(train_lm_head)
        self._trains_lm_head, self._name = train_lm_head, name
        self._moments: Tensor | None = None  # of the outputs in the last evaluation

    def loss(self, batch: TrainBatch) -> Tensor:
        chains = Chains(batch, self._depth)
        last_hidden = batch.last_hidden[:, chains.first :].flatten(0, 1)
        probs = target_probs(last_hidden[chains.positions], self._lm_head)
        total = probs.new_zeros((), dtype=torch.float32)
        for depth, hidden in enumerate(chains.outputs(self.head, self._embed)):
            normed = self.head.spoken(hidden.flatten(0, 1)[chains.nodes(depth)])
            loss = soft_cross_entropy(normed, self.head.lm_head.weight, probs)
            total = total + self._depth_decay**depth * loss
        return total

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        simulation, moments = AcceptanceSimulation(self._depth), Moments()
        for batch in self._held_out.once():
            chains, hits = Chains(batch, self._depth), []
            for depth, hidden in enumerate(chains.outputs(self.head, self._embed)):
                normed = self.head.spoken(hidden)
                moments.add(normed)
                token = self.head.tokens[self.head.lm_head(normed).argmax(-1)]
                hits.append(token == batch.tokens[:, chains.first + 2 + depth :])
            hits += [hits[0][:, :0]] * (self._depth - len(hits))
            simulation.add(stack_depths(hits), batch.loss_mask)
        self._moments = moments.mean()
        return simulation.result()

    def save(self, folder: Path) -> None:
        if self._moments is not None:
            self.head.screening = fit(self._moments, self.head.lm_head.weight.float())
        io.save(
            self.head,
            folder,
            with_vocabulary=self._trains_lm_head,
            target=self._name,
            guesses=self._depth,
        )


class Moments:
    """The mean of h h' over vectors h, for low-rank screening of the LM head."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._count = 0

    def add(self, vectors: Tensor) -> None:
        """[..., H]. In float32 even under autocast, and summed in float64: the rounding errors of
        a long sum in bfloat16 would exceed the small eigenvalues."""
        with torch.autocast(vectors.device.type, enabled=False):
            flat = vectors.flatten(0, -2).float()
            products = (flat.T @ flat).double()
        self._total = products if self._total is None else self._total + products
        self._count += len(flat)

    def mean(self) -> Tensor | None:
        return None if self._total is None else self._total / max(1, self._count)


class Chains:
    """All chains of a batch. Chain i starts from the hidden states of token `first + i`; its
    drafted token at depth d predicts token `first + i + 2 + d`.

    positions: in the flattened window, of the tokens before those to learn: where the target's
        distribution is the label. Only tokens that chains of every depth can reach.
    """

    def __init__(self, batch: TrainBatch, depth: int) -> None:
        self.batch, self.depth = batch, depth
        length = batch.tokens.shape[1]
        self.window = min(length, batch.window + 2 + depth)
        self.first = length - self.window
        learned = batch.loss_mask[:, self.first + 1 :].clone()
        learned[:, :depth] = False
        self._rows, self._columns = learned.nonzero(as_tuple=True)
        self.positions = self._rows * self.window + self._columns

    def nodes(self, depth: int) -> Tensor:
        """Indices into the flattened outputs of a depth, of the nodes that predict those tokens."""
        return self._rows * (self.window - 2 - depth) + self._columns - 1 - depth

    def outputs(self, head: EagleHead, embed: nn.Module) -> Iterator[Tensor]:
        """The head's outputs depth by depth, [B, window - 2 - depth, H]; fewer depths where the
        text is shorter."""
        tokens, first, window = self.batch.tokens, self.first, self.window
        texts, length = tokens.shape
        with torch.no_grad():
            embedded = embed(tokens)
        places = torch.arange(length, device=tokens.device)
        attention = UnrolledAttention(self.batch.attention_mask[:, :-1], first)
        feature = head.feature(self.batch.aux_hidden)
        at = places[: length - 1].expand(texts, -1)
        hidden = head(embedded[:, 1:], feature[:, :-1], at, attention.over_text)
        hidden = hidden[:, first : length - 2]
        yield hidden
        for depth in range(1, min(self.depth, window - 2)):
            count = window - 2 - depth
            start = first + depth
            at = places[start : start + count].expand(texts, -1)
            inputs = embedded[:, start + 1 : start + 1 + count]
            hidden = head(inputs, hidden[:, :count], at, attention.over_chains)
            yield hidden


class UnrolledAttention:
    """Each node of a chain attends to the text's own inputs up to the chain's start, and to the
    earlier nodes of its chain."""

    def __init__(self, attention_mask: Tensor, first: int) -> None:
        places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        causal = places[:, None] >= places
        diagonal = places[:, None] == places  # padding attends to itself, to avoid NaN
        self._text_mask = (causal & attention_mask[:, None] | diagonal)[:, None]  # [B, 1, T, T]
        self._chain_mask = self._text_mask[:, :, first:]
        self._keys: list[list[Tensor]] = []  # by layer: of the text, then of each depth
        self._values: list[list[Tensor]] = []

    def over_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._keys.append([key])
        self._values.append([value])
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self._text_mask)

    def over_chains(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [B, heads, chains, head_dim]; key and value of the nodes, [B, KV heads, ...]."""
        keys, values = self._keys[layer], self._values[layer]
        keys.append(key)
        values.append(value)
        texts, heads, count, head_dim = query.shape
        query = query.view(texts, key.shape[1], -1, count, head_dim) * head_dim**-0.5
        text = (query.flatten(2, 3) @ keys[0].transpose(2, 3)).view(*query.shape[:4], -1)
        text = text.masked_fill(~self._chain_mask[:, :, None, :count], -torch.inf)
        nodes = [(query * k[:, :, None, :count]).sum(-1, keepdim=True) for k in keys[1:]]
        weights = torch.cat([text, *nodes], -1).float().softmax(-1).to(value.dtype)
        size = keys[0].shape[2]
        mixed = (weights[..., :size].flatten(2, 3) @ values[0]).view_as(query)
        for depth, v in enumerate(values[1:]):
            mixed = mixed + weights[..., size + depth, None] * v[:, :, None, :count]
        return mixed.view(texts, heads, count, head_dim)
