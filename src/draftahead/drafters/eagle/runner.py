"""Forwards of an EAGLE head: over (hidden, token) inputs of the text, and over nodes of draft
trees.

Input j of a sequence is the pair (hidden states of token j, token j + 1). It lies in entry j of the
head's own KV cache, and its logits predict token j + 2. The input of the root is the last one.
Nodes of a tree lie in the entries behind it; they have the head's outputs in place of hidden
states, and are overwritten at the next step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.backends.cpu import build
from draftahead.backends.cpu.kernels import CpuAttentionMetadata
from draftahead.backends.cpu.linear import quantize_linears
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core import tree
from draftahead.core.device import device_of, host_ints, small_tensor
from draftahead.drafters.eagle.cpu_head import CpuEagleHead, cpu_eagle_head
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.spec import head_spec
from draftahead.kv import attention
from draftahead.kv.cache import CacheView, KVCache, LayerKVShape
from draftahead.models.runner import ModelRunner


class HeadOutput(NamedTuple):
    """Outputs of the head for N nodes of B sequences."""

    hidden: Tensor  # [B, N, H] used as the features of the nodes' tokens
    logits: Tensor  # [B, N, D] over the draft vocabulary


class NodeRange(NamedTuple):
    """The last nodes of a tree per sequence, from `start` on. Node 0 is in entry `num_cached[b]`
    of slot `first_slot` + b; earlier nodes have been computed."""

    first_slot: int
    num_cached: list[int]  # [B]
    parents: list[list[int]]  # [B][M] of the whole trees
    start: int = 0

    @property
    def depths(self) -> list[list[int]]:
        """[B][M] of the whole trees."""
        return [tree.depths(parents) for parents in self.parents]

    @property
    def is_chain(self) -> bool:
        return self.start == 0 and all(tree.is_chain(parents) for parents in self.parents)


class EagleRunner:
    """A head with its KV cache, over the hidden states that the target's forwards stored."""

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
        self.spec: LlamaSpec = head_spec(head)
        kv_shape = (self.spec.num_kv_heads, self.spec.head_dim)
        self.cache = KVCache(
            [LayerKVShape(*kv_shape, *kv_shape)] * len(self.spec.layers),
            max_batch,
            target.max_context + scratch_entries,
            head.norm.weight.dtype,
            target.device,
        )
        self.cpu = cpu_eagle_head(head, self.spec, self.cache) if by_kernels else None
        embed = getattr(head, "embed_tokens", None)
        self.embed: Any = target.model.get_input_embeddings() if embed is None else embed
        positions = torch.arange(self.cache.num_entries, device=self.device)[None]
        cos, sin = head.rotary(head.norm.weight[None], positions)
        self.cos_sin = cos[0].contiguous(), sin[0].contiguous()  # [entries, head_dim]

    @property
    def draft_to_target(self) -> Tensor | None:
        """[D] the tokens of the draft vocabulary; None: the target's whole vocabulary."""
        draft_to_target = self.head.draft_to_target
        return None if len(draft_to_target) == self.target.vocab_size else draft_to_target

    # --------------------------------------------------------------------- inputs of the text

    def forward_inputs(
        self, first_slot: int, tokens: Tensor, num_cached: list[int], *, kv_only: bool = False
    ) -> HeadOutput:
        """Inputs with tokens [B, N], behind `num_cached` entries of slots from `first_slot` on."""
        batch, count = tokens.shape
        first = small_tensor(num_cached, torch.int64, self.device)
        entries = first[:, None] + torch.arange(count, device=self.device)
        slots = torch.arange(first_slot, first_slot + batch, device=self.device)
        chain = NodeRange(first_slot, num_cached, [tree.chain(count)] * batch)
        return self.forward(tokens, self.features(slots, entries), chain, kv_only)

    def features(self, slots: Tensor, entries: Tensor) -> Tensor:
        """Features [B, N, H] of the target's tokens in `entries` [B, N] of `slots` [B]."""
        hidden_states = self.target.hidden_states(self.head.config.aux_layers, slots, entries)
        return self.head.feature(hidden_states.to(self.cache.dtype))

    # ----------------------------------------------------------------------------- the forward

    def forward(
        self, tokens: Tensor, hidden: Tensor, nodes: NodeRange, kv_only: bool = False
    ) -> HeadOutput:
        """Nodes with tokens [B, N] and `hidden` [B, N, H]: the features of the tokens before them,
        or the outputs of their parents. `kv_only`: only keys and values are
        computed for all nodes, and the output is incomplete."""
        embedded = self.embed(tokens.to(self.device)).to(hidden.dtype)
        batch, num_nodes = tokens.shape
        if self.cpu is not None and self.cpu.supports(batch, num_nodes, len(nodes.parents[0])):
            return self._forward_cpu(self.cpu, embedded, hidden, nodes, kv_only)
        return self._forward_torch(embedded, hidden, nodes, kv_only)

    def _forward_cpu(
        self, cpu: CpuEagleHead, embedded: Tensor, hidden: Tensor, nodes: NodeRange, kv_only: bool
    ) -> HeadOutput:
        num_cached = host_ints(nodes.num_cached)
        depths = host_ints(nodes.depths)
        bits = [tree.ancestor_bits(parents) for parents in nodes.parents]
        index = torch.arange(nodes.start, depths.shape[1], device="cpu")
        positions = num_cached[:, None] + depths[:, index]
        first: Any = self.head.layers[0]
        x, residual = first.input_projection(embedded, hidden)
        residual = residual.clone(memory_format=torch.contiguous_format)
        of_kernels = CpuAttentionMetadata(
            first_slot=nodes.first_slot,
            num_context_tokens=0,  # NaN must not reach the cache: all of it is drafting
            num_cached=num_cached,
            depths=depths.int(),
            ancestors=host_ints(bits),
            cos=self.cos_sin[0][positions],
            sin=self.cos_sin[1][positions],
            tree_nodes=index.repeat(len(depths), 1) if nodes.start else None,
        )
        # `residual` becomes the output of the last layer.
        logits = cpu.forward(residual, x.contiguous(), of_kernels, kv_only=kv_only)
        output = self.head.norm(residual) if self.head.config.norm_output else residual
        return HeadOutput(output, logits)

    def _forward_torch(
        self, embedded: Tensor, hidden: Tensor, nodes: NodeRange, kv_only: bool
    ) -> HeadOutput:
        num_cached = small_tensor(nodes.num_cached, torch.int64, self.device)
        depths = small_tensor(nodes.depths, torch.int64, self.device)
        ancestors = None
        if not nodes.is_chain:  # to find ancestors takes a device one kernel per node
            ancestors = tree.ancestors(small_tensor(nodes.parents, torch.int64, self.device))
        tree_size = depths.shape[1]
        kv_len = max(nodes.num_cached) + tree_size
        mask = attention.distances(num_cached, depths, ancestors, kv_len)[:, :, nodes.start :]
        index = torch.arange(nodes.start, tree_size, device=self.device)
        view = CacheView(self.cache, nodes.first_slot, num_cached[:, None] + index, kv_len, 0)
        positions = (num_cached[:, None] + depths)[:, nodes.start :]
        num_outputs = 1 if kv_only else len(index)
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
