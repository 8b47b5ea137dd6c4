"""Whether other processes disturbed a repetition: their share of the CPU time while it ran.

Engines that wait at barriers lose far more than the share that a foreign process takes: llama.cpp
falls to a hundredth beside one busy process. So a disturbed repetition says nothing, and is
measured again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftahead.core.device import CGROUP

# Share of the CPU time of a repetition above which it counts as disturbed. A lower one also drops
# repetitions beside a desktop's background work; a higher one keeps slowed ones.
FOREIGN_SHARE = 0.05
# Seconds below which foreign CPU time is not counted: the kernel counts in ticks of 0.01 s per CPU.
FOREIGN_SECONDS = 0.05
NUM_RETRIES = 3  # of a repetition that was disturbed; then the last one is kept, and flagged
# Columns of /proc/stat: user, nice, system, and what the hypervisor gave others
BUSY = (0, 1, 2, 7)


@dataclass(frozen=True)
class Reading:
    """Counters at one moment, in seconds."""

    at: float
    machine: float  # CPU time of all processes, on the CPUs that this process may use
    own: float  # CPU time of the processes that are measured
    waited: float = 0.0  # time in which their threads could have run, and had no CPU


class CpuWatch:
    """Compares the CPU time of the machine with that of the measured processes.

    /proc/stat counts the whole host in a container, too: on the CPUs that the container may use,
    whatever runs there besides competes for them. Time that a hypervisor gave to other guests is
    counted as foreign. With a CPU quota the container's CPUs are not its own and others may use
    them freely; there the time that our threads spent waiting for a CPU counts instead.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Reading] | None = None,
        cpus: float | None = None,
        quota: float | None = None,
    ) -> None:
        if read is None:
            allowed = _allowed_cpus()
            cpus, quota = float(len(allowed)), _cpu_quota()
            read = lambda pids: _read(pids, allowed)  # noqa: E731
        self._read, self._cpus = read, cpus or 1.0
        self._quota = quota if quota is not None and quota < self._cpus else None

    def start(self, pids: Sequence[int]) -> Reading | None:
        """None where these counters do not exist: other systems than Linux, some sandboxes."""
        try:
            return self._read(pids)
        except (OSError, ValueError, LookupError):
            return None

    def foreign_share(self, before: Reading | None, pids: Sequence[int]) -> float | None:
        """Share of the CPU time since `before` that others took; None if that is not known."""
        after = self.start(pids)
        if before is None or after is None:
            return None
        if self._quota is not None:
            foreign, cpus = after.waited - before.waited, self._quota
        else:
            machine = after.machine - before.machine
            if machine <= 0 < after.own - before.own - FOREIGN_SECONDS:
                return None  # a sandbox whose /proc/stat stands still
            foreign, cpus = machine - (after.own - before.own), self._cpus
        if foreign < FOREIGN_SECONDS:
            return 0.0
        return foreign / (cpus * max(after.at - before.at, 1e-9))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpu_quota() -> float | None:
    """CPUs' worth of time that the container may use; None: no limit."""
    with suppress(OSError, ValueError):
        limit, period = (CGROUP / "cpu.max").read_text("ascii").split()
        return int(limit) / int(period)  # "max" is no number
    return None


def _read(pids: Sequence[int], cpus: set[int]) -> Reading:
    if sys.platform != "linux":
        raise OSError("there is no /proc")
    tick = os.sysconf("SC_CLK_TCK")
    names = {f"cpu{number}" for number in cpus}
    busy = 0
    for line in Path("/proc/stat").read_text("ascii").splitlines():
        name, *counts = line.split()
        if name in names:
            busy += sum(int(counts[column]) for column in BUSY)
    own, waited = 0.0, 0.0
    for pid in pids:
        own += _cpu_ticks(pid) / tick
        waited += _waited(pid)
    return Reading(time.perf_counter(), busy / tick, own, waited)


def _cpu_ticks(pid: int) -> int:
    """Of all threads, ended ones included."""
    # The name, in brackets, may hold spaces; user and system time are fields 14 and 15.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _waited(pid: int) -> float:
    """Seconds in which threads were ready to run and had no CPU; 0 if the kernel does not count."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError, LookupError, ValueError):  # a thread that ended meanwhile
            total += int((thread / "schedstat").read_text("ascii").split()[1])
    return total / 1e9
