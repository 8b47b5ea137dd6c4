"""Trains an EAGLE-3 head unrolled over its own outputs (training-time test).

At every token of a text the head drafts a chain: the first token from the target's hidden states,
the next ones from its own output. All chains of a text run at once, one depth at a time. The labels
are the target's distributions over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.screening import fit
from draftahead.train.acceptance import Acceptance
from draftahead.train.batches import TrainBatch
from draftahead.train.task import Chains, ChainTask


class EagleTask(ChainTask):
    method = "eagle"

    def __init__(
        self,
        head: EagleHead,
        model: Any,
        *,
        depth: int = 5,
        depth_decay: float = 0.8,
        train_lm_head: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(
            head,
            model,
            depth=depth,
            aux_layers=head.config.aux_layers,
            lm_head=head.lm_head.weight.requires_grad_(train_lm_head),
            draft_to_target=head.draft_to_target,
        )
        self.head, self._embed = head, model.get_input_embeddings()
        self.depth_decay, self._trains_lm_head, self._name = depth_decay, train_lm_head, name
        self._moments = Moments()  # of the outputs in the last evaluation

    def hidden(self, chains: Chains) -> Iterator[Tensor]:
        for depth, output in enumerate(unrolled(self.head, self._embed, chains)):
            yield self.head.normed_output(output.flatten(0, 1)[chains.nodes(depth)])

    def hits(self, batch: TrainBatch) -> Iterator[Tensor]:
        chains = Chains(batch, self.depth)
        for depth, output in enumerate(unrolled(self.head, self._embed, chains)):
            normed = self.head.normed_output(output)
            self._moments.add(normed)
            token = self.target_tokens(self.head.lm_head(normed).argmax(-1))
            yield token == batch.tokens[:, chains.predicted(depth)]

    def evaluate(self, held_out: Iterable[TrainBatch]) -> Acceptance:
        self._moments = Moments()
        return super().evaluate(held_out)

    def save(self, folder: Path) -> None:
        moments = self._moments.mean()
        if moments is not None:
            self.head.screening = fit(moments, self.head.lm_head.weight.float())
        io.save(
            self.head,
            folder,
            with_lm_head=self._trains_lm_head,
            target=self._name,
            num_speculative_tokens=self.depth,
        )


def unrolled(head: EagleHead, embed: nn.Module, chains: Chains) -> Iterator[Tensor]:
    """The head's outputs depth by depth, [B, window - 2 - depth, H]; fewer depths where the text is
    shorter."""
    batch, first = chains.batch, chains.first
    length = batch.tokens.shape[1]
    with torch.no_grad():
        embedded = embed(batch.tokens)
    positions = torch.arange(length, device=batch.tokens.device).expand_as(batch.tokens)
    attention = UnrolledAttention(batch.attention_mask[:, :-1], first)
    feature = head.feature(batch.aux_hidden)
    hidden = head(embedded[:, 1:], feature[:, :-1], positions[:, :-1], attention.over_text)
    hidden = hidden[:, first:-1]
    yield hidden
    for depth in range(1, min(chains.depth, chains.window - 2)):
        start = first + depth
        inputs, at = embedded[:, start + 1 : -1], positions[:, start:-2]
        hidden = head(inputs, hidden[:, :-1], at, attention.over_chains)
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


class Moments:
    """The mean of h h' over vectors h, for low-rank screening of the LM head."""

    def __init__(self) -> None:
        self._total, self._count = torch.zeros(()), 0

    def add(self, vectors: Tensor) -> None:
        """[..., H]. In float32 even under autocast, and summed in float64: the rounding errors of
        a long sum in bfloat16 would exceed the small eigenvalues."""
        with torch.autocast(vectors.device.type, enabled=False):
            flat = vectors.flatten(0, -2).float()
            self._total = self._total + (flat.T @ flat).double()
        self._count += len(flat)

    def mean(self) -> Tensor | None:
        return self._total / self._count if self._count else None
