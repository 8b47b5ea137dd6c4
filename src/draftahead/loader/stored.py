"""Layers over weights as they are stored in a file: bytes of GGUF blocks or half-precision numbers,
mapped and never widened as a whole. Kernels read the bytes; without kernels the layers compute in
float32 from slices that are widened one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Weights per block and bytes per block, by the GGUF names of the formats. A row is whole blocks.
STORED_KINDS: dict[str, tuple[int, int]] = {
    "BF16": (1, 2),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# How kernels multiply quantized weights, and what that does to the numbers.
ACTIVATIONS = {
    "float32": "the bits of widened weights",
    "int24": "fixed point of 24 bits, as exact as float32",
    "int8": "rounded to 8 bits as by llama.cpp, so some tokens differ from those of the others",
}
# Weights that are widened at a time: more need more memory (4 bytes each, and as much again while
# they are unpacked), fewer make more calls of torch per layer.
SLICE_WEIGHTS = 1 << 21
NOT_WIDENED = "its weights are kept as they are stored ({}); dtype='float32' widens them at load"


class Origin(NamedTuple):
    """The tensor of a file that holds a layer's weights. Rows may be in another order there."""

    path: Path
    name: str
    is_mapped: bool = True  # whether the rows are the file's own bytes, mapped; else a copy


def row_bytes(kind: str, num_weights: int) -> int:
    """Of a row of so many weights."""
    per_block, block_bytes = STORED_KINDS[kind]
    if num_weights <= 0 or num_weights % per_block:
        raise ValueError(f"a row of {num_weights} weights is no whole number of {kind} blocks")
    return num_weights // per_block * block_bytes


# --------------------------------------------------------------------------------- dequantization


def dequantize(rows: Tensor, kind: str) -> Tensor:
    """uint8 [n, row_bytes] -> float32 [n, weights of a row]: the numbers that the `gguf` package
    gives, bit for bit. Products and sums are rounded one by one, in its order."""
    if kind == "BF16":
        return rows.view(torch.bfloat16).float()
    if kind == "F16":
        return rows.view(torch.float16).float()
    per_block, block_bytes = STORED_KINDS[kind]
    if not len(rows):
        return rows.new_empty(0, rows.shape[1] // block_bytes * per_block, dtype=torch.float32)
    blocks = rows.view(len(rows), -1, block_bytes)
    return _DEQUANTIZE[kind](blocks).reshape(len(rows), -1)


def dequantize_some(rows: Tensor, ids: Tensor, kind: str) -> Tensor:
    """The rows `ids` [M] of uint8 [n, row_bytes] -> float32 [M, weights of a row]."""
    return dequantize(rows.index_select(0, ids), kind)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half-precision number at a byte of each block: [..., 1]."""
    return blocks[..., at : at + 2].view(torch.float16).float()


def _split(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return x.view(*x.shape[:-1], *sizes)


def _bits(packed: Tensor, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Numbers of a few bits: of each `width` bytes first those at the first shift. [..., n] ->
    [..., n * len(shifts)] uint8."""
    by_shift = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
    grouped = _split(packed, -1, 1, width)
    return ((grouped >> by_shift) & mask).flatten(-3)


def _five_bits(blocks: Tensor, high_at: int) -> Tensor:
    """Q5_0 and Q5_1: 4 bytes with a high bit of each of 32 weights, then 16 bytes of low ones."""
    low = _bits(blocks[..., high_at + 4 :], 16, (0, 4), 15)
    return low | (_bits(blocks[..., high_at : high_at + 4], 1, tuple(range(8)), 1) << 4)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_bits(blocks[..., 2:], 16, (0, 4), 15).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _bits(blocks[..., 4:], 16, (0, 4), 15).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks, 4).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].view(torch.int8).float() * _half(blocks, 0)


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K and Q5_K: the scale and the minimum of each 32 weights, [..., 8, 1] each. Bytes 4 to 15
    hold 6 bits of each: of the first four of both in one byte, of the others in two."""
    scale, least, rest = _split(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([scale & 63, (rest & 15) | ((scale >> 2) & 48)], -1)
    mins = torch.cat([least & 63, (rest >> 4) | ((least >> 2) & 48)], -1)
    scaled = _half(blocks, 0) * scales.float(), _half(blocks, 2) * mins.float()
    return scaled[0][..., None], scaled[1][..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(blocks)
    quants = _bits(blocks[..., 16:], 32, (0, 4), 15).float()
    return (scales * _split(quants, 8, 32) - mins).flatten(-2)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, mins = _scales_and_mins(blocks)
    high = _bits(blocks[..., 16:48], 32, tuple(range(8)), 1)
    quants = (_bits(blocks[..., 48:], 32, (0, 4), 15) | (high << 4)).float()
    return (scales * _split(quants, 8, 32) - mins).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = (_half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float())[..., None]
    low = _bits(blocks[..., :128], 64, (0, 4), 15)
    high = _bits(blocks[..., 128:192], 32, (0, 2, 4, 6), 3)
    quants = (low | (high << 4)).float() - 32
    return (scales * _split(quants, 16, 16)).flatten(-2)


_DEQUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# ----------------------------------------------------------------------------------------- layers


class _Stored(nn.Module):
    """Rows of weights as they are stored."""

    rows: Tensor  # uint8, contiguous [rows, row_bytes]

    def __init__(self, rows: Tensor, kind: str, row_size: int, origin: Origin | None) -> None:
        super().__init__()
        expected = row_bytes(kind, row_size)
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != expected:
            raise ValueError(
                f"rows of {row_size} {kind} weights are uint8 [n, {expected}], not {rows.dtype} "
                f"{list(rows.shape)}"
            )
        self.kind, self.origin = kind, origin
        # No part of a state_dict: see _save_to_state_dict.
        self.register_buffer("rows", rows.contiguous(), persistent=False)

    def dequantized(self, ids: Tensor | None = None) -> Tensor:
        """float32 [rows, weights of a row], or of the given rows only: ids [M]."""
        if ids is not None:
            return dequantize(self.rows[ids.to(self.rows.device)], self.kind)
        size = self._rows_per_slice()
        if len(self.rows) <= size:
            return dequantize(self.rows, self.kind)
        widened = torch.empty(
            len(self.rows), self._row_size(), dtype=torch.float32, device=self.rows.device
        )
        for start in range(0, len(self.rows), size):
            widened[start : start + size] = dequantize(self.rows[start : start + size], self.kind)
        return widened

    def _row_size(self) -> int:
        per_block, block_bytes = STORED_KINDS[self.kind]
        return self.rows.shape[1] // block_bytes * per_block

    def _rows_per_slice(self) -> int:
        return max(1, SLICE_WEIGHTS // self._row_size())

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            stated = f"{type(self).__name__} has no float weights: {NOT_WIDENED}"
            raise AttributeError(stated.format(self.kind))
        return super().__getattr__(name)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """As of a layer of torch: bytes would look like a saved model and could not be loaded."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.dequantized()
        if (bias := self._buffers.get("bias")) is not None:
            destination[f"{prefix}bias"] = bias


