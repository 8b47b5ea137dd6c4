"""Layers of a llama-shaped decoder on a GPU: our Triton kernels over a few nodes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError, kernels_can_read, require
from draftahead.backends.llama_spec import SILU, LayerSpec, LlamaSpec
from draftahead.core.device import device_of
from draftahead.kv.cache import KVCache

# Nodes of a forward, of all sequences. More would need larger tiles, and be bound by arithmetic.
MAX_FORWARD_NODES = 128
KV_BLOCK = 64  # KV entries that the attention kernel takes at a time
# KV entries up to which a program takes one such block; beyond, LONG_BLOCKS of them. A higher limit
# runs more programs in longer contexts, and combines more results.
SHORT_KV_LEN, LONG_BLOCKS = 1024, 4
# Tiles of weights: outputs, inputs, stages in flight. Tuned on an H200 for layers of 4096.
TILES = {
    "qkv": (64, 128, 5),
    "o": (32, 512, 3),
    "gate_up": (64, 128, 3),
    "down": (32, 256, 6),
    "lm_head": (64, 128, 5),
}
MIN_PROGRAMS = 128  # needed to keep all multiprocessors of an H200 reading
MAX_SHARED_MEMORY = 200 * 1024  # bytes that the stages of a tile may take


class CudaAttentionMetadata(NamedTuple):
    """What attention needs of the nodes of B sequences in a forward. They are the last ones of a
    block of N nodes per sequence; earlier ones are in the cache."""

    num_context_tokens: Tensor  # [1] first nodes of a sequence that are text; the rest are drafted
    num_cached: Tensor  # [B] KV entries before the block
    depths: Tensor  # [B, N] of the whole block
    ancestors: Tensor  # [B, N] as bits
    num_nodes: int  # nodes of a sequence to compute
    num_earlier: int = 0  # nodes of the block before these

    @property
    def num_sequences(self) -> int:
        return len(self.num_cached)

    @property
    def total_nodes(self) -> int:
        return self.num_sequences * self.num_nodes


class KVSplits(NamedTuple):
    """Which KV entries a forward reads, and in how many splits of how many blocks."""

    first_slot: int
    num_splits: int
    blocks_per_split: int

    @staticmethod
    def over(first_slot: int, kv_len: int) -> KVSplits:
        blocks = 1 if kv_len <= SHORT_KV_LEN else LONG_BLOCKS
        needed, splits = -(-kv_len // (blocks * KV_BLOCK)), 1
        while splits < needed:
            splits *= 4  # few values: each captures its own CUDA graph
        return KVSplits(first_slot, splits, blocks)


class CudaLayers:
    """Layers bound to a KV cache, with the buffers between their kernels."""

    def __init__(self, spec: LlamaSpec, cache: KVCache, cos_sin: tuple[Tensor, Tensor]) -> None:
        """`cos_sin`: [entries, head_dim] each."""
        self.spec, self.cache = spec, cache
        self.device, self.dtype = cache.keys[0].device, cache.keys[0].dtype
        self._require_supported()
        try:
            from draftahead.backends.cuda import kernels

            device_of(self.device).load_triton()
        except Exception as problem:  # not installed, without a C compiler, Python.h or libcuda
            message = f"Triton does not load: {problem}"
            warnings.warn(f"{message}; our GPU kernels are not used", stacklevel=2)
            raise UnsupportedSpecError(message, faster="repair Triton") from problem
        self.kernels = kernels
        self._shared_memory = MAX_SHARED_MEMORY
        if (available := device_of(self.device).shared_memory()) is not None:
            self._shared_memory = min(MAX_SHARED_MEMORY, available - 8 * 1024)
        nodes, empty = MAX_FORWARD_NODES, self.empty
        # The residual stream before and after attention, and multiplied by a norm's weight.
        self.x, self.after_attention, self.scaled = (
            empty(nodes, spec.hidden_size) for _ in range(3)
        )
        self.qkv = empty(nodes, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        self.attended = empty(nodes, spec.num_heads * spec.head_dim)
        self.activated = empty(nodes, spec.intermediate_size)
        self.logits = empty(nodes, spec.vocab_size)
        # Of each tile of the vocabulary: the largest logit, its index, and the sum of exponentials
        # relative to it.
        tiles = nodes, -(-spec.vocab_size // 16)
        self.tile_max, self.tile_sums = (torch.empty(tiles, device=self.device) for _ in range(2))
        self.tile_argmax = torch.empty(tiles, dtype=torch.int32, device=self.device)
        # Scales activations that are multiplied by a norm's weight: float16 overflows early.
        self.norm_scale = 1.0 if self.dtype == torch.bfloat16 else 2.0**-6
        # Each program writes one partial sum of squares; unused ones stay 0.
        smallest = min(
            self._tile(name, 1, spec.hidden_size, spec.hidden_size)["BLOCK_N"]
            for name in ("o", "down")
        )
        self.num_partials = next_power_of_two(-(-spec.hidden_size // smallest))
        self.squares = torch.zeros(2, nodes, self.num_partials, device=self.device)
        self.cos, self.sin = (angles.to(self.dtype).contiguous() for angles in cos_sin)

    def empty(self, *size: int) -> Tensor:
        return torch.empty(*size, dtype=self.dtype, device=self.device)

    def _require_supported(self) -> None:
        spec, kind = self.spec, self.device.type
        half = self.dtype in (torch.bfloat16, torch.float16)
        require(
            half, f"the model is in {str(self.dtype).removeprefix('torch.')}, not half precision"
        )
        require(spec.head_dim in (32, 64, 128, 256), f"head_dim is {spec.head_dim}")
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        for size in (spec.hidden_size, q_size, kv_size, spec.intermediate_size):
            require(size % 64 == 0, f"a layer's size {size} is not a multiple of 64")
        for layer in spec.layers:
            for name, linear in layer.linears.items():
                require(type(linear) is nn.Linear, f"{name} is no nn.Linear")
                plain = kernels_can_read(linear.weight, self.dtype, kind)
                require(plain, f"{name} has another dtype, device or layout than the KV cache")
                require(linear.bias is None or name in "qkv", f"{name} has a bias")
            biases = {layer.linears[name].bias is None for name in "qkv"}
            require(len(biases) == 1, "some of q, k and v have a bias and some have none")
            require(
                (layer.q_norm is None) == (layer.k_norm is None), "only one of q and k is normed"
            )
        plain = type(spec.lm_head) is nn.Linear and spec.lm_head.bias is None
        require(plain, "lm_head is no nn.Linear without a bias")
        plain = kernels_can_read(spec.lm_head.weight, self.dtype, kind)
        require(plain, "lm_head has another dtype, device or layout than the KV cache")

    def run(
        self,
        metadata: CudaAttentionMetadata,
        splits: KVSplits,
        *,
        first_input: Tensor | None = None,
        out: Tensor | None = None,
        after_layer: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Runs all layers over the residual stream in `x`, whose norm is prepared in `scaled` and
        `squares`. `first_input` replaces the input of the first layer's attention. The result is in
        `x` or `out`, and prepared for the final norm in `scaled` and `squares`. `after_layer` is
        called with the number of layers done."""
        spec, count = self.spec, metadata.total_nodes
        pairs = spec.num_heads * splits.num_splits * count  # of a head of a node and a split
        sizes = {"split_sums": pairs * spec.head_dim, "split_max": pairs, "split_weights": pairs}
        scratch = {name: torch.empty(size, device=self.device) for name, size in sizes.items()}
        norms = [*(layer.input_norm for layer in spec.layers[1:]), spec.final_norm]
        for index, (layer, next_norm) in enumerate(zip(spec.layers, norms, strict=True)):
            linears, is_last = layer.linears, index == len(spec.layers) - 1
            source = first_input if first_input is not None and index == 0 else self.scaled
            qkv, normed = [linears[name] for name in "qkv"], source is self.scaled
            self.linear("qkv", qkv, source, self.qkv, count, normed=normed)
            self._attend(index, layer, metadata, splits, scratch)
            self.linear(
                "o", [linears["o"]], self.attended, self.after_attention, count, squares=1,
                add=self.x, norm=layer.post_attention_norm,
            )  # fmt: skip
            self._gate_up(layer, count)
            result = out if out is not None and is_last else self.x
            self.linear(
                "down", [linears["down"]], self.activated, result, count,
                add=self.after_attention, norm=next_norm,
            )  # fmt: skip
            after_layer(index + 1)

    def lm_head(self, count: int, *, sums: bool = False) -> tuple[int, int]:
        """Computes logits of `count` nodes and the largest of each tile of the vocabulary, with
        `sums` also the sum of exponentials. Returns the number of tiles and their size."""
        spec = self.spec
        self.linear("lm_head", [spec.lm_head], self.scaled, self.logits, count, normed=True,
                    sums=sums)  # fmt: skip
        size = int(self._tile("lm_head", count, spec.vocab_size, spec.hidden_size)["BLOCK_N"])
        return -(-spec.vocab_size // size), size

    def linear(
        self,
        name: str,
        linears: list[Any],
        x: Tensor,
        y: Tensor,
        count: int,
        *,
        squares: int = 0,
        normed: bool = False,
        add: Tensor | None = None,
        norm: Tensor | None = None,
        sums: bool = False,
    ) -> None:
        """y = linears(x) (+ `add`) over `count` nodes. `normed`: x is prepared for a norm, its sums
        in `squares`. With `add`, y is prepared for the next `norm`, its sums in `squares`."""
        weights = [linear.weight for linear in linears]
        out, in_ = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        w0, w1, w2 = weights + weights[:1] * (3 - len(weights))
        has_bias = linears[0].bias is not None
        b0, b1, b2 = [linear.bias for linear in linears] if has_bias else (w0, w1, w2)
        tile = self._tile(name, count, out, in_)
        self.launch(
            self.kernels.linear, -(-out // tile["BLOCK_N"]),
            x=x, squares=self.squares[squares], eps=self.spec.norm_eps,
            w0=w0, w1=w1, w2=w2, b0=b0, b1=b1, b2=b2, out0=w0.shape[0], out1=w1.shape[0],
            y=y, residual=x if add is None else add, norm=w0 if norm is None else norm,
            scaled=self.scaled, squares_out=self.squares[squares], tile_max=self.tile_max,
            tile_argmax=self.tile_argmax, tile_sums=self.tile_sums, num_nodes=count,
            IN=in_, OUT=out, NUM_PARTIALS=self.num_partials, NORM_SCALE=self.norm_scale,
            NORMED=normed, NUM_WEIGHTS=len(weights), HAS_BIAS=has_bias,
            HAS_RESIDUAL=add is not None, ARGMAX=name == "lm_head", SUMS=sums, **tile,
        )  # fmt: skip

    def _gate_up(self, layer: LayerSpec, count: int) -> None:
        spec = self.spec
        tile = self._tile("gate_up", count, spec.intermediate_size, spec.hidden_size)
        self.launch(
            self.kernels.gate_up, -(-spec.intermediate_size // tile["BLOCK_N"]),
            x=self.scaled, squares=self.squares[1], eps=spec.norm_eps,
            gate=layer.linears["gate"].weight, up=layer.linears["up"].weight, y=self.activated,
            num_nodes=count, IN=spec.hidden_size, OUT=spec.intermediate_size,
            NUM_PARTIALS=self.num_partials, NORM_SCALE=self.norm_scale,
            SILU=spec.activation == SILU, **tile,
        )  # fmt: skip

    def _attend(
        self,
        index: int,
        layer: LayerSpec,
        metadata: CudaAttentionMetadata,
        splits: KVSplits,
        scratch: dict[str, Tensor],
    ) -> None:
        spec, cache = self.spec, self.cache
        queries = spec.num_heads // spec.num_kv_heads * metadata.num_nodes  # of one KV head
        tile = min(64, max(16, next_power_of_two(queries)))
        has_norm = layer.q_norm is not None
        self.launch(
            self.kernels.attend,
            (metadata.num_sequences * spec.num_kv_heads, splits.num_splits, -(-queries // tile)),
            qkv=self.qkv, keys=cache.keys[index], values=cache.values[index],
            cos=self.cos, sin=self.sin,
            q_norm=layer.q_norm if has_norm else spec.final_norm,
            k_norm=layer.k_norm if has_norm else spec.final_norm, eps=spec.norm_eps,
            num_context_tokens=metadata.num_context_tokens, num_cached=metadata.num_cached,
            depths=metadata.depths, ancestors=metadata.ancestors, first_slot=splits.first_slot,
            last_position=cache.num_entries - 1, attended=self.attended, **scratch,
            num_nodes=metadata.num_nodes, num_earlier=metadata.num_earlier,
            block_size=metadata.depths.shape[1], num_entries=cache.num_entries,
            scaling=layer.scaling, window=layer.sliding_window or 1 << 30,
            NUM_HEADS=spec.num_heads, NUM_KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim,
            HEAD_NORM=has_norm, QUERIES=tile, BLOCK=KV_BLOCK,
            BLOCKS_PER_SPLIT=splits.blocks_per_split, SPLITS=splits.num_splits,
        )  # fmt: skip
        if splits.num_splits > 1:
            self.launch(
                self.kernels.combine_splits, metadata.total_nodes * spec.num_heads,
                attended=self.attended, **scratch,
                HEAD_DIM=spec.head_dim, SPLITS=splits.num_splits,
            )  # fmt: skip

    def _tile(self, name: str, count: int, out: int, in_: int) -> dict[str, Any]:
        """Options of a kernel over `count` nodes with weights [out, in]."""
        nodes = max(16, next_power_of_two(count))
        block_n, block_k, stages = TILES[name]
        while block_n > 16 and out < MIN_PROGRAMS * block_n:
            block_n //= 2
        loaded = block_n * (2 if name == "gate_up" else 1) + nodes
        while stages * loaded * block_k * 2 > self._shared_memory:
            stages, block_k = (stages - 1, block_k) if stages > 2 else (stages, block_k // 2)
        return {
            "NODES": nodes,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "EVEN_K": in_ % block_k == 0,
            "num_warps": 4,
            "num_stages": stages,
        }

    def launch(self, kernel: Any, grid: int | tuple[int, ...], **arguments: Any) -> None:
        """Launches a kernel with its arguments by name."""
        kernel[(grid,) if isinstance(grid, int) else grid](**arguments)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
