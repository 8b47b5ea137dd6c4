"""Linear layers by our kernels: float32, as a file stores them, or int8 with a scale per group."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.backends.base import UnsupportedSpecError, kernels_can_read, require
from draftahead.backends.cpu import abi, build
from draftahead.backends.cpu.abi import CHUNK, PANEL
from draftahead.backends.cpu.addresses import Addresses
from draftahead.backends.cpu.panels import panels_of, prepare_panels
from draftahead.backends.cpu.threads import (
    num_threads,
    torch_all_threads,
    torch_single_threaded,
)
from draftahead.backends.modules import patched_forwards
from draftahead.backends.own_code import autocast_of, has_own_forward
from draftahead.core.device import device_of
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.loader.progress import ProgressCallback
from draftahead.loader.stored import STORED_KINDS, StoredEmbedding, StoredLinear, dequantize_some

# Most weights that share a scale: larger groups are less exact, smaller ones take longer.
MAX_GROUP = 256
# Tokens up to which our float32 kernel is faster than torch's matrix product.
MAX_TOKENS_FLOAT32 = 24
# Tokens of a forward of the model's own up to which torch takes one thread beside our products. Of
# more, its attention over a prompt would be slow; of fewer, its threads cost more than they bring.
FEW_TOKENS = 64


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
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        try:
            return run_linear(self, x)
        except UnsupportedSpecError as problem:
            raise UnsupportedModelError(f"an int8 layer cannot run: {problem}") from problem

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
            if type(child) is nn.Linear and _can_be_quantized(child):
                setattr(parent, name, Int8Linear(child).train(child.training))
                count += 1
    return count


def _can_be_quantized(linear: nn.Linear) -> bool:
    weight = linear.weight
    is_plain = weight.is_floating_point() and kernels_can_read(weight, weight.dtype, "cpu")
    return is_plain and weight.numel() > 0 and linear.in_features % CHUNK == 0


# ---------------------------------------------------------------------------------- as files store


def choose_arithmetic(model: Any, activations: str | None, report: ProgressCallback) -> None:
    """How the kernels multiply a model's quantized weights: see LLMConfig.activations. None: with
    inputs of 24 bits, where there are kernels."""
    layers = [m for m in model.modules() if type(m) is StoredLinear and m.kind.startswith("Q")]
    if not layers and activations not in (None, "float32"):
        raise ConfigError(
            f"activations={activations!r} is for quantized weights, as a .gguf file has them; "
            "leave it out"
        )
    if layers and build.library() is None:
        if activations not in (None, "float32"):
            raise ConfigError(
                f"activations={activations!r} needs our CPU kernels, and they are missing: "
                f"{build.problem()}"
            )
        activations = "float32"
    for layer in layers:
        layer.activations = activations or "int24"
    for embedding in (m for m in model.modules() if type(m) is StoredEmbedding):
        # Rows in half precision are one operation of torch, which is faster.
        by_kernels = build.library() is not None and embedding.kind.startswith("Q")
        embedding.widen = widen_rows if by_kernels else dequantize_some
    prepare_panels(model, report)


# --------------------------------------------------------------------------------- for the kernels


def weights_of(
    layer: Any,
    addresses: Addresses,
    name: str,
    out_features: int | None = None,
    in_features: int | None = None,
) -> abi.Weights:
    """A linear layer for the kernels, of the given size. Raises UnsupportedSpecError if they do not
    support it."""
    known = type(layer) in (nn.Linear, Int8Linear, StoredLinear)
    require(known, f"{name} is no nn.Linear, Int8Linear or StoredLinear")
    out = layer.out_features if out_features is None else out_features
    in_ = layer.in_features if in_features is None else in_features
    size = (layer.out_features, layer.in_features)
    require(size == (out, in_), f"{name} has size {size}, not {(out, in_)}")
    weights = abi.Weights(out_features=out, in_features=in_)
    if type(layer) is StoredLinear:
        _add_stored(weights, layer, addresses, name)
    elif type(layer) is Int8Linear:
        _add_int8(weights, layer, addresses, name)
    else:
        weights.data = addresses.of(f"{name}.weight", layer.weight, out, in_)
    if layer.bias is not None:
        weights.bias = addresses.of(f"{name}.bias", layer.bias, out)
    return weights


def _add_stored(weights: abi.Weights, layer: StoredLinear, addresses: Addresses, name: str) -> None:
    _add_rows(weights, layer, addresses, name)
    panels = panels_of(layer)
    if panels is not None:
        weights.panels = addresses.of(f"{name}.panels", panels, len(panels), dtype=torch.uint8)
        weights.arithmetic = abi.ARITHMETICS.index(layer.activations)


def _add_rows(
    weights: abi.Weights, stored: StoredLinear | StoredEmbedding, addresses: Addresses, name: str
) -> None:
    per_block, block_bytes = STORED_KINDS[stored.kind]
    in_ = weights.in_features
    require(in_ % per_block == 0, f"{name} has rows of {in_} {stored.kind} weights")
    size = weights.out_features, in_ // per_block * block_bytes
    weights.data = addresses.of(f"{name}.rows", stored.rows, *size, dtype=torch.uint8)
    weights.kind = abi.KINDS.index(stored.kind)


def embeddings_of(embed: Any, addresses: Addresses, num_embeddings: int, size: int) -> abi.Weights:
    """An embedding's rows, as weights without panels. Raises UnsupportedSpecError."""
    weights = abi.Weights(out_features=num_embeddings, in_features=size)
    if type(embed) is StoredEmbedding:
        _add_rows(weights, embed, addresses, "the embedding")
    else:
        require(type(embed) is nn.Embedding, "the embedding is no nn.Embedding")
        weights.data = addresses.of("the embedding", embed.weight, num_embeddings, size)
    return weights


