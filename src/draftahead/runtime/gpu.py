"""A pass of a llama-shaped decoder on a GPU: our Triton kernels, replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.kvcache import KVCache
from draftahead.runtime.graphs import Graphs, Inputs
from draftahead.runtime.shape import (
    LayerParts,
    LlamaShape,
    NotThisShapeError,
    Place,
    Scored,
    is_plain,
    require,
)

MOST_NODES = 64  # of a text: ancestors are the bits of one word
MOST_ROWS = 128  # of all nodes of a pass
BLOCK = 64  # keys that the attention takes at a time; a program takes one or four such blocks
SHORT = 1024  # keys up to which it takes one
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
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


class GpuDecoder:
    """A recognised model, bound to one cache."""

    bit_stable = False  # the attention's stretches depend on how much is read
    tolerance = 0.1  # two ways of rounding to half precision

    def __init__(self, shape: LlamaShape, cache: KVCache) -> None:
        try:
            from draftahead.runtime import gpu_kernels
        except Exception as problem:  # not installed, or not for this machine
            raise NotThisShapeError(f"Triton does not load: {problem}") from problem
        self.kernels, self.shape, self.cache = gpu_kernels, shape, cache
        self.device, self.dtype = cache.keys[0].device, cache.keys[0].dtype
        self._check()
        self.graphs = Graphs(self.device, type(shape.model).__name__)
        limits = torch.cuda.get_device_properties(self.device)
        room = getattr(limits, "shared_memory_per_block_optin", 99 * 1024)
        self._shared = min(SHARED, room - 8 * 1024)
        rows, make = MOST_ROWS, self._empty
        self.x, self.middle, self.scaled = (make(rows, shape.hidden) for _ in range(3))
        self.qkv = make(rows, (shape.heads + 2 * shape.key_heads) * shape.width)
        self.mixed = make(rows, shape.heads * shape.width)
        self.inner = make(rows, shape.inner)
        self.logits = make(rows, shape.vocabulary)
        tiles = [self._tile(name, 1, shape.hidden, shape.hidden) for name in ("o", "down")]
        self.parts = _power_of_two(-(-shape.hidden // min(tile["BLOCK_N"] for tile in tiles)))
        # The largest logit of each tile of the head, and of all.
        most = rows, -(-shape.vocabulary // 16)
        self.tops = torch.empty(most, device=self.device)
        self.places = torch.empty(most, dtype=torch.int32, device=self.device)
        self.best = torch.empty(rows, dtype=torch.int64, device=self.device)
        self._watched: tuple[int, ...] = ()
        # float16 has little room above: what is scaled for a norm is kept small meanwhile.
        self.shift = 1.0 if self.dtype == torch.bfloat16 else 2.0**-6
        # Programs write their own partial sum; what no program owns stays 0.
        self.squares = torch.zeros(2, rows, self.parts, device=self.device)
        positions = torch.arange(cache.length, device=self.device)[None]
        turns = shape.rotary(self.x[:1], positions)
        self.cos, self.sin = (turn[0].to(self.dtype).contiguous() for turn in turns)

    def _empty(self, *size: int) -> Tensor:
        return torch.empty(*size, dtype=self.dtype, device=self.device)

    def _check(self) -> None:
        s, kind = self.shape, self.device.type
        require(self.dtype in (torch.bfloat16, torch.float16), "not half precision")
        rope = getattr(s.model.config, "rope_parameters", None) or {}
        require(rope.get("rope_type", "default") in ROPE_TYPES, "angles that depend on the text")
        require(s.width in (32, 64, 128, 256), f"heads of width {s.width}")
        widths = (s.hidden, s.heads * s.width, s.key_heads * s.width, s.inner)
        require(all(width % 64 == 0 for width in widths), "odd widths")
        for layer in s.layers:
            for name, linear in layer.linears.items():
                require(type(linear) is nn.Linear, "linear layers")
                require(is_plain(linear.weight, self.dtype, kind), "weights of another kind")
                require(linear.bias is None or name in "qkv", "biases")
            biases = {layer.linears[name].bias is None for name in "qkv"}
            require(len(biases) == 1, "a bias here and none there")
            require((layer.q_norm is None) == (layer.k_norm is None), "one norm of two")
        require(type(s.embed) is nn.Embedding and type(s.head) is nn.Linear, "embeddings")
        require(is_plain(s.embed.weight, self.dtype, kind), "embeddings")
        require(is_plain(s.head.weight, self.dtype, kind) and s.head.bias is None, "head")

    # ------------------------------------------------------------------------------ the pass

    def watch(self, depths: tuple[int, ...]) -> None:
        self._watched = depths
        self.states = self._empty(MOST_ROWS, len(depths), self.shape.hidden)
        self.graphs.forget()

    def _show(self, done: int, count: int) -> None:
        for place, depth in enumerate(self._watched):
            if depth == done:
                state = self.x[:count]
                if done == len(self.shape.layers):
                    state = F.rms_norm(state, state.shape[-1:], self.shape.norm, self.shape.eps)
                self.states[:count, place] = state

    def takes(self, texts: int, nodes: int, scored: bool) -> bool:
        # A prompt is bound by arithmetic, which is not what these kernels are made for.
        small = nodes <= MOST_NODES and texts * nodes <= MOST_ROWS
        return scored and small and self.graphs.works

    def run(
        self,
        tokens: Tensor,
        lengths: Seq[int],
        parents: Seq[Seq[int]] | None,
        *,
        place: Place,
        scored: bool = True,
    ) -> Scored | None:
        """Nodes [B, N] -> logits [B, N, V] and the best token after each, good until the next
        pass."""
        blocks = 1 if place.live <= SHORT else 4
        splits = _power_of_two(-(-place.live // (blocks * BLOCK)))
        body = partial(self._pass, first=place.first, splits=splits, blocks=blocks)
        key = (place.first, splits, blocks)
        found = self.graphs.run(key, body, tokens, lengths, parents, place.real)
        if found is None:
            return None
        logits, best = found
        assert logits is not None
        return Scored(logits, best)

    def _pass(
        self, inputs: Inputs, first: int, splits: int, blocks: int
    ) -> tuple[Tensor | None, ...]:
        """Every kernel of a pass, in order."""
        s, (texts, nodes) = self.shape, inputs.tokens.shape
        count = texts * nodes
        self._launch(
            self.kernels.embed, count,
            inputs.tokens, s.embed.weight, s.layers[0].input_norm, self.x, self.scaled,
            self.squares[0],
            HIDDEN=s.hidden, PARTS=self.parts, SHIFT=self.shift, BLOCK=_power_of_two(s.hidden),
        )  # fmt: skip
        heads = s.heads * splits * count
        scratch = [
            torch.empty(size, device=self.device) for size in (heads * s.width, heads, heads)
        ]
        norms = [*(layer.input_norm for layer in s.layers[1:]), s.norm]
        for index, (layer, next_norm) in enumerate(zip(s.layers, norms, strict=True)):
            part = layer.linears
            qkv = [part["q"], part["k"], part["v"]]
            self._linear("qkv", qkv, self.scaled, self.qkv, count, squares=0)
            self._attend(index, layer, inputs, (first, splits, blocks), scratch)
            self._linear("o", [part["o"]], self.mixed, self.middle, count, squares=1,
                         add=self.x, norm=layer.after_norm)  # fmt: skip
            self._gated(layer, count)
            self._linear("down", [part["down"]], self.inner, self.x, count, squares=0,
                         add=self.middle, norm=next_norm)  # fmt: skip
            self._show(index + 1, count)
        self._linear("head", [s.head], self.scaled, self.logits, count, squares=0)
        tiles = -(-s.vocabulary // self._tile("head", count, s.vocabulary, s.hidden)["BLOCK_N"])
        self._launch(
            self.kernels.pick, count, self.tops, self.places, self.best, tiles,
            BLOCK=_power_of_two(tiles),
        )  # fmt: skip
        if self._watched:
            slots = inputs.lengths[:, None] + torch.arange(nodes, device=self.device)
            states = self.states[:count].view(texts, nodes, len(self._watched), -1)
            self.cache.store(states, first, slots)
        return self.logits[:count].view(texts, nodes, -1), self.best[:count].view(texts, nodes)

    def _linear(
        self,
        name: str,
        linears: list[Any],
        x: Tensor,
        y: Tensor,
        count: int,
        *,
        squares: int,
        add: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> None:
        """Behind a norm, `squares` says where its sums lie; with something to `add`, where those of
        the next `norm` go."""
        weights = [linear.weight for linear in linears]
        out, in_ = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        three = weights + weights[:1] * (3 - len(weights))
        has_bias = linears[0].bias is not None
        biases = [linear.bias for linear in linears] if has_bias else three
        tile = self._tile(name, count, out, in_)
        self._launch(
            self.kernels.linear, -(-out // tile["BLOCK_N"]),
            x, self.squares[squares], self.shape.eps, *three, *biases,
            three[0].shape[0], three[1].shape[0], y, x if add is None else add,
            three[0] if norm is None else norm, self.scaled, self.squares[squares],
            self.tops, self.places, count,
            IN=in_, OUT=out, PARTS=self.parts, SHIFT=self.shift, NORMED=add is None,
            SEGMENTS=len(weights), BIAS=has_bias, RESIDUAL=add is not None, BEST=name == "head",
            **tile,
        )  # fmt: skip

    def _gated(self, layer: LayerParts, count: int) -> None:
        s, tile = self.shape, self._tile("gated", count, self.shape.inner, self.shape.hidden)
        self._launch(
            self.kernels.gated, -(-s.inner // tile["BLOCK_N"]),
            self.scaled, self.squares[1], s.eps, layer.linears["gate"].weight,
            layer.linears["up"].weight, self.inner, count,
            IN=s.hidden, OUT=s.inner, PARTS=self.parts, SHIFT=self.shift, SILU=s.activation == 0,
            **tile,
        )  # fmt: skip

    def _attend(
        self,
        index: int,
        layer: LayerParts,
        inputs: Inputs,
        place: tuple[int, int, int],
        scratch: list[Tensor],
    ) -> None:
        s, cache, (texts, nodes) = self.shape, self.cache, inputs.tokens.shape
        first, splits, blocks = place
        asked = s.heads // s.key_heads * nodes
        queries = min(64, max(16, _power_of_two(asked)))
        norms = (s.norm, s.norm) if layer.q_norm is None else (layer.q_norm, layer.k_norm)
        self._launch(
            self.kernels.attend, (texts * s.key_heads, splits, -(-asked // queries)),
            self.qkv, cache.keys[index], cache.values[index], self.cos, self.sin, *norms, s.eps,
            inputs.real, inputs.lengths, inputs.depths, inputs.ancestors, first, cache.length - 1,
            self.mixed, *scratch, nodes, cache.length, layer.scaling, layer.window or 1 << 30,
            HEADS=s.heads, KEY_HEADS=s.key_heads, WIDTH=s.width,
            HEAD_NORM=layer.q_norm is not None, QUERIES=queries, BLOCK=BLOCK, BLOCKS=blocks,
            SPLITS=splits,
        )  # fmt: skip
        if splits > 1:
            self._launch(
                self.kernels.combine, inputs.tokens.numel() * s.heads, self.mixed, *scratch,
                WIDTH=s.width, SPLITS=splits,
            )  # fmt: skip

    def _tile(self, name: str, count: int, out: int, in_: int) -> dict[str, Any]:
        rows = max(16, _power_of_two(count))
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

    def _launch(self, kernel: Any, grid: int | tuple[int, ...], *args: Any, **options: Any) -> None:
        grid = (grid,) if isinstance(grid, int) else grid
        kernel[grid](*args, **options)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
