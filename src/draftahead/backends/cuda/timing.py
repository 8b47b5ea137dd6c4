"""Device timers, by events in a device's stream."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import ClassVar, NamedTuple

import torch

from draftahead.core.device import Event, device_of
from draftahead.core.draft import DeviceTimer
from draftahead.core.stats import CompileTime

# Uses of a TimerCache that are measured: the first few, then every so many. More follow a change of
# the device's speed sooner, and take the host more time.
FIRST_MEASURED, MEASURE_EVERY = 4, 16
NUM_LAPS = 2  # of a use: building trees, verifying them


class EventTimer:
    """Seconds of device time between marks; host time before the first does not count."""

    # Pool of events by device: creating one takes longer than recording it.
    _unused_events: ClassVar[defaultdict[str, list[Event]]] = defaultdict(list)

    def __init__(self, device: torch.device) -> None:
        self._marks: list[Event] = []
        self._laps: list[float] = []
        self._device = device_of(device)
        self._unused = self._unused_events[str(device)]

    def mark(self) -> None:
        self._marks.append(self._unused.pop() if self._unused else self._device.event(timing=True))
        self._device.record(self._marks[-1])

    def laps(self) -> list[float]:
        """Seconds from each mark to the next, after all are set. Waits for the last."""
        if self._marks:
            self._marks[-1].synchronize()
            pairs = itertools.pairwise(self._marks)
            self._laps = [float(one.elapsed_time(other)) / 1e3 for one, other in pairs]
            self._unused.extend(self._marks)
            self._marks = []
        return self._laps


class TimerCache:
    """Samples the device time of repeated work by its kind: recording events takes the host time,
    so only the first uses and every MEASURE_EVERY-th later one are measured."""

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
    """Stores its laps in the cache, unless a graph was captured between the marks."""

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
    cached: list[float]

    def mark(self) -> None:
        pass

    def laps(self) -> list[float]:
        return self.cached
