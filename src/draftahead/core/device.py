"""Devices: one object for all that differs between a CPU and a GPU.

Other modules ask `device_of(tensor.device)` and compare no device types themselves, so tests can
put an emulated GPU in the place of a real one (`FACTORIES`).
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor


class Event(Protocol):
    """A point in a device's stream of work."""

    def record(self, stream: Any = None) -> None:
        """Sets it behind all work launched so far."""

    def query(self) -> bool:
        """Whether the device has passed it, or it was never recorded."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another event; both made with `timing`."""
        ...


class Captured(Protocol):
    """A captured CUDA graph."""

    output: Any  # of the captured function; every replay overwrites these tensors

    def replay(self) -> None: ...


class GraphMemory(Protocol):
    """Captures graphs into one memory pool: no two of them run at the same time."""

    def capture(self, body: Callable[[], Any]) -> Captured:
        """Runs `body`, which must not wait for the device, and returns it as a graph."""
        ...

    def reset_pool(self) -> None:
        """Starts a new memory pool, after all graphs of the old one were dropped."""


class Device:
    """A device without CUDA graphs, such as a CPU."""

    is_gpu = False
    # What a failed capture or kernel launch raises; anything else is a bug of ours.
    capture_errors: tuple[type[Exception], ...] = (RuntimeError,)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def load_triton(self) -> None:
        """Loads Triton's driver, for which it compiles C. Raises anything where that fails."""

    def as_current(self) -> AbstractContextManager[Any]:
        """While entered, it is the current device."""
        return nullcontext()

    def synchronize(self) -> None:
        """Waits for all work of the device."""

    def pinned(self, values: Tensor) -> Tensor:
        """A CPU tensor in page-locked memory, which the device reads without the host."""
        return values

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether its values can be read without waiting for a device."""
        return tensor.device.type == "cpu"

    def small_tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def event(self, *, timing: bool = False) -> Event:
        raise NotImplementedError(f"{self.device} has no events")

    def record(self, event: Event) -> None:
        """Records an event in the device's current stream."""
        raise NotImplementedError(f"{self.device} has no events")

    def forbid_sync(self) -> AbstractContextManager[None]:
        """While entered, an operation that waits for the device raises a RuntimeError."""
        return nullcontext()

    def graph_memory(self) -> GraphMemory:
        raise NotImplementedError(f"{self.device} has no graphs")

    def shared_memory(self) -> int | None:
        """Bytes of on-chip memory that one block of a kernel may use, if known."""
        return None

    def free_memory(self) -> int | None:
        """Bytes free on the device, or None if unknown."""
        return free_host_memory() if self.is_cpu else None

    def peak_memory(self) -> int | None:
        """Most bytes allocated so far, or None for a device without memory of its own."""
        return None

    def delay(self) -> None:
        """Keeps the device busy for about a millisecond."""


class CudaDevice(Device):
    is_gpu = True

    @property
    def capture_errors(self) -> tuple[type[Exception], ...]:  # type: ignore[override]
        """CUDA and torch raise RuntimeErrors; Triton its own, and those of running ptxas, writing
        its cache and loading what it compiled."""
        triton = sys.modules.get("triton.errors")
        kernels = () if triton is None else (triton.TritonError,)
        return (RuntimeError, OSError, ImportError, subprocess.SubprocessError, *kernels)

    def load_triton(self) -> None:
        from triton.runtime import driver

        driver.active.get_current_target()

    def as_current(self) -> AbstractContextManager[Any]:
        if self.device.index in (None, torch.cuda.current_device()):
            return nullcontext()  # checking takes less time than switching
        return torch.cuda.device(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory()

    def small_tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        host = torch.tensor(values, dtype=dtype, device="cpu").pin_memory()
        return host.to(self.device, non_blocking=True)

    def event(self, *, timing: bool = False) -> Event:
        make: Any = torch.cuda.Event
        found: Event = make(enable_timing=True) if timing else make()
        return found

    def record(self, event: Event) -> None:
        event.record(torch.cuda.current_stream(self.device))

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def graph_memory(self) -> GraphMemory:
        return CudaGraphMemory(self.device)

    def shared_memory(self) -> int | None:
        limits = torch.cuda.get_device_properties(self.device)
        return int(getattr(limits, "shared_memory_per_block_optin", 99 * 1024))

    def free_memory(self) -> int | None:
        # Memory that torch's allocator has reserved but does not use is free for us too.
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + idle

    def peak_memory(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.device))

    def delay(self) -> None:
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]


_capturing = threading.Lock()  # the garbage collector belongs to the process

# Kept alive: the caching allocator may still refer to a graph whose capture failed.
_FAILED: list[torch.cuda.CUDAGraph] = []


class CudaGraphMemory:
    """A memory pool, and a stream to capture on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def reset_pool(self) -> None:
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], Any]) -> Captured:
        with _capturing:
            return self._capture(body)

    def _capture(self, body: Callable[[], Any]) -> Captured:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # freeing a graph or pinned memory during the capture would abort it
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = body()
                finally:
                    graph.capture_end()
        except BaseException:
            _FAILED.append(graph)
            raise
        finally:
            if collects:
                gc.enable()
        return CudaGraph(graph, output)


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Any) -> None:
        self.output = output
        self.replay = graph.replay  # no method around it: it is called in every forward


# By type of device; other types are `Device`s.
FACTORIES: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
_devices: dict[torch.device, Device] = {}


def device_of(device: torch.device) -> Device:
    found = _devices.get(device)
    if found is None:
        found = _devices[device] = FACTORIES.get(device.type, Device)(device)
    return found


def small_tensor(values: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of some host values on a device, without waiting for the device."""
    return device_of(torch.device(device)).small_tensor(values, dtype)


def host_ints(values: Any) -> Tensor:
    """int64 on the CPU, whatever torch's default device is; also of empty lists."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def padded(rows: Sequence[list[int]]) -> Tensor:
    """Rows of different lengths as one tensor, filled up with zeros."""
    width = max(map(len, rows))
    return host_ints([row + [0] * (width - len(row)) for row in rows])


def last_of(values: Tensor, rows: Sequence[list[int]]) -> Tensor:
    """[B, N, ...] computed for padded rows -> [B, ...] of the last element of each."""
    if all(len(row) == values.shape[1] for row in rows):
        return values[:, -1]
    last = small_tensor([len(row) - 1 for row in rows], torch.int64, values.device)
    return values[torch.arange(len(rows), device=values.device), last]


CGROUP = Path("/sys/fs/cgroup")  # as a container sees its own


def free_host_memory() -> int:
    """Bytes that this process can get: of the machine, or of the container if that has fewer."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no such limit
        limit = int((CGROUP / "memory.max").read_text("ascii"))
        used = int((CGROUP / "memory.current").read_text("ascii"))
        counts = dict(map(str.split, (CGROUP / "memory.stat").read_text("ascii").splitlines()))
        # Pages of files that nothing has used lately are given up first.
        free = min(free, limit - used + int(counts.get("inactive_file", 0)))
    return free


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if gpu_count() else None


def default_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if gpu_count() else "cpu")
