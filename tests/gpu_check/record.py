"""Launches as plain values that can be stored and compared.

The names of kernels and parameters are noted for readers only; two records are equal if the code,
the grids and the values are. A tensor is described by its dtype, shape, strides, offset in its
storage, a number for the storage in the order of first use, and a checksum of what it holds, so
that two tensors passed in each other's place make a difference.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gpu_check.sm90 import Launch

SAMPLE = 4096  # elements of a tensor that go into its checksum, at most about so many


class Storages:
    """Numbers for storages, in the order in which they are first used. Tensors stay referenced, so
    that no storage's address is used again."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[Tensor] = []

    def number(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return self._numbers.setdefault(tensor.untyped_storage().data_ptr(), len(self._numbers))


def plain(launches: list[Launch], *, checksums: bool) -> list[dict[str, Any]]:
    storages = Storages()
    return [
        {
            "kernel": launch.kernel,
            "ptx": launch.ptx,
            "shared": launch.shared,
            "grid": list(launch.grid),
            "constexprs": launch.constexprs,
            "options": launch.options,
            "arguments": [_plain(value, storages, checksums) for value in launch.arguments],
        }
        for launch in launches
    ]


def _plain(value: Any, storages: Storages, checksums: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    size, stride = list(value.shape), list(value.stride())
    offset = f"storage {storages.number(value)} + {value.storage_offset()}"
    layout = f"{str(value.dtype).removeprefix('torch.')}{size} strides {stride} in {offset}"
    return f"{layout}, {checksum(value)}" if checksums else layout


def checksum(tensor: Tensor) -> str:
    """Of what it holds, up to the last bits, which differ between machines."""
    if tensor.is_contiguous():
        tensor = tensor.view(-1)[:: max(1, tensor.numel() // SAMPLE)]
    if tensor.is_floating_point():
        tensor = (tensor.float().nan_to_num(0.123, 77.0, -77.0) * 64).round().to(torch.int32)
    return f"{zlib.crc32(tensor.contiguous().numpy().tobytes()):08x}"


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between the launches of the same variants, in words."""
    found = [f"{name}: only in one of them" for name in sorted(one.keys() ^ other.keys())]
    for name in sorted(one.keys() & other.keys()):
        if len(one[name]) != len(other[name]):
            found.append(f"{name}: {len(one[name])} launches, and {len(other[name])}")
            continue
        for at, (here, there) in enumerate(zip(one[name], other[name], strict=True)):
            found += [
                f"{name}, launch {at} ({here['kernel']}, {there['kernel']}): {part}: "
                f"{_first(here[part], there[part])}"
                for part in ("ptx", "grid", "constexprs", "options", "arguments")
                if here[part] != there[part]
            ]
    return found


def _first(one: Any, other: Any) -> str:
    """The first difference between two values or lists."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        return f"[{at}] {one[at]} != {other[at]}"
    return f"{one} != {other}"


def recorded() -> dict[str, list[dict[str, Any]]]:
    """The launches of all variants."""
    from gpu_check.sm90 import compiled_launches
    from gpu_check.variants import filled_memory, uncaptured, variants

    found = {}
    for name, is_filled, run in variants():
        memory = filled_memory() if is_filled else nullcontext()
        with compiled_launches() as launches, uncaptured(), memory:
            run()
        found[name] = plain(launches, checksums=is_filled)
    return found
