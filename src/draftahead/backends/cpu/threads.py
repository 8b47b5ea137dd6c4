"""How many threads our kernels use, and torch's own small operations between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_full = 0  # torch's number of threads while no Python thread is in `torch_single_threaded`
_entered: set[int] = set()  # Python threads that are


def num_threads() -> int:
    """Threads for our kernels: as many as torch has outside `torch_single_threaded`."""
    with _lock:
        return _full if _entered else torch.get_num_threads()


@contextmanager
def torch_single_threaded() -> Iterator[None]:
    """While entered, torch's operations in this Python thread take one thread; our kernels take as
    many as before. The operations between our kernels are small (30 µs). For a second thread they
    would wait, on a busy machine a time slice (8 ms); and OpenMP's threads spin for milliseconds
    after an operation, on the cores of our kernels' threads.

    May be nested. Other Python threads that already use torch keep their number of OpenMP threads;
    MKL's number belongs to the process, so their matrix products are slower meanwhile. Those that
    use torch for the first time begin with one thread, so the number is asked for here.
    """
    global _full
    thread = threading.get_ident()
    if thread in _entered:
        yield
        return
    with _lock:
        full = _full = _full if _entered else torch.get_num_threads()
        _entered.add(thread)
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(full)
        with _lock:
            _entered.discard(thread)


@contextmanager
def torch_all_threads() -> Iterator[None]:
    """Within `torch_single_threaded`: a part that takes all threads, as a model's own forward."""
    if threading.get_ident() not in _entered:
        yield
        return
    try:
        torch.set_num_threads(_full)
        yield
    finally:
        torch.set_num_threads(1)
