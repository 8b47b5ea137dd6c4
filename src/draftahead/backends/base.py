"""The interface of a backend: a way to run a forward pass over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.core.types import ForwardOutput as ForwardOutput


class CacheSlice(NamedTuple):
    """Where in the cache a pass stands."""

    first: int  # row of the cache that the first text lies in
    live: int  # slots to read, at least
    last_position: int  # there is none behind it; padding may point there
    real: int  # nodes that belong to the text; those behind are guesses or padding


class DeviceTree(NamedTuple):
    """Trees that a device is still growing. The host knows their roots alone."""

    roots: Sequence[int]
    trees: Tensor  # [B, 2 or more, N]: tokens and parents, on the device

    def and_idle(self, rows: int) -> DeviceTree:
        """With so many rows behind them that hold no text."""
        return DeviceTree([*self.roots, *[0] * rows], F.pad(self.trees, (0, 0, 0, 0, 0, rows)))


class UnsupportedSpecError(Exception):
    """The model is of another shape than the kernels know."""


class Decoder(Protocol):
    """A pass by kernels of our own, or recorded from the model's forward."""

    batch_invariant: (
        bool  # a token's logits are the same bits in every pass, whatever else is in it
    )
    tolerance: float  # how far from the model's own forward its logits may be, relative
    scores_device_drafts: bool  # trees that the host has not seen yet

    def watch(self, depths: tuple[int, ...]) -> None:
        """Passes store the states after so many layers from now on; after the last one, normed."""

    def takes(self, texts: int, nodes: int, scored: bool) -> bool: ...

    def run(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        place: CacheSlice,
        scored: bool = True,
    ) -> ForwardOutput | None:
        """Trees ahead are for those that read ahead. None where this pass cannot be done that way
        after all."""
        ...


def require(holds: bool, what: str) -> None:
    if not holds:
        raise UnsupportedSpecError(what)


def is_plain(weight: Tensor, dtype: torch.dtype, device: str) -> bool:
    return weight.dtype == dtype and weight.is_contiguous() and weight.device.type == device