def _add_int8(weights: abi.Weights, layer: Int8Linear, addresses: Addresses, name: str) -> None:
    out, in_, group_size = weights.out_features, weights.in_features, layer.group_size
    panels = -(-out // PANEL)
    divides = group_size > 0 and group_size % CHUNK == 0 and in_ % group_size == 0
    require(divides, f"{name} has groups of {group_size} weights")
    packed = (panels, in_ // 4, PANEL, 4)
    weights.data = addresses.of(f"{name}.weight", layer.weight, *packed, dtype=torch.uint8)
    packed = (panels, in_ // group_size, PANEL, 1)
    weights.scales = addresses.of(f"{name}.scales", layer.scales, *packed)
    weights.kind, weights.group_size = abi.KINDS.index("INT8"), group_size


def is_supported(layer: Any) -> bool:
    """Whether the kernels take this layer."""
    try:
        weights_of(layer, Addresses(), "it")
    except UnsupportedSpecError:
        return False
    return type(layer) is StoredLinear or device_of(layer.weight.device).is_cpu


def run_linear(layer: Any, x: Tensor) -> Tensor:
    """layer(x) by our kernels: x [..., in] -> [..., out]. Its weights are checked at every call,
    since the model's owner may have changed them. Raises UnsupportedSpecError."""
    library = build.library()
    if library is None:
        raise UnsupportedSpecError(str(build.problem()))
    weights = weights_of(layer, addresses := Addresses(), "the layer")
    out, in_ = weights.out_features, weights.in_features
    require(x.shape[-1:] == (in_,), f"the input has shape {tuple(x.shape)}, not (..., {in_})")
    flat = x.detach().reshape(-1, in_).float().contiguous()
    num_tokens = len(flat)
    y = torch.empty(num_tokens, out, dtype=torch.float32, device="cpu")
    if num_tokens:
        size = num_tokens * library.draftahead_integer_bytes(ctypes.byref(weights))
        integers = torch.empty(size, dtype=torch.uint8, device="cpu")
        library.draftahead_linear(
            ctypes.byref(weights),
            addresses.of("the input", flat, num_tokens, in_),
            num_tokens,
            y.data_ptr(),
            num_threads(),
            integers.data_ptr(),
        )
    return y.view(*x.shape[:-1], out)


def widen_rows(rows: Tensor, ids: Tensor, kind: str) -> Tensor:
    """dequantize_some by our kernels, with the same bits and without its dozen operations. What
    they cannot read is left to torch."""
    library, (per_block, block_bytes) = build.library(), STORED_KINDS[kind]
    flat = ids.long().contiguous()
    readable = kernels_can_read(rows, torch.uint8, "cpu") and kernels_can_read(
        flat, torch.int64, "cpu"
    )
    if library is None or not readable or rows.shape[1] % block_bytes:
        return dequantize_some(rows, ids, kind)
    in_ = rows.shape[1] // block_bytes * per_block
    weights = abi.Weights(
        data=rows.data_ptr(), out_features=len(rows), in_features=in_, kind=abi.KINDS.index(kind)
    )
    widened = torch.empty(len(flat), in_, dtype=torch.float32, device="cpu")
    count = library.draftahead_float_rows(
        ctypes.byref(weights), flat.data_ptr(), len(flat), widened.data_ptr()
    )
    if count < len(flat):
        raise IndexError(f"token {int(flat[count])} is none of the embedding's {len(rows)}")
    return widened


Forward = tuple[Any, Callable[..., Any]]  # a module, and what it runs


class SmallBatchLinears:
    """Runs a module's linear layers by our kernels: stored ones always, float32 ones where our
    kernels are faster than torch."""

    def __init__(self, module: Any) -> None:
        linears = [m for m in module.modules() if type(m) is nn.Linear and is_supported(m)]
        if not has_own_forward(nn.Linear):
            linears = []
        stored = [m for m in module.modules() if type(m) is StoredLinear and is_supported(m)]
        self.enabled = True
        has_kernels = build.library() is not None
        self._float32: list[Forward] = [
            (m, _small_batch_forward(m)) for m in linears if has_kernels
        ]
        self._stored: list[Forward] = [(m, partial(run_linear, m)) for m in stored if has_kernels]

    def torch_threads(self, num_tokens: int) -> AbstractContextManager[None]:
        """For the model's own forward: torch takes all threads for its matrix products. Where these
        are ours, little is left for it but the attention of a long prompt, and its threads would
        spin where ours have to compute."""
        is_left_little = self._stored and num_tokens <= FEW_TOKENS
        return torch_single_threaded() if is_left_little else torch_all_threads()

    def patched(self) -> AbstractContextManager[None]:
        """While entered, the layers run by our kernels, except those that the user has patched."""
        if autocast_of("cpu") is not None:
            return nullcontext()
        forwards = [*self._stored, *(self._float32 if self.enabled else [])]
        return patched_forwards([pair for pair in forwards if "forward" not in vars(pair[0])])


def _small_batch_forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.numel() <= MAX_TOKENS_FLOAT32 * linear.in_features:
            try:
                return run_linear(linear, x)
            except UnsupportedSpecError:  # its owner has cast or moved it
                pass
        return F.linear(x, linear.weight, linear.bias)

    return forward
