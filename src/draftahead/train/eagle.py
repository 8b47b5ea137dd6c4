"""Training an EAGLE head as it will be used: unrolled over its own outputs (training-time test).

For every place in a text the head drafts a chain: its first guess from the target's feature, the
next ones from its own output. All chains of a text run at once, a depth at a time. What it should
say at each node is the target's own law there, over the draft vocabulary.
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
from draftahead.drafters.eagle.screening import fitted
from draftahead.train.blocks import Block, Blocks
from draftahead.train.loop import Acceptance
from draftahead.train.losses import law_over, side_by_side, soft_cross_entropy, walked
from draftahead.train.texts import Texts


def draft_vocabulary(texts: Texts, size: int, vocabulary: int) -> Tensor:
    """The tokens that answers use most, in order."""
    learnt = torch.ones(len(texts.tokens), dtype=torch.bool)
    for index, answer in enumerate(texts.answers.tolist()):
        start = int(texts.starts[index])
        learnt[start : start + answer] = False
    counts = torch.bincount(texts.tokens[learnt].long(), minlength=vocabulary).double()
    counts -= torch.arange(vocabulary) / (2 * vocabulary)  # of equals the lower id: it is older
    return counts.topk(min(size, vocabulary)).indices.sort().values


class EagleTask:
    """`depth` guesses of a chain; one step deeper counts `fade` as much."""

    def __init__(
        self,
        head: EagleHead,
        model: Any,
        held_out: Blocks,
        *,
        depth: int = 5,
        fade: float = 0.8,
        train_vocabulary: bool = False,
        name: str = "",
    ) -> None:
        self.module: nn.Module = head
        self.head = head
        self._held_out, self._depth, self._fade = held_out, depth, fade
        self._embed: nn.Module = model.get_input_embeddings()
        self._rows = model.get_output_embeddings().weight.detach()[head.tokens]
        head.lm_head.weight.requires_grad_(train_vocabulary)
        self._trains_vocabulary, self._name = train_vocabulary, name
        self._moments: Tensor | None = None  # of the outputs, as last evaluated

    def loss(self, block: Block) -> Tensor:
        chains = Chains(block, self._depth)
        law = law_over(block.last[:, chains.first :].flatten(0, 1)[chains.places], self._rows)
        total = law.new_zeros((), dtype=torch.float32)
        for depth, hidden in enumerate(chains.outputs(self.head, self._embed)):
            said = self.head.normed_output(hidden.flatten(0, 1)[chains.nodes(depth)])
            total = total + self._fade**depth * soft_cross_entropy(
                said, self.head.lm_head.weight, law
            )
        return total

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        """Exact for greedy text, and without drafting: guesses after a right prefix of the text are
        those a drafter would make there."""
        found: list[tuple[Tensor, list[int]]] = []
        moments = Moments()
        for block in self._held_out.once():
            chains = Chains(block, self._depth)
            hits = []
            for depth, hidden in enumerate(chains.outputs(self.head, self._embed)):
                spoken = self.head.normed_output(hidden)
                moments.add(spoken)
                guess = self.head.tokens[self.head.lm_head(spoken).argmax(-1)]
                hit = guess == block.tokens[:, chains.first + 2 + depth :]
                hits.append(hit)
            hits += [hits[0][:, :0]] * (self._depth - len(hits))
            found.append((side_by_side(hits).cpu(), block.learnt.sum(1).tolist()))
        self._moments = moments.mean()
        return walked(found)

    def save(self, folder: Path) -> None:
        if self._moments is not None:
            self.head.screening = fitted(self._moments, self.head.lm_head.weight.float())
        io.save(
            self.head,
            folder,
            with_lm_head=self._trains_vocabulary,
            target=self._name,
            num_speculative_tokens=self._depth,
        )


class Moments:
    """The mean of h h' over vectors h."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._count = 0

    def add(self, vectors: Tensor) -> None:
        """Of [..., H]. In full precision, whatever the training runs in: rounded, the sum of many
        would be no covariance any more."""
        with torch.autocast(vectors.device.type, enabled=False):
            flat = vectors.flatten(0, -2).float()
            now = (flat.T @ flat).double()
        self._total = now if self._total is None else self._total + now
        self._count += len(flat)

    def mean(self) -> Tensor | None:
        return None if self._total is None else self._total / max(1, self._count)


