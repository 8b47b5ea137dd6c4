"""The interface of a backend, which runs forward passes faster than transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.core.types import ForwardOutput


class CacheSlice(NamedTuple):
    """The part of the KV cache that a forward pass reads and writes."""

    first_slot: int  # of the sequences, which take adjacent slots
    kv_len: int  # KV entries of each slot to read, at least
    # Largest position of the model, to which positions of padding are clamped. CudaDecoder clamps
    # to the cache's size instead.
    last_position: int
    num_context_tokens: int  # nodes of each sequence that are text; the rest: drafts or padding


class DeviceTree(NamedTuple):
    """Draft trees that are still being built on the device; the host knows their roots only."""

    roots: Sequence[int]
    trees: Tensor  # [B, 2 or more, N]: tokens and parents, on the device

    def and_idle(self, num_sequences: int) -> DeviceTree:
        """With trees of zeros for `num_sequences` more sequences, as padding."""
        padded = F.pad(self.trees, (0, 0, 0, 0, 0, num_sequences))
        return DeviceTree([*self.roots, *[0] * num_sequences], padded)


class Backend(Protocol):
    """Our kernels or CUDA graphs of the model's own forward, bound to a model and a KV cache."""

    # Whether a token's logits are the same bits in every forward pass, for any batch and draft.
    batch_invariant: bool
    # Largest relative distance of its logits from the model's own forward, checked at load.
    tolerance: float
    # Whether `forward` takes a DeviceTree.
    supports_device_drafts: bool

    def set_aux_layers(self, aux_layers: tuple[int, ...]) -> None:
        """Makes each forward store the hidden states after these layers (1: the first) in the
        cache; those after the last layer are normed."""

    def supports(self, num_sequences: int, num_nodes: int, with_logits: bool) -> bool:
        """Whether `forward` takes this size."""
        ...

    def forward(
        self,
        tokens: Tensor,
        num_cached: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput | None:
        """Computes nodes `tokens` [B, N] behind the `num_cached` [B] entries of their slots, and
        writes their KV entries. `parents` of trees; None: chains. The output's tensors may be
        overwritten by the next forward. Returns None if the forward cannot be captured."""
        ...


class UnsupportedSpecError(Exception):
    """A backend does not support a model; the message says why."""

    def __init__(self, reason: str, faster: str | None = None) -> None:
        """`faster`: what the user could do so that it is supported."""
        super().__init__(reason)
        self.faster = faster


def require(holds: bool, reason: str, faster: str | None = None) -> None:
    """`reason` says what the model has, as opposed to what the backend supports."""
    if not holds:
        raise UnsupportedSpecError(reason, faster)


def kernels_can_read(tensor: Any, dtype: torch.dtype, device: str) -> bool:
    """Whether kernels can read a tensor by its address: all of its numbers lie there, as they are
    and one behind the other. A subclass may hold them in other tensors, and quantized."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype == dtype
        and tensor.device.type == device
        and tensor.is_contiguous()
        and not tensor.is_neg()  # of a lazily negated tensor, memory holds the opposite
        and (tensor.storage_offset() + tensor.numel()) * dtype.itemsize
        <= tensor.untyped_storage().nbytes()  # a storage may have been freed
    )
