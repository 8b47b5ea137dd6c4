"""Memory of the KV cache on a CPU: pages are taken as rows are written, and can be given back.

Every slot has room for a whole context in the address space. What it takes in memory are the pages
that were written: sequences of any length share the memory by their tokens, while the entries of a
slot stay adjacent for the kernels. Pages are small ones: with huge pages (which numpy asks for)
each head of each layer of a short text would take 2 MiB.
"""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

# Bytes of a row of entries from which on its pages are given back, in place of writing zeros to
# them. Smaller pieces cost more calls than they save.
MIN_RELEASED = 4 * mmap.PAGESIZE
# On other systems MADV_DONTNEED does not exist, or does not promise zeros.
_CAN_RELEASE = hasattr(mmap, "MADV_DONTNEED") and hasattr(mmap, "MADV_NOHUGEPAGE")


class _Pages(mmap.mmap):
    """Anonymous memory; a subclass, because only that can be referenced weakly."""


# By address, as long as a tensor uses them.
_maps: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()


def zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    needed = math.prod(size) * dtype.itemsize
    if not _CAN_RELEASE or not needed:
        return torch.zeros(size, dtype=dtype, device="cpu")
    pages = _Pages(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    found = torch.frombuffer(pages, dtype=torch.uint8)
    _maps[found.data_ptr()] = pages
    return found.view(dtype).view(size)


def erase(entries: Tensor) -> None:
    """Zeros a slice [parts, heads, entries, width] of what `zeros` made, and gives whole pages of
    its rows back."""
    storage = entries.untyped_storage().data_ptr()
    pages, size = _maps.get(storage), entries[0, 0].numel() * entries.element_size()
    if pages is None or size < MIN_RELEASED or not entries[0, 0].is_contiguous():
        entries.zero_()
        return
    for part in entries:
        for row in part:  # of one head: adjacent entries
            begin = row.data_ptr() - storage
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)
            content = row.reshape(-1).view(torch.uint8)
            for edge in (content[: first - begin], content[last - begin :]):
                if edge.any():  # a page that is only read takes no memory
                    edge.zero_()
