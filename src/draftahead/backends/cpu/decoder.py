"""The CPU backend: forward passes of a llama-shaped model by our kernels, in one call each.

CpuDecoder.forward -> embeddings and rotary angles (the model's own modules)
                   -> lower_layers.py: hidden states of lower layers that a draft computed
                   -> kernels.py: one C++ call
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftahead.backends.base import CacheSlice, DeviceTree
from draftahead.backends.cpu import abi
from draftahead.backends.cpu.addresses import Addresses
from draftahead.backends.cpu.kernels import (
    NODES_PER_CALL,
    AuxHidden,
    CpuAttentionMetadata,
    Outputs,
    bind,
)
from draftahead.backends.cpu.linear import weights_of
from draftahead.backends.cpu.lower_layers import LowerLayerCache
from draftahead.backends.cpu.threads import torch_single_threaded
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core import tree
from draftahead.core.device import host_ints
from draftahead.core.types import ForwardOutput
from draftahead.kv.cache import KVCache

ExitTransform = Callable[[Tensor], Tensor]  # hidden states before the final norm


class CpuDecoder:
    """A Backend: a llama-shaped model bound to one KV cache, or some layers of it."""

    batch_invariant = True
    supports_device_drafts = False

    def __init__(self, spec: LlamaSpec, cache: KVCache) -> None:
        self._kernels, self._addresses, self._layers, self._model = bind(spec, cache)
        self._spec, self._cache = spec, cache
        _require_plain_inputs(spec)
        # int8: quantizing the next layer's input enlarges differences in the last bits.
        self.tolerance = 0.05 if _has_int8_inputs(self._model.lm_head) else 1e-3
        self._aux_layers: tuple[int, ...] = ()
        # Hidden states of the last draft by the first layers of this model.
        self._lower_layers: LowerLayerCache | None = None
        # Of a layer subset: the decoder of all layers, and n if the subset is layers 0..n-1, or 0.
        self._all_layers: CpuDecoder | None = None
        self._num_first_layers = 0
        self._exit_transform: ExitTransform | None = None

    def layer_subset(
        self, layers: Sequence[int], exit_transform: ExitTransform | None, lm_head: Any
    ) -> CpuDecoder:
        """A decoder of some of the layers, over the same KV cache. `exit_transform` is applied
        before the final norm; `lm_head` replaces the model's own, unless it is None."""
        subset = copy.copy(self)
        subset._layers = (abi.DecoderLayer * len(layers))(*(self._layers[i] for i in layers))
        subset._model = self._layer_range(0, len(layers))
        subset._model.layers = ctypes.addressof(subset._layers)
        if lm_head is not None:
            subset._addresses, size = Addresses(), self._model.hidden_size
            subset._model.lm_head = weights_of(
                lm_head, subset._addresses, "lm_head", in_features=size
            )
        subset._exit_transform = exit_transform
        subset._aux_layers = ()
        subset._all_layers = self
        is_first_layers = tuple(layers) == tuple(range(len(layers)))
        subset._num_first_layers = len(layers) if is_first_layers else 0
        return subset

    def set_aux_layers(self, aux_layers: tuple[int, ...]) -> None:
        self._aux_layers = aux_layers

    def supports(self, num_sequences: int, num_nodes: int, with_logits: bool) -> bool:
        return num_nodes <= tree.MAX_NODES

    @torch_single_threaded()
    def forward(
        self,
        tokens: Tensor,
        num_cached: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput:
        """Nodes [B, N] -> logits [B, N, V], or [B, N, 0] without logits. See Backend.forward."""
        if isinstance(parents, DeviceTree):
            raise TypeError("trees on a device have no place in a forward on the CPU")
        num_sequences, num_nodes = tokens.shape
        all_layers = self._all_layers or self
        # Any forward may overwrite the KV entries of an earlier draft.
        lower, all_layers._lower_layers = all_layers._lower_layers, None
        hidden = self._spec.embed(tokens).contiguous()
        nodes = self._nodes(hidden, host_ints(num_cached), parents, cache_slice)
        vocab_size = self._model.lm_head.out_features if with_logits else 0
        outputs = Outputs.empty(num_sequences, num_nodes, vocab_size)
        aux = self._empty_aux_hidden(num_sequences, num_nodes)
        model, first_slot = self._model, cache_slice.first_slot
        if self._num_first_layers:
            lower = LowerLayerCache.to_extend(
                lower, self._num_first_layers, self._cache, first_slot, num_cached
            )
            if lower is not None and not lower.num_nodes:
                # As in verification: the root alone is a context token, whose NaN are stored.
                nodes = nodes._replace(num_context_tokens=1)
        elif lower is not None and self._may_skip_lower_layers(cache_slice, with_logits):
            found = lower.find(self._cache, first_slot, tokens.tolist(), parents)
            if found is not None:
                hidden = self._after_lower_layers(hidden, nodes, lower, found)
                model = self._layer_range(lower.num_layers, len(self._layers) - lower.num_layers)
        self._run(model, hidden, nodes, outputs if with_logits else None, aux)
        if self._num_first_layers and lower is not None:
            all_layers._lower_layers = lower.with_nodes(tokens.tolist(), parents, hidden)
        if aux is not None:
            entries = nodes.num_cached[:, None] + torch.arange(num_nodes, device="cpu")
            self._cache.store_hidden(aux.hidden, first_slot, entries)
        if not with_logits:
            return ForwardOutput(outputs.logits)
        return ForwardOutput(outputs.logits, argmax=outputs.topk[..., 0], topk=outputs.topk)

    def _nodes(
        self,
        hidden: Tensor,
        num_cached: Tensor,
        parents: Sequence[Sequence[int]] | None,
        cache_slice: CacheSlice,
    ) -> CpuAttentionMetadata:
        if parents is None:  # chains: every earlier node is an ancestor
            index = torch.arange(hidden.shape[1], device="cpu")
            depths = index.repeat(len(hidden), 1)
            ancestors = (1 << index).cumsum(0).repeat(len(hidden), 1)
        else:
            depths = host_ints([tree.depths(one) for one in parents])
            ancestors = host_ints([tree.ancestor_bits(one) for one in parents])
        positions = (num_cached[:, None] + depths).clamp(max=cache_slice.last_position)
        cos, sin = (
            angles.expand(len(hidden), -1, -1).contiguous()
            for angles in self._spec.rotary(hidden, positions)
        )
        return CpuAttentionMetadata(
            first_slot=cache_slice.first_slot,
            num_context_tokens=cache_slice.num_context_tokens,
            num_cached=num_cached,
            depths=depths.to(torch.int32),
            ancestors=ancestors,
            cos=cos,
            sin=sin,
        )

    def _empty_aux_hidden(self, num_sequences: int, num_nodes: int) -> AuxHidden | None:
        layers = self._aux_layers
        if not layers:
            return None
        size = (num_sequences, num_nodes, len(layers), self._spec.hidden_size)
        return AuxHidden(host_ints(layers), torch.empty(size, dtype=torch.float32, device="cpu"))

    def _may_skip_lower_layers(self, cache_slice: CacheSlice, with_logits: bool) -> bool:
        """Whether a forward verifies a draft by all layers and may skip the lower ones: its root is
        the only context token, and it stores no hidden states."""
        is_verification = with_logits and cache_slice.num_context_tokens == 1
        return is_verification and self._all_layers is None and not self._aux_layers

    def _layer_range(self, first: int, count: int) -> abi.Model:
        """The model with layers [first, first + count) only."""
        model = abi.Model.from_buffer_copy(self._model)
        model.layers = ctypes.addressof(self._layers) + first * ctypes.sizeof(abi.DecoderLayer)
        model.num_layers = count
        return model

    def _after_lower_layers(
        self,
        embedded: Tensor,
        nodes: CpuAttentionMetadata,
        lower: LowerLayerCache,
        found: list[list[int]],
    ) -> Tensor:
        """Hidden states [B, N, H] after the lower layers. `found` [B][N]: index of each node in the
        record, from which it is taken and its KV entry moved; -1: it is computed."""
        self._cache.move_nodes(_moves(found, nodes.first_slot), lower.num_layers)
        num_missing = max(one.count(-1) for one in found)
        # Every sequence computes `num_missing` nodes: the missing ones, then others once more.
        order = [
            sorted(range(len(one)), key=[index != -1 for index in one].__getitem__) for one in found
        ]
        tree_nodes = host_ints(order)[:, :num_missing].contiguous()
        sequences = torch.arange(len(found), device="cpu")[:, None]
        hidden = lower.hidden[sequences, host_ints(found).clamp(min=0)]
        if num_missing:
            missing = embedded[sequences, tree_nodes]
            lower_layers = self._layer_range(0, lower.num_layers)
            self._run(lower_layers, missing, nodes.select(tree_nodes), None, None)
            hidden[sequences, tree_nodes] = missing
        return hidden

    def _run(
        self,
        model: abi.Model,
        hidden: Tensor,
        nodes: CpuAttentionMetadata,
        outputs: Outputs | None,
        aux: AuxHidden | None,
    ) -> None:
        """Runs the model over `hidden` [B, N, H], in place, NODES_PER_CALL nodes at a time."""
        at_once = max(1, NODES_PER_CALL // hidden.shape[1])
        for start in range(0, len(hidden), at_once):
            part = slice(start, start + at_once)
            some, some_nodes = hidden[part], nodes.of_sequences(part)
            some_outputs = outputs and outputs.of_sequences(part)
            some_aux = aux and aux.of_sequences(part)
            if self._exit_transform is None or some_outputs is None:
                self._kernels.forward(model, some, some_nodes, some_outputs, aux=some_aux)
            else:  # the layers, the transform, then the final norm and LM head alone
                self._kernels.forward(model, some, some_nodes, None, aux=some_aux)
                transformed = self._exit_transform(some.clone()).contiguous()
                self._kernels.forward(
                    self._layer_range(0, 0), transformed, some_nodes, some_outputs
                )


@torch.inference_mode()
def _require_plain_inputs(spec: LlamaSpec) -> None:
    """That the model's own modules give embeddings and rotary angles as the kernels read them."""
    hidden = spec.embed(host_ints([[0, 0]]))
    addresses = Addresses()
    addresses.of("an embedding", hidden.contiguous(), 1, 2, spec.hidden_size)
    for angles in spec.rotary(hidden, host_ints([[0, 1]])):
        addresses.of("a rotary embedding", angles.contiguous(), 1, 2, spec.head_dim)


def _has_int8_inputs(weights: abi.Weights) -> bool:
    is_int8 = weights.arithmetic == abi.ARITHMETICS.index("int8")
    return weights.kind == abi.KINDS.index("INT8") or (bool(weights.panels) and is_int8)


def _moves(found: list[list[int]], first_slot: int) -> list[tuple[int, int, int]]:
    """(slot, to, from) of nodes whose index in the tree differs from that in the record."""
    return [
        (slot, node, index)
        for slot, indices in enumerate(found, first_slot)
        for node, index in enumerate(indices)
        if index not in (-1, node)
    ]