class Chains:
    """All chains of a block. Chain i starts from the feature of token `first + i`; its guess at
    depth d is about token `first + i + 2 + d`."""

    def __init__(self, block: Block, depth: int) -> None:
        self.block, self.depth = block, depth
        width = block.tokens.shape[1]
        self.window = min(width, block.window + 2 + depth)
        self.first = width - self.window
        # Where laws are learnt, in the flattened window: at tokens before those to be learnt.
        after = block.learnt[:, self.first + 1 :].clone()
        after[:, :depth] = False  # of which chains of every depth must speak
        rows, self._at = after.nonzero(as_tuple=True)
        self.places = rows * self.window + self._at
        self._rows = rows

    def nodes(self, depth: int) -> Tensor:
        """Which of the flattened outputs at a depth speak about those places."""
        return self._rows * (self.window - 2 - depth) + self._at - 1 - depth

    def outputs(self, head: EagleHead, embed: nn.Module) -> Iterator[Tensor]:
        """What all chains that have a token there make of it, depth by depth:
        [B, window - 2 - depth, H]. A text that ends before has no more depths."""
        tokens, first, window = self.block.tokens, self.first, self.window
        texts, width = tokens.shape
        with torch.no_grad():
            embedded = embed(tokens)
        places = torch.arange(width, device=tokens.device)
        attend = UnrolledAttention(self.block.real[:, :-1], first)
        feature = head.feature(self.block.states)
        at = places[: width - 1].expand(texts, -1)
        hidden = head(embedded[:, 1:], feature[:, :-1], at, attend.over_text)[:, first : width - 2]
        yield hidden
        for depth in range(1, min(self.depth, window - 2)):
            count = window - 2 - depth
            after = first + 1 + depth
            at = places[first + depth : first + depth + count].expand(texts, -1)
            hidden = head(
                embedded[:, after : after + count], hidden[:, :count], at, attend.over_chains
            )
            yield hidden


class UnrolledAttention:
    """The true pairs of a text up to where a chain starts, and the chain's own nodes since."""

    def __init__(self, real: Tensor, first: int) -> None:
        width = real.shape[1]
        places = torch.arange(width, device=real.device)
        before = places[:, None] >= places
        itself = places[:, None] == places
        self._text = (before & real[:, None] | itself)[:, None]  # [B, 1, width, width]
        self._chains = self._text[:, :, first:]
        self._keys: list[list[Tensor]] = []  # a layer: of the text, then of each depth
        self._values: list[list[Tensor]] = []

    def over_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._keys.append([key])
        self._values.append([value])
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self._text)

    def over_chains(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.append(key)
        values.append(value)
        texts, heads, count, width = query.shape
        query = query.view(texts, key.shape[1], -1, count, width) * width**-0.5
        folded = query.flatten(2, 3)
        seen = (folded @ keys[0].transpose(2, 3)).view(*query.shape[:4], -1)
        seen = seen.masked_fill(~self._chains[:, :, None, :count], -torch.inf)
        own = [(query * k[:, :, None, :count]).sum(-1, keepdim=True) for k in keys[1:]]
        weights = torch.cat([seen, *own], -1).float().softmax(-1).to(value.dtype)
        text = keys[0].shape[2]
        mixed = (weights[..., :text].flatten(2, 3) @ values[0]).view_as(query)
        for depth, v in enumerate(values[1:]):
            mixed = mixed + weights[..., text + depth, None] * v[:, :, None, :count]
        return mixed.view(texts, heads, count, width)
