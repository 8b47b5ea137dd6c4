"""Forwards of an EAGLE head: over (hidden, token) inputs of the text, and over nodes of draft
trees.

Input j of a sequence is the pair (hidden states of token j, token j + 1). It lies in entry j of the
head's own KV cache, and its logits predict token j + 2. The input of the root is the last one.
Nodes of a tree lie in the entries behind it; they have the head's outputs in place of hidden
states, and are overwritten at the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.backends.cpu import build
from draftahead.backends.cpu.linear import quantize_linears
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core import tree
from draftahead.core.device import device_of, small_tensor
from draftahead.drafters.eagle.cpu import CpuEagleHead, cpu_eagle_head
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.spec import head_spec
from draftahead.kv import attention
from draftahead.kv.cache import CacheView, KVCache, LayerKVShape
from draftahead.models.runner import ModelRunner


class HeadOutput(NamedTuple):
    """What a forward of the head computed for N nodes of B sequences."""

    hidden: Tensor  # [B, N, H] stands in for the features of the nodes' tokens
    logits: Tensor  # [B, N, D] over the draft vocabulary


@dataclass(frozen=True)
class NodeRange:
    """The nodes of a forward: a range of a tree per sequence, node 0 in entry `starts[b]` of slot
    `first_slot` + b. Nodes before the range were computed earlier."""

    first_slot: int
    starts: list[int]  # [B]
    parents: list[list[int]]  # [B][M] of the whole trees, M >= nodes.stop
    nodes: range

    @property
    def is_whole(self) -> bool:
        return len(self.nodes) == len(self.parents[0])

    @property
    def is_chain(self) -> bool:
        chain = list(range(-1, self.nodes.stop - 1))
        return self.nodes.start == 0 and all(parents == chain for parents in self.parents)


class EagleRunner:
    """A head with its KV cache, over the hidden states that the target's forwards captured."""

    def __init__(
        self, head: EagleHead, target: ModelRunner, max_batch: int, scratch_entries: int
    ) -> None:
        """`scratch_entries`: KV entries behind the text, for nodes of trees and for padding. On a
        CPU the head is quantized in place: drafts may be approximate, and it reads a quarter of the
        bytes."""
        self.head, self.target, self.device = head, target, target.device
        by_kernels = device_of(self.device).is_cpu and build.library() is not None
        if by_kernels:
            quantize_linears(head.float())
        self.cache = _new_cache(head, target, max_batch, scratch_entries)
        self.spec: LlamaSpec = head_spec(head)
        self.cpu: CpuEagleHead | None = None
        if by_kernels:
            self.cpu = cpu_eagle_head(head, self.spec, self.cache)
        own = getattr(head, "embed_tokens", None)
        self.embed: Any = target.model.get_input_embeddings() if own is None else own
        positions = torch.arange(self.cache.num_entries, device=self.device)[None]
        cos, sin = head.rotary(head.norm.weight[None], positions)
        self.cos_sin = cos[0].contiguous(), sin[0].contiguous()  # [entries, head_dim]

    @property
    def draft_tokens(self) -> Tensor | None:
        """[D] the draft vocabulary; None: the target's whole vocabulary."""
        return None if len(self.head.tokens) == self.target.vocab_size else self.head.tokens

    # --------------------------------------------------------------------- inputs of the text

    def forward_inputs(
        self, first_slot: int, tokens: Tensor, held: list[int], *, kv_only: bool = False
    ) -> HeadOutput:
        """Inputs with tokens [B, N], behind the `held` entries of slots from `first_slot` on."""
        batch, count = tokens.shape
        starts = small_tensor(held, torch.int64, self.device)
        entries = starts[:, None] + torch.arange(count, device=self.device)
        slots = torch.arange(first_slot, first_slot + batch, device=self.device)
        chain = NodeRange(first_slot, held, [list(range(-1, count - 1))] * batch, range(count))
        return self.forward(tokens, self.features(slots, entries), chain, kv_only)

    def features(self, slots: Tensor, entries: Tensor) -> Tensor:
        """Features [B, N, H] of the target's tokens in `entries` [B, N] of `slots` [B]."""
        hidden_states = self.target.hidden_states(self.head.config.depths, slots, entries)
        return self.head.feature(hidden_states.to(self.cache.keys[0].dtype))

    # ----------------------------------------------------------------------------- the forward

    def forward(
        self, tokens: Tensor, hidden: Tensor, which: NodeRange, kv_only: bool = False
    ) -> HeadOutput:
        """Nodes with tokens [B, N] and `hidden` [B, N, H]: the features of the tokens before them,
        or the outputs of their parents. `kv_only`: only keys and values count, and the output is
        not complete."""
        embedded = self.embed(tokens.to(self.device)).to(hidden.dtype)
        depths = [tree.depths(parents) for parents in which.parents]
        batch, num_nodes = tokens.shape
        if self.cpu is not None and self.cpu.supports(batch, num_nodes, len(which.parents[0])):
            return self._forward_cpu(self.cpu, embedded, hidden, which, depths, kv_only)
        return self._forward_torch(embedded, hidden, which, depths, kv_only)

    def _forward_cpu(
        self,
        kernels: CpuEagleHead,
        embedded: Tensor,
        hidden: Tensor,
        which: NodeRange,
        depths: list[list[int]],
        kv_only: bool,
    ) -> HeadOutput:
        positions = torch.tensor(
            [
                [start + own[node] for node in which.nodes]
                for start, own in zip(which.starts, depths, strict=True)
            ]
        )
        first: Any = self.head.layers[0]
        x, residual = first.input_projection(embedded, hidden)
        residual = residual.clone(memory_format=torch.contiguous_format)
        cos, sin = self.cos_sin
        logits = kernels.forward(
            residual,  # becomes the output of the last layer
            x.contiguous(),
            (cos[positions], sin[positions]),
            first_slot=which.first_slot,
            kv_lens=which.starts,
            depths=depths,
            ancestors=[tree.ancestor_bits(parents) for parents in which.parents],
            tree_nodes=None if which.is_whole else [list(which.nodes)] * len(which.parents),
            kv_only=kv_only,
        )
        output = self.head.norm(residual) if self.head.config.norm_output else residual
        return HeadOutput(output, logits)

    def _forward_torch(
        self,
        embedded: Tensor,
        hidden: Tensor,
        which: NodeRange,
        depths: list[list[int]],
        kv_only: bool,
    ) -> HeadOutput:
        starts = small_tensor(which.starts, torch.int64, self.device)
        depth = small_tensor(depths, torch.int64, self.device)
        ancestors = None
        if not which.is_chain:  # to find ancestors takes a device one kernel per node
            ancestors = tree.ancestors(small_tensor(which.parents, torch.int64, self.device))
        kv_len = max(which.starts) + which.nodes.stop
        own = slice(which.nodes.start, which.nodes.stop)
        mask = attention.distances(starts, depth, ancestors, kv_len)[:, :, own]
        index = torch.arange(which.nodes.start, which.nodes.stop, device=self.device)
        view = CacheView(self.cache, which.first_slot, starts[:, None] + index, kv_len, 0)
        positions = (starts[:, None] + depth)[:, own]
        num_outputs = 1 if kv_only else len(which.nodes)
        output = self.head_forward(embedded, hidden, positions, mask, view, num_outputs)
        return HeadOutput(output, output if kv_only else self.head.logits(output))

    def head_forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        view: CacheView,
        num_outputs: int,
    ) -> Tensor:
        """The head's own forward, with our cache and attention -> outputs [B, num_outputs, H].
        `mask`: distances, as kv/attention.py has them."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = view.update(key, value, layer)
            visible = mask[:, :, -query.shape[2] :]
            mixed, _ = attention.grouped_attention(self.head, query, keys, values, visible)
            return mixed.transpose(1, 2)

        return self.head(embedded, hidden, positions, attend, num_outputs)  # type: ignore[no-any-return]


def _new_cache(
    head: EagleHead, target: ModelRunner, max_batch: int, scratch_entries: int
) -> KVCache:
    layer, head_dim = head.config.layer, head.config.head_dim
    kv_heads = int(layer.num_key_value_heads)
    shape = LayerKVShape(kv_heads, head_dim, kv_heads, head_dim)
    shapes = [shape] * int(layer.num_hidden_layers)
    num_entries = target.max_context + scratch_entries
    return KVCache(shapes, max_batch, num_entries, head.norm.weight.dtype, target.device)
