"""Linear layers for a handful of rows: float32 as they are, or int8 with a scale a group."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.backends.cpu import build
from draftahead.core.device import device_of
from draftahead.errors import ConfigError

CHUNK = 64  # of weights that one instruction takes; also in kernels/linear.h
PANEL = 48  # outputs side by side; also there
MOST_GROUP = 256  # of weights that share a scale
MOST_ROWS = 24  # beyond so many float32 rows, torch's matrix product is faster


class Weights(ctypes.Structure):
    """As in kernels/linear.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("in_", ctypes.c_int64),
        ("group", ctypes.c_int64),
    )


class Int8Linear(nn.Module):
    """A linear layer whose weights are int8 in groups along the input, and whose inputs are
    rounded to int8 the same way, row by row: no row can change another."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.group = group_for(linear.in_features)
        weight, scales = quantized(linear.weight.detach(), self.group)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", packed(weight, 4))
        self.register_buffer("scales", packed(scales, 1))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return run_linear(self, x)

    def dequantized(self) -> Tensor:
        """[out, in] float32: what the integers stand for."""
        out, width = self.out_features, self.in_features
        whole = unpacked(self.weight, out).view(out, -1, self.group).float() - 128
        return (whole * unpacked(self.scales, out)[..., None]).view(out, width)

    def rows(self, ids: Tensor) -> Int8Linear:
        """The same for some of the outputs."""
        part = copy.copy(self)
        part.out_features = len(ids)
        part._buffers = {
            "weight": packed(unpacked(self.weight, self.out_features)[ids], 4),
            "scales": packed(unpacked(self.scales, self.out_features)[ids], 1),
            "bias": None if self.bias is None else self.bias[ids],
        }
        return part


def group_for(width: int) -> int:
    """The most chunks, up to 256 weights, that divide a row: a scale costs time, few cost bits."""
    return max(size for size in range(CHUNK, MOST_GROUP + 1, CHUNK) if width % size == 0)


def quantized(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[out, in] float -> uint8 [out, in] (value + 128) and scales [out, in / group]."""
    out, width = weight.shape
    groups = weight.float().view(out, width // group, group)
    scales = groups.abs().amax(-1) / 127
    whole = (groups / scales.clamp(min=1e-30)[..., None]).round().clamp(-127, 127)
    return (whole + 128).to(torch.uint8).view(out, width), scales


def packed(matrix: Tensor, together: int) -> Tensor:
    """[out, in] -> [panels, in / together, PANEL, together]: some rows side by side, as the kernels
    read them, a few columns of each at a time. Zeros where the last panel has no row."""
    out, width = matrix.shape
    padded = F.pad(matrix, (0, 0, 0, -out % PANEL))
    return padded.view(-1, PANEL, width // together, together).transpose(1, 2).contiguous()


def unpacked(panels: Tensor, out: int) -> Tensor:
    """What was packed, [out, in]."""
    return panels.transpose(1, 2).reshape(len(panels) * PANEL, -1)[:out]


def quantize_model(model: Any) -> None:
    """Puts an Int8Linear in place of every linear layer, the head included."""
    if build.library() is None:
        raise ConfigError(f"int8 needs our CPU kernels, and they are missing: {build.problem()}")
    if not device_of(model.device).is_cpu:
        raise ConfigError("quantize='int8' works on the CPU; leave it out on a GPU")
    if not round_linears(model):
        raise ConfigError(f"{type(model).__name__} has no linear layer that int8 could take")


def round_linears(module: nn.Module) -> int:
    """Puts an Int8Linear in place of every linear layer that it can stand for, and counts them."""
    found = 0
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear and child.in_features % CHUNK == 0:
                setattr(part, name, Int8Linear(child))
                found += 1
    return found


def describe(layer: Any) -> Weights:
    """A layer's weights for the kernels. The layer must outlive the description."""
    scales = getattr(layer, "scales", None)
    return Weights(
        layer.weight.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if layer.bias is None else layer.bias.data_ptr(),
        layer.out_features,
        layer.in_features,
        0 if scales is None else layer.group,
    )


def fits(layer: Any) -> bool:
    """Whether the kernels can take this layer."""
    if type(layer) is Int8Linear:
        return True
    plain = type(layer) is nn.Linear and layer.weight.dtype == torch.float32
    return plain and layer.weight.is_contiguous() and device_of(layer.weight.device).is_cpu


def run_linear(layer: Any, x: Tensor) -> Tensor:
    """layer(x) by our kernels."""
    library = build.library()
    assert library is not None
    shape, x = x.shape, x.reshape(-1, x.shape[-1]).float().contiguous()
    rows = x.shape[0]
    y = torch.empty(rows, layer.out_features)
    weights = describe(layer)
    groups = layer.in_features // layer.group if weights.scales else 0
    q = torch.empty(rows * layer.in_features if groups else 0, dtype=torch.int8)
    scales = torch.empty(rows * groups)
    start = torch.empty(rows * groups, dtype=torch.int32)
    library.draftahead_linear(
        ctypes.byref(weights),
        x.data_ptr(),
        rows,
        y.data_ptr(),
        build.threads(),
        q.data_ptr(),
        scales.data_ptr(),
        start.data_ptr(),
    )
    return y.view(*shape[:-1], layer.out_features)


def rows_of(layer: Any, ids: Tensor) -> Any:
    """A layer that computes some of the outputs of another, from a copy of their weights."""
    if type(layer) is Int8Linear:
        return layer.rows(ids)
    part = copy.copy(layer)
    part._parameters = {
        name: None if held is None else nn.Parameter(held.detach()[ids], requires_grad=False)
        for name, held in layer._parameters.items()
    }
    part.out_features = len(ids)
    return part


class SmallRowLinears:
    """While entered, the float32 linear layers of a model run by our kernels where that is
    faster. The model itself is not changed."""

    def __init__(self, model: Any) -> None:
        found = [m for m in model.modules() if type(m) is nn.Linear and fits(m)]
        usable = found if build.library() is not None else []
        self.enabled = True
        self._forwards = [(module, self._forward_of(module)) for module in usable]

    @staticmethod
    def _forward_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if x.numel() > MOST_ROWS * layer.in_features:
                return F.linear(x, layer.weight, layer.bias)
            return run_linear(layer, x)

        return forward

    def __enter__(self) -> None:
        if not self.enabled:
            return
        for module, forward in self._forwards:
            # Past nn.Module's slower way of setting; what its owner has patched stays.
            module.__dict__.setdefault("forward", forward)

    def __exit__(self, *_: object) -> None:
        for module, forward in self._forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
