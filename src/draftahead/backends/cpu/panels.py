"""Quantized weights of a file, rearranged for integer arithmetic (csrc/panels.h) and kept on disk.

The panels of a model take the bytes of its file. They are made at the first load (a second for
2 GB) in a file of the cache folder, which is mapped like the model's own: a later load, and another
process, read the same memory. Models that are used least recently leave the cache first.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftahead.backends.cpu import abi, build
from draftahead.backends.cpu.threads import num_threads
from draftahead.loader.embedded import cache_root
from draftahead.loader.progress import ProgressCallback
from draftahead.loader.stored import StoredLinear

log = logging.getLogger("draftahead")

# Raised when csrc/panels.h arranges weights in another way: files of older versions are made again.
FORMAT = 1
# Of all models in the cache. A larger bound keeps more models, each in the size of its file.
MAX_BYTES = 64 << 30
ALIGNMENT = 64  # of a matrix in the file: a cache line, and a vector of the kernels
SUFFIX = ".panels"
MADV_DONTNEED = 4

_panels: WeakKeyDictionary[StoredLinear, Tensor] = WeakKeyDictionary()
_preparing = threading.RLock()


def has_panels(layer: StoredLinear) -> bool:
    """Whether a layer is multiplied by integer arithmetic."""
    return layer.activations != "float32" and layer.kind.startswith("Q")


def panels_of(layer: StoredLinear) -> Tensor | None:
    """uint8 [size], or None if the layer is multiplied in float32."""
    if not has_panels(layer):
        return None
    if layer not in _panels:
        with _preparing:
            if layer not in _panels:
                _panels[layer] = _in_memory(layer)
    return _panels[layer]


class _Part(NamedTuple):
    """A layer's panels within a file."""

    layer: StoredLinear
    start: int
    size: int


def prepare_panels(model: Any, report: ProgressCallback) -> None:
    """Makes the panels of all layers that need them, or maps those that the cache has."""
    with _preparing:
        layers = [m for m in model.modules() if type(m) is StoredLinear and m not in _panels]
        files: dict[Path, list[_Part]] = {}
        for layer in filter(has_panels, layers):
            if layer.origin is not None:
                parts = files.setdefault(layer.origin.path, [])
                start = parts[-1].start + parts[-1].size if parts else 0
                start = -(-start // ALIGNMENT) * ALIGNMENT
                parts.append(_Part(layer, start, _size(layer)))
        for path, parts in files.items():
            try:
                whole = _cached(path, parts, report)
            except OSError as problem:  # each layer's panels are then made in memory
                log.warning("the rearranged weights of %s are not kept: %s", path.name, problem)
                continue
            for layer, start, size in parts:
                _panels[layer] = whole[start : start + size]


# ------------------------------------------------------------------------------------- on the disk


def _cached(path: Path, parts: Sequence[_Part], report: ProgressCallback) -> Tensor:
    """The panels of a model's file: uint8, mapped."""
    folder, size = cache_root() / "panels", parts[-1].start + parts[-1].size
    file = folder / f"{_key(path, parts)}{SUFFIX}"
    if file.is_file() and file.stat().st_size == size:
        os.utime(file)
        return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    _make_room(folder, size)
    handle, name = tempfile.mkstemp(dir=folder, prefix="making-")
    making = Path(name)
    try:
        # Now, and not by the first write: a full disk would end the process there.
        os.posix_fallocate(handle, 0, size)
        whole = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        for layer, start, count in parts:
            report(f"arranging the weights of {path.name} for this CPU, once", start / size)
            _make(layer, whole[start : start + count])
        _keep(handle, making, file)
    except BaseException:
        os.close(handle)
        making.unlink(missing_ok=True)
        raise
    return whole


def _keep(handle: int, making: Path, file: Path) -> None:
    """Gives a file its name once the disk has its bytes: after a power failure it would otherwise
    hold zeros. The disk may take seconds, so another thread waits for it."""

    def wait() -> None:
        try:
            os.fsync(handle)
            making.replace(file)
        except OSError as problem:
            log.warning("%s is not kept: %s", file, problem)
            making.unlink(missing_ok=True)
        finally:
            os.close(handle)

    threading.Thread(target=wait, name="draftahead panels").start()


def _key(path: Path, parts: Sequence[_Part]) -> str:
    """Of a file's contents, as far as its time tells, and of what is made of them."""
    status = path.stat()
    described = [str(FORMAT), str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    for layer, start, _ in parts:
        assert layer.origin is not None
        described.append(f"{layer.origin.name} {layer.kind} {list(layer.rows.shape)} {start}")
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:32]


def _make_room(folder: Path, size: int) -> None:
    """Removes the files that were not used for longest, until one of `size` bytes fits. Raises
    OSError if it cannot."""
    if size > MAX_BYTES:
        raise OSError(f"{size} bytes are more than the cache may hold")
    files = [(file.stat(), file) for file in folder.iterdir()]
    files.sort(key=lambda pair: pair[0].st_mtime)
    total = sum(status.st_size for status, _ in files)
    for status, file in files:
        if total + size <= MAX_BYTES and shutil.disk_usage(folder).free > size:
            return
        file.unlink(missing_ok=True)  # whoever has mapped it keeps its memory
        total -= status.st_size
    if shutil.disk_usage(folder).free <= size:
        raise OSError("the disk is full")


# -------------------------------------------------------------------------------------- one matrix


def _weights(layer: StoredLinear) -> abi.Weights:
    return abi.Weights(
        data=layer.rows.data_ptr(),
        out_features=layer.out_features,
        in_features=layer.in_features,
        kind=abi.KINDS.index(layer.kind),
    )


def _size(layer: StoredLinear) -> int:
    library = build.library()
    assert library is not None
    return int(library.draftahead_panels_size(ctypes.byref(_weights(layer))))


def _in_memory(layer: StoredLinear) -> Tensor:
    panels = torch.empty(_size(layer), dtype=torch.uint8, device="cpu")
    _make(layer, panels)
    return panels


def _make(layer: StoredLinear, panels: Tensor) -> None:
    library = build.library()
    assert library is not None
    library.draftahead_make_panels(ctypes.byref(_weights(layer)), panels.data_ptr(), num_threads())
    if layer.origin is not None and layer.origin.is_mapped:
        _release(layer.rows)


def _release(rows: Tensor) -> None:
    """Gives back the memory of mapped pages that are not needed now: the file still has them."""
    page = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 0
    if not page or not hasattr(ctypes.CDLL(None), "madvise"):
        return
    first = -(-rows.data_ptr() // page) * page
    size = (rows.data_ptr() + rows.nbytes) // page * page - first
    if size > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_DONTNEED)
