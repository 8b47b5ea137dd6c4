"""The machine: versions and hardware for reports, memory bandwidth, timing."""

from __future__ import annotations

import datetime
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

import draftahead
from draftahead.backends.cpu import build
from draftahead.backends.cpu.threads import num_threads
from draftahead.core.device import device_of, gpu_name


def provenance() -> dict[str, Any]:
    """Versions, machine, arguments and commit, which every JSON report includes."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "argv": sys.argv[1:],
        "versions": {
            "draftahead": draftahead.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "threads": torch.get_num_threads(),
            "gpu": gpu_name(),
            "kernels": build.problem() or "compiled",
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "commit": _commit(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Commit of the running source, with a plus sign if files differ from it; None outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(draftahead.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_memory(device: torch.device) -> int:
    """Peak bytes used so far: on a GPU, or of the process."""
    if (on_gpu := device_of(device).peak_memory()) is not None:
        return on_gpu
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_read(size: int, device: torch.device) -> Callable[[], object]:
    """A function that moves `size` bytes of memory once: the memory-bandwidth bound."""
    library = build.library() if device_of(device).is_cpu else None
    if library is not None:
        data = torch.randn(max(size // 4, 1))
        return lambda: library.draftahead_read_memory(data.data_ptr(), data.numel(), num_threads())
    # A copy reads half of the bytes and writes the other half: the fastest way on a GPU.
    source = torch.randn(max(size // 8, 1), device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def timed(job: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one run: wall time on a CPU, device time on a GPU."""
    kind = device_of(device)
    if not kind.is_gpu:
        start = time.perf_counter()
        job()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (kind.event(timing=True) for _ in range(2))
    kind.delay()  # the device is busy while the host launches the work: that is not measured
    kind.record(begin)
    job()
    kind.record(end)
    end.synchronize()
    return float(begin.elapsed_time(end))
