"""Device timers: how long a device takes for the work it is given."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import ClassVar, NamedTuple

import torch

from draftahead.core.device import Event, device_of
from draftahead.core.draft import DeviceTimer
from draftahead.core.stats import CompileTime

# Uses that are measured: the first few, then every so many. More follow a change of the device's
# speed sooner, for the host's time to record events.
FIRST_MEASURED, MEASURE_EVERY = 4, 16
NUM_LAPS = 2  # of a use: building trees, and verifying them


class EventTimer:
    """Seconds between marks in a device's work. What the host does before does not count."""

    # Events that can be used again, by device: to make one takes longer than to use it.
    _unused_events: ClassVar[defaultdict[str, list[Event]]] = defaultdict(list)

    def __init__(self, device: torch.device) -> None:
        self._marks: list[Event] = []
        self._laps: list[float] = []
        self._device = device_of(device)
        self._unused = self._unused_events[str(device)]

    def mark(self) -> None:
        self._marks.append(self._unused.pop() if self._unused else self._device.event(timing=True))
        self._device.mark(self._marks[-1])

    def laps(self) -> list[float]:
        """Seconds from each mark to the next, once all are set. Waits for the last."""
        if self._marks:
            self._marks[-1].synchronize()
            pairs = itertools.pairwise(self._marks)
            self._laps = [float(one.elapsed_time(other)) / 1e3 for one, other in pairs]
            self._unused.extend(self._marks)
            self._marks = []
        return self._laps


class TimerCache:
    """Timers for work that takes a device as long every time: recording events takes the host some
    time itself, so the first few uses are measured and then one now and then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: dict[Hashable, list[float]] = {}
        self._uses: Counter[Hashable] = Counter()

    def timer(self, kind: Hashable) -> DeviceTimer:
        self._uses[kind] += 1
        is_due = self._uses[kind] <= FIRST_MEASURED or self._uses[kind] % MEASURE_EVERY == 0
        if is_due or kind not in self._laps:
            return _CachingTimer(self._device, self._laps, kind)
        return _CachedTimer(self._laps[kind])


class _CachingTimer(EventTimer):
    """Stores its laps, unless something was captured meanwhile."""

    def __init__(
        self, device: torch.device, cache: dict[Hashable, list[float]], kind: Hashable
    ) -> None:
        super().__init__(device)
        self._cache, self._kind = cache, kind
        self._compile_seconds: list[float] = []  # so far, at each mark

    def mark(self) -> None:
        self._compile_seconds.append(CompileTime.seconds)
        super().mark()

    def laps(self) -> list[float]:
        found = super().laps()
        if len(found) == NUM_LAPS and self._compile_seconds[0] == self._compile_seconds[-1]:
            self._cache[self._kind] = found
        return found


class _CachedTimer(NamedTuple):
    known: list[float]

    def mark(self) -> None:
        pass

    def laps(self) -> list[float]:
        return self.known