class StoredLinear(_Stored):
    """A linear layer over stored rows, one row per output."""

    bias: Tensor | None  # float32

    def __init__(
        self,
        rows: Tensor,
        kind: str,
        in_features: int,
        *,
        bias: Tensor | None = None,
        origin: Origin | None = None,
    ) -> None:
        super().__init__(rows, kind, in_features, origin)
        self.in_features, self.out_features = in_features, len(rows)
        # How our kernels multiply: see backends/cpu/panels.py.
        self.activations = "float32"
        if bias is not None and bias.shape != (len(rows),):
            raise ValueError(f"a bias of shape {list(bias.shape)} for {len(rows)} outputs")
        bias = None if bias is None else bias.detach().float()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], computed in float32."""
        size, inputs = self._rows_per_slice(), x.float()
        outputs = [
            F.linear(inputs, dequantize(self.rows[start : start + size], self.kind))
            for start in range(0, self.out_features, size)
        ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    def zeros(self, x: Tensor) -> Tensor:
        """What forward returns, without its numbers: for shapes."""
        return x.new_zeros(*x.shape[:-1], self.out_features)

    def subset(self, ids: Tensor) -> StoredLinear:
        """A copy with some of the outputs only: ids [M]."""
        ids = ids.to(self.rows.device)
        subset = copy.copy(self)
        subset.out_features, subset.origin = len(ids), None
        subset._buffers = {
            "rows": self.rows[ids],
            "bias": None if self.bias is None else self.bias[ids],
        }
        return subset

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.kind}"


class StoredEmbedding(_Stored):
    """An embedding over stored rows: a forward widens those that are asked for."""

    def __init__(
        self,
        rows: Tensor,
        kind: str,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        origin: Origin | None = None,
    ) -> None:
        super().__init__(rows, kind, embedding_dim, origin)
        self.num_embeddings, self.embedding_dim = len(rows), embedding_dim
        self.padding_idx = padding_idx
        # How rows become float32: our kernels may take the place of torch, see backends/cpu.
        self.widen: Callable[[Tensor, Tensor, str], Tensor] = dequantize_some

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> float32 [..., embedding_dim]."""
        widened = self.widen(self.rows, ids.reshape(-1), self.kind)
        return widened.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.kind}"


def weight_of(layer: Any, ids: Tensor | None = None) -> Tensor:
    """The weights of a linear layer or embedding as numbers, or the rows `ids` [M] of them: a copy
    in float32 of stored ones."""
    if isinstance(layer, _Stored):
        return layer.dequantized(ids)
    weight: Tensor = layer.weight
    return weight if ids is None else weight[ids]


def widened(layer: Any) -> Any:
    """A float32 layer of torch in place of a stored one; others as they are."""
    if not isinstance(layer, StoredLinear):
        return layer
    has_bias = layer.bias is not None
    linear = nn.Linear(layer.in_features, layer.out_features, bias=has_bias, device="meta")
    linear.weight = nn.Parameter(layer.dequantized(), requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.float(), requires_grad=False)
    return linear.train(layer.training)


def float_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What state_dict holds, one tensor at a time, because those of stored layers are made for it;
    tied ones once."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        stored = module.get_submodule(owner)
        if leaf == "rows" and isinstance(stored, _Stored):
            yield (f"{owner}.weight" if owner else "weight"), stored.dequantized()
        else:
            yield name, tensor


def stored_layers(model: nn.Module) -> list[StoredLinear | StoredEmbedding]:
    """The layers of a model that keep their weights as they are stored."""
    return [m for m in model.modules() if isinstance(m, StoredLinear | StoredEmbedding)]
