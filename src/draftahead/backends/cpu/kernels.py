"""One forward pass by the compiled kernels: tensors to addresses, and one call."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.backends.base import UnsupportedSpecError, require
from draftahead.backends.cpu import abi, build
from draftahead.backends.cpu.addresses import Addresses, address
from draftahead.backends.cpu.linear import weights_of
from draftahead.backends.cpu.threads import num_threads
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core.device import device_of
from draftahead.errors import UnsupportedModelError
from draftahead.kv.cache import KVCache
from draftahead.kv.formats import row_width

STORED = (torch.float32, torch.bfloat16, torch.uint8)  # by enum KVFormat
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
        sequences = torch.arange(len(tree_nodes), device="cpu")[:, None]
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
        nodes = num_sequences, num_nodes
        return Outputs(
            torch.empty(*nodes, vocab_size, dtype=torch.float32, device="cpu"),
            torch.empty(*nodes, abi.TOPK, dtype=torch.int64, device="cpu"),
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

    def __init__(self, library: abi.Library) -> None:
        self.library = library
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

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
        b, n = hidden.shape[:2]
        h, d, tree_size = model.hidden_size, model.head_dim, nodes.depths.shape[-1]
        threads, pointer = num_threads(), ctypes.byref(model)
        needed = self.library.draftahead_scratch_size(pointer, b * n, threads)
        scratch = self._scratch  # kept: another thread may replace it
        if scratch.numel() < needed:
            scratch = self._scratch = torch.empty(needed, dtype=torch.float32, device="cpu")
        tree_nodes, int64 = nodes.tree_nodes, torch.int64
        args = abi.ForwardArgs(
            num_sequences=b,
            num_nodes=n,
            first_slot=nodes.first_slot,
            num_context_tokens=nodes.num_context_tokens,
            num_cached=address("num_cached", nodes.num_cached, b, dtype=int64),
            tree_size=tree_size,
            depths=address("depths", nodes.depths, b, tree_size, dtype=torch.int32),
            ancestors=address("ancestors", nodes.ancestors, b, tree_size, dtype=int64),
            cos=address("cos", nodes.cos, b, n, d),
            sin=address("sin", nodes.sin, b, n, d),
            kv_only=kv_only,
            hidden=address("hidden states", hidden, b, n, h),
            scratch=scratch.data_ptr(),
        )
        if tree_nodes is not None:
            args.tree_nodes = address("tree_nodes", tree_nodes, b, n, dtype=int64)
        if first_input is not None:
            args.first_input = address("first_input", first_input, b, n, model.first_input_size)
        if outputs is not None:
            args.logits = address("logits", outputs.logits, b, n, model.lm_head.out_features)
            args.topk = address("topk", outputs.topk, b, n, abi.TOPK, dtype=int64)
        if aux is not None:
            args.num_aux_layers = w = len(aux.layers)
            args.aux_layers = address("aux_layers", aux.layers, w, dtype=int64)
            args.aux_hidden = address("aux_hidden", aux.hidden, b, n, w, h)
        require_valid(self.library.draftahead_forward(pointer, ctypes.byref(args), threads))


def require_valid(problem: bytes | None) -> None:
    """Raises what the kernels refuse about the sizes of a call: they have done nothing."""
    if problem is not None:
        raise UnsupportedModelError(f"the CPU kernels refuse a forward: {problem.decode()}")


class Binding(NamedTuple):
    """A model and a KV cache as the kernels take them."""

    kernels: Kernels
    addresses: Addresses  # keeps the tensors alive
    layers: Any  # ctypes array of abi.DecoderLayer; `model` holds its address
    model: abi.Model


def bind(spec: LlamaSpec, cache: KVCache) -> Binding:
    """Raises UnsupportedSpecError with the reason if the kernels do not support them."""
    library = build.library()
    if library is None:
        how = "install a C++ compiler (g++ or clang++)" if build.is_without_compiler() else None
        raise UnsupportedSpecError(str(build.problem()), faster=how)
    _require_supported(spec, cache)
    addresses, size = Addresses(), spec.hidden_size
    layers = (abi.DecoderLayer * len(spec.layers))(
        *(_layer(addresses, spec, cache, i) for i in range(len(spec.layers)))
    )
    model = abi.Model(
        layers=ctypes.addressof(layers),
        num_layers=len(spec.layers),
        hidden_size=size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        first_input_size=spec.first_input_size,
        intermediate_size=spec.intermediate_size,
        num_slots=cache.num_slots,
        num_entries=cache.num_entries,
        kv_format=STORED.index(cache.stored_dtype),
        activation=spec.activation,
        final_norm=addresses.of("the final norm", spec.final_norm, size),
        lm_head=weights_of(spec.lm_head, addresses, "lm_head", in_features=size),
        norm_eps=spec.norm_eps,
    )
    return Binding(Kernels(library), addresses, layers, model)


def _require_supported(spec: LlamaSpec, cache: KVCache) -> None:
    device = cache.keys[0].device
    require(device_of(device).is_cpu, f"the model is on {device}, not on the CPU")
    require(
        cache.dtype == torch.float32,
        f"the model is in {str(cache.dtype).removeprefix('torch.')}; the CPU kernels take float32",
        faster="load the model with dtype='float32'",
    )
    for name in ("head_dim", "intermediate_size"):
        size = getattr(spec, name)
        require(size % 16 == 0, f"{name} {size} is not a multiple of 16")
    heads = spec.num_heads, spec.num_kv_heads
    grouped = min(heads) > 0 and heads[0] % heads[1] == 0
    require(grouped, "{} query heads are no multiple of {} KV heads".format(*heads))
    num_layers = len(spec.layers), len(cache.keys), len(cache.values)
    require(len(set(num_layers)) == 1, "{} layers have {} keys and {} values".format(*num_layers))


def _layer(addresses: Addresses, spec: LlamaSpec, cache: KVCache, i: int) -> abi.DecoderLayer:
    layer, hidden_size, head_dim = spec.layers[i], spec.hidden_size, spec.head_dim
    q_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    input_size = hidden_size if i else spec.first_input_size
    sizes = {
        "q": (q_size, input_size),
        "k": (kv_size, input_size),
        "v": (kv_size, input_size),
        "o": (hidden_size, q_size),
        "gate": (spec.intermediate_size, hidden_size),
        "up": (spec.intermediate_size, hidden_size),
        "down": (hidden_size, spec.intermediate_size),
    }
    stored = cache.stored_dtype
    kv_shape = cache.num_slots, spec.num_kv_heads, cache.num_entries, row_width(head_dim, stored)
    norms = {
        "input_norm": hidden_size,
        "post_attention_norm": hidden_size,
        "q_norm": head_dim,
        "k_norm": head_dim,
    }
    weights = {name: getattr(layer, name) for name in norms}
    return abi.DecoderLayer(
        **{n: weights_of(layer.linears[n], addresses, n, *size) for n, size in sizes.items()},
        **{n: addresses.of(n, w, norms[n]) for n, w in weights.items() if w is not None},
        keys=addresses.of("keys", cache.keys[i], *kv_shape, dtype=stored),
        values=addresses.of("values", cache.values[i], *kv_shape, dtype=stored),
        sliding_window=layer.sliding_window,
        scaling=layer.scaling,
    )
