"""Counter-based random numbers: a hash of (sequence, purpose, position, token id).

They are the same on every device and whatever else is in the batch. A token is sampled by the
Gumbel-max trick in its exponential form: argmin E/p with E exponential noise, which is
argmax(log p + g) with one logarithm less.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from draftahead.core.device import small_tensor
from draftahead.core.types import SequenceState

# splitmix64 (Steele, Lea, Flood 2014), in the signed integers that torch has.
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class RngStream(IntEnum):
    """What a random number is for. Streams are independent of each other."""

    TARGET = 0  # the target's own token at a position, the same in every step
    DRAFT = 1  # a drafted token
    ACCEPT = 2  # the test that accepts or rejects it


class NodeContext(NamedTuple):
    """A node: a sequence, and the tokens of the path from below its root."""

    sequence: SequenceState
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Index of the next token in the sequence."""
        return len(self.sequence.tokens) + len(self.path)


# -------------------------------------------------------------------------------------- keys


def rng_key(*parts: int) -> int:
    """One 64-bit key from several integers; their order matters."""
    key = 0
    for part in parts:
        x = (key + part * _GOLDEN + _GOLDEN) & _MASK
        for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
            x = ((x ^ (x >> shift)) * factor) & _MASK
        key = x ^ (x >> 31)
    return _signed(key)


def target_rng_key(context: NodeContext) -> int:
    """Key of the target's own token after a node: a function of the position alone, so that plain
    and drafted decoding emit the same tokens."""
    return rng_key(context.sequence.rng_key, RngStream.TARGET, context.position)


def step_rng_key(stream: RngStream, context: NodeContext) -> int:
    """Key for drafting and for acceptance tests. It includes the step, by the position of its root:
    a position that is drafted again needs independent randomness."""
    root = len(context.sequence.tokens)
    return rng_key(context.sequence.rng_key, stream, root, len(context.path))


# ----------------------------------------------------------------------------------- numbers


def uniforms(
    rng_keys: Sequence[int] | Tensor, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """[A] RNG keys -> [A, count] float64 in the open interval (0, 1)."""
    return uniforms_at(rng_keys, torch.arange(count, dtype=torch.int64, device=device))


def uniforms_at(rng_keys: Sequence[int] | Tensor, ids: Tensor) -> Tensor:
    """The uniforms of these token ids only: [A] RNG keys, ids [K] or [A, K] -> [A, K]."""
    if not isinstance(rng_keys, Tensor):
        rng_keys = small_tensor(rng_keys, torch.int64, ids.device)
    # 52 bits: with one more, the half that is added could round up to 1 itself.
    bits = (_mix(rng_keys[:, None] + ids * _signed(_GOLDEN)) >> 12) & (_MASK >> 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def sample_gumbel(probs: Tensor, rng_keys: Sequence[int] | Tensor) -> Tensor:
    """One token from each distribution: [A, V] -> [A]. An id of probability 0 is never taken."""
    noise = -uniforms(rng_keys, probs.shape[-1], probs.device).log()
    return (noise / probs.to(torch.float64)).argmin(-1)


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
        x = (x ^ ((x >> shift) & (_MASK >> shift))) * _signed(factor)
    return x ^ ((x >> 31) & (_MASK >> 31))


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x
