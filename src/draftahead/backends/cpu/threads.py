"""How many threads our kernels use, and torch's own small operations between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _ThisThread(threading.local):
    full: int | None = (
        None  # torch's number of threads before `torch_single_threaded`, while it is entered
    )


_this_thread = _ThisThread()


def num_threads() -> int:
    """Threads for our kernels: as many as torch has outside `torch_single_threaded`."""
    full = _this_thread.full
    return torch.get_num_threads() if full is None else full


@contextmanager
def torch_single_threaded() -> Iterator[None]:
    """While entered, torch's operations in this Python thread take one thread; our kernels take as
    many as before. The operations between our kernels are small (30 µs), and on a busy machine
    waiting for a second thread can take a time slice (8 ms).

    May be nested. Other Python threads that already use torch keep their number of OpenMP threads;
    MKL's number belongs to the process, so their matrix products are slower meanwhile.
    """
    if _this_thread.full is not None:
        yield
        return
    full = _this_thread.full = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(full)
        _this_thread.full = None
