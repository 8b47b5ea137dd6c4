"""Layers of a llama-shaped decoder on a GPU: our Triton kernels over a few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError, is_plain, require
from draftahead.backends.llama_spec import LayerSpec, LlamaSpec
from draftahead.core.device import device_of
from draftahead.kv.cache import KVCache

MOST_ROWS = 128  # of all nodes of a pass
BLOCK = 64  # keys that the attention takes at a time; a program takes one or four such blocks
SHORT = 1024  # keys up to which it takes one
# Tiles of weights: outputs, inputs, stages in flight. Tuned on an H200 for layers of 4096.
TILES = {
    "qkv": (64, 128, 5),
    "o": (32, 512, 3),
    "gated": (64, 128, 3),
    "down": (32, 256, 6),
    "head": (64, 128, 5),
}
FULL = 128  # programs that keep all of such a GPU's processors reading
SHARED = 200 * 1024  # bytes of a processor's own memory that the stages of a tile may take


class Block(NamedTuple):
    """Nodes of B texts, and where they stand."""

    real: Tensor  # [1] nodes that belong to the text; guesses follow
    lengths: Tensor  # [B] slots before the block
    depths: Tensor  # [B, N] of the whole block
    ancestors: Tensor  # [B, N] as bits
    nodes: int  # of a text to compute
    before: int = 0  # nodes of the block that were computed before these

    @property
    def texts(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        return self.texts * self.nodes


class KVSplits(NamedTuple):
    """Which rows of the cache a pass reads, and in how many stretches of how many blocks."""

    first: int
    splits: int
    blocks: int

    @staticmethod
    def over(first: int, live: int) -> KVSplits:
        blocks = 1 if live <= SHORT else 4
        needed, splits = -(-live // (blocks * BLOCK)), 1
        while splits < needed:
            splits *= 4  # in few steps: each is a recording of its own
        return KVSplits(first, splits, blocks)


class CudaLayers:
    def __init__(self, shape: LlamaSpec, cache: KVCache, turns: tuple[Tensor, Tensor]) -> None:
        """`turns`: cosines and sines [slots, width]."""
        try:
            from draftahead.backends.cuda import kernels
        except Exception as problem:  # not installed, or not for this machine
            raise UnsupportedSpecError(
                f"Triton does not load: {problem}", faster="install triton"
            ) from problem
        self.kernels, self.shape, self.cache = kernels, shape, cache
        self.device, self.dtype = cache.keys[0].device, cache.keys[0].dtype
        self._check()
        self._shared = SHARED
        if (room := device_of(self.device).shared_memory()) is not None:
            self._shared = min(SHARED, room - 8 * 1024)
        rows, make = MOST_ROWS, self.empty
        self.x, self.middle, self.scaled = (make(rows, shape.hidden_size) for _ in range(3))
        self.qkv = make(rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        self.mixed = make(rows, shape.num_heads * shape.head_dim)
        self.inner = make(rows, shape.intermediate_size)
        self.logits = make(rows, shape.vocab_size)
        tiles = [
            self._tile(name, 1, shape.hidden_size, shape.hidden_size) for name in ("o", "down")
        ]
        self.parts = power_of_two(-(-shape.hidden_size // min(tile["BLOCK_N"] for tile in tiles)))
        # Of each tile of the vocabulary: the largest logit, its place, and all of them beside it.
        most = rows, -(-shape.vocab_size // 16)
        self.tops = torch.empty(most, device=self.device)
        self.places = torch.empty(most, dtype=torch.int32, device=self.device)
        self.sums = torch.empty(most, device=self.device)
        # float16 has little room above: what is scaled for a norm is kept small meanwhile.
        self.shift = 1.0 if self.dtype == torch.bfloat16 else 2.0**-6
        # Programs write their own partial sum; what no program owns stays 0.
        self.squares = torch.zeros(2, rows, self.parts, device=self.device)
        self.cos, self.sin = (turn.to(self.dtype).contiguous() for turn in turns)

    def empty(self, *size: int) -> Tensor:
        return torch.empty(*size, dtype=self.dtype, device=self.device)

    def _check(self) -> None:
        s, kind = self.shape, self.device.type
        require(self.dtype in (torch.bfloat16, torch.float16), "not half precision")
        require(s.head_dim in (32, 64, 128, 256), f"heads of width {s.head_dim}")
        widths = (
            s.hidden_size,
            s.num_heads * s.head_dim,
            s.num_kv_heads * s.head_dim,
            s.intermediate_size,
        )
        require(all(width % 64 == 0 for width in widths), "odd widths")
        for layer in s.layers:
            for name, linear in layer.linears.items():
                require(type(linear) is nn.Linear, "linear layers")
                require(is_plain(linear.weight, self.dtype, kind), "weights of another kind")
                require(linear.bias is None or name in "qkv", "biases")
            biases = {layer.linears[name].bias is None for name in "qkv"}
            require(len(biases) == 1, "a bias here and none there")
            require((layer.q_norm is None) == (layer.k_norm is None), "one norm of two")
        require(type(s.lm_head) is nn.Linear and s.lm_head.bias is None, "head")
        require(is_plain(s.lm_head.weight, self.dtype, kind), "head")

    def run(
        self,
        block: Block,
        reach: KVSplits,
        *,
        seen: Tensor | None = None,
        out: Tensor | None = None,
        shown: Callable[[int], None] = lambda _: None,
    ) -> None:
        """All layers over what lies in `x`, normed in `scaled` and `squares`; or over `seen`, what
        the first layer looks at, with `x` for its residual. The result is in `x` or `out`, and
        normed for the vocabulary in `scaled` and `squares`. `shown`: called after every layer."""
        s, count = self.shape, block.rows
        heads = s.num_heads * reach.splits * count
        scratch = [
            torch.empty(size, device=self.device) for size in (heads * s.head_dim, heads, heads)
        ]
        norms = [*(layer.input_norm for layer in s.layers[1:]), s.final_norm]
        for index, (layer, next_norm) in enumerate(zip(s.layers, norms, strict=True)):
            part, is_last = layer.linears, index == len(s.layers) - 1
            source = seen if seen is not None and index == 0 else self.scaled
            qkv = [part["q"], part["k"], part["v"]]
            self.linear("qkv", qkv, source, self.qkv, count, squares=0,
                        normed=source is self.scaled)  # fmt: skip
            self._attend(index, layer, block, reach, scratch)
            self.linear("o", [part["o"]], self.mixed, self.middle, count, squares=1,
                        add=self.x, norm=layer.post_attention_norm)  # fmt: skip
            self._gated(layer, count)
            result = out if out is not None and is_last else self.x
            self.linear("down", [part["down"]], self.inner, result, count, squares=0,
                        add=self.middle, norm=next_norm)  # fmt: skip
            shown(index + 1)

    def vocabulary(self, count: int, *, sums: bool = False) -> tuple[int, int]:
        """Logits of so many rows, and the largest of each tile, with `sums` also how much all of a
        tile are; returns the number of tiles and the size of one."""
        s = self.shape
        self.linear("head", [s.lm_head], self.scaled, self.logits, count, squares=0, normed=True,
                    sums=sums)  # fmt: skip
        size = int(self._tile("head", count, s.vocab_size, s.hidden_size)["BLOCK_N"])
        return -(-s.vocab_size // size), size

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
        """With `normed`, `squares` says where the sums of x lie; with something to `add`, where
        those of the next `norm` go."""
        weights = [linear.weight for linear in linears]
        out, in_ = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        three = weights + weights[:1] * (3 - len(weights))
        has_bias = linears[0].bias is not None
        biases = [linear.bias for linear in linears] if has_bias else three
        tile = self._tile(name, count, out, in_)
        self.launch(
            self.kernels.linear, -(-out // tile["BLOCK_N"]),
            x, self.squares[squares], self.shape.norm_eps, *three, *biases,
            three[0].shape[0], three[1].shape[0], y, x if add is None else add,
            three[0] if norm is None else norm, self.scaled, self.squares[squares],
            self.tops, self.places, self.sums, count,
            IN=in_, OUT=out, PARTS=self.parts, SHIFT=self.shift, NORMED=normed,
            SEGMENTS=len(weights), BIAS=has_bias, RESIDUAL=add is not None, BEST=name == "head",
            SUMS=sums, **tile,
        )  # fmt: skip

    def _gated(self, layer: LayerSpec, count: int) -> None:
        s, tile = (
            self.shape,
            self._tile("gated", count, self.shape.intermediate_size, self.shape.hidden_size),
        )
        self.launch(
            self.kernels.gated, -(-s.intermediate_size // tile["BLOCK_N"]),
            self.scaled, self.squares[1], s.norm_eps, layer.linears["gate"].weight,
            layer.linears["up"].weight, self.inner, count,
            IN=s.hidden_size, OUT=s.intermediate_size, PARTS=self.parts, SHIFT=self.shift,
            SILU=s.activation == 0, **tile,
        )  # fmt: skip

    def _attend(
        self, index: int, layer: LayerSpec, block: Block, reach: KVSplits, scratch: list[Tensor]
    ) -> None:
        s, cache, nodes = self.shape, self.cache, block.nodes
        asked = s.num_heads // s.num_kv_heads * nodes
        queries = min(64, max(16, power_of_two(asked)))
        norms = (
            (s.final_norm, s.final_norm) if layer.q_norm is None else (layer.q_norm, layer.k_norm)
        )
        self.launch(
            self.kernels.attend,
            (block.texts * s.num_kv_heads, reach.splits, -(-asked // queries)),
            self.qkv, cache.keys[index], cache.values[index], self.cos, self.sin, *norms,
            s.norm_eps,
            block.real, block.lengths, block.depths, block.ancestors, reach.first,
            cache.num_entries - 1, self.mixed, *scratch, nodes, block.before, block.depths.shape[1],
            cache.num_entries, layer.scaling, layer.sliding_window or 1 << 30,
            HEADS=s.num_heads, KEY_HEADS=s.num_kv_heads, WIDTH=s.head_dim,
            HEAD_NORM=layer.q_norm is not None, QUERIES=queries, BLOCK=BLOCK,
            BLOCKS=reach.blocks, SPLITS=reach.splits,
        )  # fmt: skip
        if reach.splits > 1:
            self.launch(
                self.kernels.combine, block.rows * s.num_heads, self.mixed, *scratch,
                WIDTH=s.head_dim, SPLITS=reach.splits,
            )  # fmt: skip

    def _tile(self, name: str, count: int, out: int, in_: int) -> dict[str, Any]:
        rows = max(16, power_of_two(count))
        block_n, block_k, stages = TILES[name]
        while block_n > 16 and out < FULL * block_n:
            block_n //= 2
        loaded = block_n * (2 if name == "gated" else 1) + rows
        while stages * loaded * block_k * 2 > self._shared:
            stages, block_k = (stages - 1, block_k) if stages > 2 else (stages, block_k // 2)
        return {
            "ROWS": rows,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "EVEN": in_ % block_k == 0,
            "num_warps": 4,
            "num_stages": stages,
        }

    def launch(self, kernel: Any, grid: int | tuple[int, ...], *args: Any, **options: Any) -> None:
        grid = (grid,) if isinstance(grid, int) else grid
        kernel[grid](*args, **options)


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
