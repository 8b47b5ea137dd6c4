"""How many threads our kernels use, and torch's own small operations between them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_lock = threading.Lock()
_torch_default = torch.get_num_threads()
_full = 0  # torch's number of threads while no Python thread is in `torch_single_threaded`
_entered: set[int] = set()  # Python threads that are


def num_threads() -> int:
    """Threads for our kernels: as many as torch has outside `torch_single_threaded`, if the user
    has set that number; otherwise no more than `available_cores`."""
    with _lock:
        number = _full if _entered else torch.get_num_threads()
    is_users = number != _torch_default or "OMP_NUM_THREADS" in os.environ
    return number if is_users else min(number, available_cores())


@functools.cache
def available_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those of its affinity mask, and no more than the container's
    CPU quota pays for. With more threads than that, some wait for the others' cores, or all stand
    still for the rest of the quota's period (usually 100 ms)."""
    if hasattr(os, "sched_getaffinity"):
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    # Hyper-threads of a core count once: they share its arithmetic units and its path to memory,
    # which one thread of ours keeps busy.
    cores = len({_siblings(root, cpu) for cpu in cpus})
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, round(quota)))


def _siblings(root: Path, cpu: int) -> str:
    """The CPUs that share a core with this one, itself included."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _text(topology / "thread_siblings_list") or str(cpu)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the control groups of this process grant it; None: unlimited. A
    group is limited by those above it as well."""
    quotas = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0":
            mounts = ["", "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [controllers, "cpu"]
        else:
            continue
        # In a container the name may be the host's, of which the mount shows the end alone: /.
        groups = [Path(name.lstrip("/")), *Path(name.lstrip("/")).parents]
        folders = [root / "sys/fs/cgroup" / mount / group for mount in mounts for group in groups]
        quotas += [quota for folder in folders if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _quota_of(folder: Path) -> float | None:
    with suppress(ValueError):  # "max", or no such file
        version2 = _text(folder / "cpu.max")
        if version2:
            quota, period = version2.split()
        else:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        if int(quota) > 0 and int(period) > 0:
            return int(quota) / int(period)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""


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
