"""Addresses for the kernels: no tensor's address is given away before the tensor was checked.

The kernels read and write by address and size alone. A tensor that is smaller than they were told,
of another dtype, or whose numbers lie elsewhere (a subclass) would make them touch other memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftahead.backends.base import kernels_can_read, require
from draftahead.errors import UnsupportedModelError


class Addresses:
    """Addresses of tensors that are checked once, for all calls, and stay alive as long as this:
    also those that the model has replaced by others meanwhile."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def of(self, name: str, tensor: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        """Raises UnsupportedSpecError with the reason if kernels cannot read such a tensor."""
        fits = kernels_can_read(tensor, dtype, "cpu") and tensor.shape == shape
        require(fits and 0 not in shape, f"{name} is {_described(tensor)}, not {shape} {dtype}")
        self._kept.append(tensor.detach())
        return tensor.data_ptr()


def address(name: str, tensor: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
    """Of a tensor of one call, which is alive until it returns: by the checks that take no time."""
    if (
        type(tensor) is not Tensor
        or tensor.shape != shape
        or tensor.dtype != dtype
        or not tensor.is_cpu
        or not tensor.is_contiguous()
    ):
        raise UnsupportedModelError(
            f"the CPU kernels cannot read {name}: it is {_described(tensor)}, not {shape} {dtype}; "
            "if the model was changed while it ran, make a new LLM of it"
        )
    return tensor.data_ptr()


def _described(tensor: Tensor) -> str:
    """What kernels may find wrong about a tensor."""
    kind = type(tensor).__name__
    parts = [kind] if kind not in ("Tensor", "Parameter") else []
    parts += [str(tuple(tensor.shape)), str(tensor.dtype)]
    parts += [f"on {tensor.device}"] if not tensor.is_cpu else []
    strided = tensor.layout == torch.strided
    parts += ["not contiguous"] if strided and not tensor.is_contiguous() else []
    return " ".join(parts)
