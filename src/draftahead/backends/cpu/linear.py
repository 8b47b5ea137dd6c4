"""Linear layers for few tokens: float32 as they are, or int8 with a scale per group of weights."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.backends.cpu import abi, build
from draftahead.backends.cpu.abi import CHUNK, PANEL
from draftahead.backends.cpu.threads import num_threads
from draftahead.backends.modules import patched_forwards
from draftahead.core.device import device_of
from draftahead.errors import ConfigError

# Most weights that share a scale: larger groups are less exact, smaller ones take longer.
MAX_GROUP = 256
# Tokens up to which our float32 kernel is faster than torch's matrix product.
MAX_TOKENS_FLOAT32 = 24


# ------------------------------------------------------------------------------------------ int8


class Int8Linear(nn.Module):
    """A linear layer whose weights are int8 in groups along the input, packed for our kernels. Its
    inputs are quantized the same way, each token for itself: no token can change another's result.
    """

    weight: Tensor  # uint8, packed [panels, in / 4, PANEL, 4]: the int8 value plus 128
    scales: Tensor  # float32, packed [panels, in / group_size, PANEL, 1]
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.group_size = group_size_for(linear.in_features)
        weight, scales = quantize(linear.weight.detach(), self.group_size)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", pack(weight, 4))
        self.register_buffer("scales", pack(scales, 1))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return run_linear(self, x)

    def dequantized(self) -> Tensor:
        """[out, in] float32: the weights that the integers stand for."""
        out, in_ = self.out_features, self.in_features
        integers = unpack(self.weight, out).view(out, -1, self.group_size).float() - 128
        return (integers * unpack(self.scales, out)[..., None]).view(out, in_)

    def subset(self, ids: Tensor) -> Int8Linear:
        """A copy with some of the outputs only: ids [M]."""
        subset = copy.copy(self)
        subset.out_features = len(ids)
        subset._buffers = {
            "weight": pack(unpack(self.weight, self.out_features)[ids], 4),
            "scales": pack(unpack(self.scales, self.out_features)[ids], 1),
            "bias": None if self.bias is None else self.bias[ids],
        }
        return subset


def group_size_for(in_features: int) -> int:
    """The largest multiple of CHUNK, up to MAX_GROUP, that divides the inputs."""
    sizes = range(CHUNK, MAX_GROUP + 1, CHUNK)
    return max(size for size in sizes if in_features % size == 0)


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """[out, in] float -> uint8 [out, in] (int8 value + 128) and scales [out, in / group_size]."""
    out, in_ = weight.shape
    groups = weight.float().view(out, in_ // group_size, group_size)
    scales = groups.abs().amax(-1) / 127
    integers = (groups / scales.clamp(min=1e-30)[..., None]).round().clamp(-127, 127)
    return (integers + 128).to(torch.uint8).view(out, in_), scales


def pack(matrix: Tensor, adjacent: int) -> Tensor:
    """[out, in] -> [panels, in / adjacent, PANEL, adjacent]: PANEL outputs side by side, `adjacent`
    inputs of each at a time, as the kernels read them. The last panel is padded with zeros."""
    in_ = matrix.shape[1]
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    return padded.view(-1, PANEL, in_ // adjacent, adjacent).transpose(1, 2).contiguous()


def unpack(panels: Tensor, out: int) -> Tensor:
    """The inverse of `pack`: [out, in]."""
    return panels.transpose(1, 2).reshape(len(panels) * PANEL, -1)[:out]


def quantize_model(model: Any) -> None:
    """Quantizes a model's linear layers, the LM head included: see quantize_linears."""
    if build.library() is None:
        raise ConfigError(f"int8 needs our CPU kernels, and they are missing: {build.problem()}")
    if not device_of(model.device).is_cpu:
        raise ConfigError("quantize='int8' works on the CPU; leave it out on a GPU")
    if not quantize_linears(model):
        raise ConfigError(f"{type(model).__name__} has no linear layer that int8 could take")


def quantize_linears(module: nn.Module) -> int:
    """Replaces the linear layers whose `in_features` are a multiple of CHUNK by Int8Linear; returns
    how many."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.in_features % CHUNK == 0:
                setattr(parent, name, Int8Linear(child))
                count += 1
    return count


# --------------------------------------------------------------------------------- for the kernels


def is_supported(layer: Any) -> bool:
    """Whether the kernels take this layer."""
    if type(layer) is Int8Linear:
        return True
    is_float32 = type(layer) is nn.Linear and layer.weight.dtype == torch.float32
    return is_float32 and layer.weight.is_contiguous() and device_of(layer.weight.device).is_cpu


def weights_of(layer: Any) -> abi.Weights:
    """A supported layer's weights for the kernels. The layer must outlive what is returned."""
    scales = getattr(layer, "scales", None)
    return abi.Weights(
        data=layer.weight.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        bias=None if layer.bias is None else layer.bias.data_ptr(),
        out_features=layer.out_features,
        in_features=layer.in_features,
        group_size=0 if scales is None else layer.group_size,
    )


def run_linear(layer: Any, x: Tensor) -> Tensor:
    """layer(x) by our kernels: x [..., in] -> [..., out]."""
    library = build.library()
    assert library is not None
    shape, x = x.shape, x.reshape(-1, x.shape[-1]).float().contiguous()
    num_tokens = x.shape[0]
    y = torch.empty(num_tokens, layer.out_features)
    weights = weights_of(layer)
    groups = layer.in_features // layer.group_size if weights.scales else 0
    quantized = torch.empty(num_tokens * layer.in_features if groups else 0, dtype=torch.int8)
    scales = torch.empty(num_tokens * groups)
    corrections = torch.empty(num_tokens * groups, dtype=torch.int32)
    library.draftahead_linear(
        ctypes.byref(weights),
        x.data_ptr(),
        num_tokens,
        y.data_ptr(),
        num_threads(),
        quantized.data_ptr(),
        scales.data_ptr(),
        corrections.data_ptr(),
    )
    return y.view(*shape[:-1], layer.out_features)


def output_subset(layer: Any, ids: Tensor) -> Any:
    """A copy of a linear layer with some of its outputs only: ids [M]."""
    if type(layer) is Int8Linear:
        return layer.subset(ids)
    subset = copy.copy(layer)
    subset._parameters = {
        name: None if p is None else nn.Parameter(p.detach()[ids], requires_grad=False)
        for name, p in layer._parameters.items()
    }
    subset.out_features = len(ids)
    return subset


class SmallBatchLinears:
    """Runs a module's float32 linear layers by our kernels where they are faster than torch."""

    def __init__(self, module: Any) -> None:
        linears = [m for m in module.modules() if type(m) is nn.Linear and is_supported(m)]
        if build.library() is None:
            linears = []
        self.enabled = True
        self._forwards = [(linear, _small_batch_forward(linear)) for linear in linears]

    def patched(self) -> AbstractContextManager[None]:
        """While entered, the layers run by our kernels, except those that the user has patched."""
        if not self.enabled:
            return nullcontext()
        return patched_forwards([pair for pair in self._forwards if "forward" not in vars(pair[0])])


def _small_batch_forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if x.numel() > MAX_TOKENS_FLOAT32 * linear.in_features:
            return F.linear(x, linear.weight, linear.bias)
        return run_linear(linear, x)

    return forward
