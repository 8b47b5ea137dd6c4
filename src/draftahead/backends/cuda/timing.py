"""How long a device takes for what it is sent."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import ClassVar, NamedTuple

import torch

from draftahead.core.device import Event, device_of
from draftahead.core.draft import DeviceTimer
from draftahead.core.stats import CompileTime

AT_FIRST, NOW_AND_THEN = 4, 16  # uses that are timed: so many, and then every so many
ALL = 2  # things that a use consists of: growing trees, and scoring them


class EventTimer:
    """How long a device takes for what it is sent one after the other. What the host does before,
    such as recording it, does not count."""

    # Events that were read, by device: to make one takes longer than to use it.
    _read: ClassVar[defaultdict[str, list[Event]]] = defaultdict(list)

    def __init__(self, device: torch.device) -> None:
        self._marks: list[Event] = []
        self._laps: list[float] = []
        self._device = device_of(device)
        self._spare = self._read[str(device)]

    def mark(self) -> None:
        self._marks.append(self._spare.pop() if self._spare else self._device.event(timing=True))
        self._device.mark(self._marks[-1])

    def laps(self) -> list[float]:
        """Seconds from each mark to the next; when all marks are set. Waits for the last."""
        if self._marks:
            self._marks[-1].synchronize()
            pairs = itertools.pairwise(self._marks)
            self._laps = [float(one.elapsed_time(other)) / 1e3 for one, other in pairs]
            self._spare.extend(self._marks)
            self._marks = []
        return self._laps


class TimerCache:
    """Clocks for what takes a device as long today as yesterday: to set marks takes the host some
    time itself, so it is measured at first and then now and then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: dict[Hashable, list[float]] = {}
        self._uses: Counter[Hashable] = Counter()

    def clock(self, kind: Hashable) -> DeviceTimer:
        self._uses[kind] += 1
        measured = self._uses[kind] <= AT_FIRST or self._uses[kind] % NOW_AND_THEN == 0
        if measured or kind not in self._laps:
            return _Noting(self._device, self._laps, kind)
        return _Remembered(self._laps[kind])


class _Noting(EventTimer):
    """Of all that is to be timed, unless something was recorded meanwhile."""

    def __init__(
        self, device: torch.device, noted: dict[Hashable, list[float]], kind: Hashable
    ) -> None:
        super().__init__(device)
        self._noted, self._kind = noted, kind
        self._set_up: list[float] = []  # seconds of that so far, at each mark

    def mark(self) -> None:
        self._set_up.append(CompileTime.seconds)
        super().mark()

    def laps(self) -> list[float]:
        found = super().laps()
        if len(found) == ALL and self._set_up[0] == self._set_up[-1]:
            self._noted[self._kind] = found
        return found


class _Remembered(NamedTuple):
    known: list[float]

    def mark(self) -> None:
        pass

    def laps(self) -> list[float]:
        return self.known
