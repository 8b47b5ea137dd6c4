"""One forward pass by the compiled kernels: tensors to addresses, and one call."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.backends.base import UnsupportedSpecError, kernels_can_read, require
from draftahead.backends.cpu import abi, build
from draftahead.backends.cpu.linear import is_supported, weights_of
from draftahead.backends.cpu.threads import num_threads
from draftahead.backends.llama_spec import LayerSpec, LlamaSpec
from draftahead.core.device import device_of
from draftahead.kv.cache import KVCache

NODES_PER_CALL = 64  # of all sequences: the activations of more would not fit into the CPU's caches


class CpuAttentionMetadata(NamedTuple):
    """What attention needs of the nodes [B, N] of a forward, which may be a part of the nodes
    [B, T] of trees."""

    first_slot: int
    num_context_tokens: int  # first nodes of each sequence that are text; the rest are drafted
    num_cached: Tensor  # [B] KV entries before the nodes
    depths: Tensor  # [B, T] int32
    ancestors: Tensor  # [B, T] int64, as bits
    cos: Tensor  # [B, N, head_dim]
    sin: Tensor
    tree_nodes: Tensor | None = None  # [B, N] which nodes of the trees; None: all

    def of_sequences(self, part: slice) -> CpuAttentionMetadata:
        return CpuAttentionMetadata(
            self.first_slot + part.start,
            self.num_context_tokens,
            self.num_cached[part],
            self.depths[part],
            self.ancestors[part],
            self.cos[part],
            self.sin[part],
            None if self.tree_nodes is None else self.tree_nodes[part],
        )

    def select(self, tree_nodes: Tensor) -> CpuAttentionMetadata:
        """A part of the nodes of whole trees: indices [B, M]."""
        sequences = torch.arange(len(tree_nodes))[:, None]
        return self._replace(
            cos=self.cos[sequences, tree_nodes],
            sin=self.sin[sequences, tree_nodes],
            tree_nodes=tree_nodes,
        )


class Outputs(NamedTuple):
    """Tensors that a forward with an LM head fills."""

    logits: Tensor  # [B, N, V]
    topk: Tensor  # [B, N, TOPK]

    @staticmethod
    def empty(num_sequences: int, num_nodes: int, vocab_size: int) -> Outputs:
        return Outputs(
            torch.empty(num_sequences, num_nodes, vocab_size),
            torch.empty(num_sequences, num_nodes, abi.TOPK, dtype=torch.int64),
        )

    def of_sequences(self, part: slice) -> Outputs:
        return Outputs(self.logits[part], self.topk[part])


class AuxHidden(NamedTuple):
    """Auxiliary hidden states that a forward fills."""

    layers: Tensor  # [W] ascending numbers of layers, after which they are stored
    hidden: Tensor  # [B, N, W, H]

    def of_sequences(self, part: slice) -> AuxHidden:
        return AuxHidden(self.layers, self.hidden[part])


class Kernels:
    """The compiled library, and the scratch memory of its forward passes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._scratch = torch.empty(0)

    def forward(
        self,
        model: abi.Model,
        hidden: Tensor,
        nodes: CpuAttentionMetadata,
        outputs: Outputs | None,
        *,
        aux: AuxHidden | None = None,
        first_input: Tensor | None = None,
        kv_only: bool = False,
    ) -> None:
        """Runs the layers over `hidden` [B, N, H], in place, and the LM head if there are `outputs`
        to fill. `first_input`: what the first layer's attention reads in place of normed `hidden`.
        `kv_only`: stops once the last layer's keys and values are stored."""
        num_sequences, num_nodes = hidden.shape[:2]
        threads, pointer = num_threads(), ctypes.byref(model)
        needed = self.library.draftahead_scratch_size(pointer, num_sequences * num_nodes, threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        logits, topk = outputs or (None, None)
        aux_layers, aux_hidden = aux or (None, None)
        args = abi.ForwardArgs(
            num_sequences=num_sequences,
            num_nodes=num_nodes,
            first_slot=nodes.first_slot,
            num_context_tokens=nodes.num_context_tokens,
            num_cached=_address(nodes.num_cached),
            tree_size=nodes.depths.shape[1],
            tree_nodes=_address(nodes.tree_nodes),
            depths=_address(nodes.depths),
            ancestors=_address(nodes.ancestors),
            cos=_address(nodes.cos),
            sin=_address(nodes.sin),
            first_input=_address(first_input),
            kv_only=kv_only,
            hidden=_address(hidden),
            logits=_address(logits),
            num_aux_layers=0 if aux_layers is None else len(aux_layers),
            aux_layers=_address(aux_layers),
            aux_hidden=_address(aux_hidden),
            topk=_address(topk),
            scratch=_address(self._scratch),
        )
        self.library.draftahead_forward(pointer, ctypes.byref(args), threads)


def _address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


class Binding(NamedTuple):
    """A model and a KV cache as the kernels take them."""

    kernels: Kernels
    layers: Any  # ctypes array of abi.DecoderLayer; `model` holds its address
    model: abi.Model


def bind(spec: LlamaSpec, cache: KVCache) -> Binding:
    """`spec` and `cache` must outlive what is returned: it holds addresses of their tensors. Raises
    UnsupportedSpecError with the reason if the kernels do not support them."""
    library = build.library()
    if library is None:
        how = "install a C++ compiler (g++ or clang++)" if build.is_without_compiler() else None
        raise UnsupportedSpecError(str(build.problem()), faster=how)
    _require_supported(spec, cache)
    layers = (abi.DecoderLayer * len(spec.layers))(
        *(_layer(one, cache.keys[i], cache.values[i]) for i, one in enumerate(spec.layers))
    )
    model = abi.Model(
        layers=ctypes.addressof(layers),
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        num_entries=cache.num_entries,
        activation=spec.activation,
        final_norm=_norm(spec.final_norm),
        lm_head=weights_of(spec.lm_head),
        norm_eps=spec.norm_eps,
    )
    return Binding(Kernels(library), layers, model)


def _require_supported(spec: LlamaSpec, cache: KVCache) -> None:
    keys = cache.keys[0]
    require(device_of(keys.device).is_cpu, f"the model is on {keys.device}, not on the CPU")
    require(
        keys.dtype == torch.float32,
        f"the model is in {str(keys.dtype).removeprefix('torch.')}; the CPU kernels take float32",
        faster="load the model with dtype='float32'",
    )
    for name in ("head_dim", "intermediate_size"):
        size = getattr(spec, name)
        require(size % 16 == 0, f"{name} {size} is not a multiple of 16")
    linears = [("lm_head", spec.lm_head)]
    linears += [(name, linear) for layer in spec.layers for name, linear in layer.linears.items()]
    for name, linear in linears:
        require(is_supported(linear), f"{name} is no float32 nn.Linear and no Int8Linear")


def _layer(layer: LayerSpec, keys: Tensor, values: Tensor) -> abi.DecoderLayer:
    return abi.DecoderLayer(
        **{name: weights_of(linear) for name, linear in layer.linears.items()},
        input_norm=_norm(layer.input_norm),
        post_attention_norm=_norm(layer.post_attention_norm),
        q_norm=None if layer.q_norm is None else _norm(layer.q_norm),
        k_norm=None if layer.k_norm is None else _norm(layer.k_norm),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        sliding_window=layer.sliding_window,
        scaling=layer.scaling,
    )


def _norm(weight: Tensor) -> int:
    readable = kernels_can_read(weight, torch.float32, "cpu")
    require(readable, "a norm's weight is not in float32 on the CPU")
    return weight.data_ptr()
