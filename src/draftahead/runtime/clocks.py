"""How long a device takes for what it is sent."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import torch

from draftahead.drafts import Laps

AT_FIRST, NOW_AND_THEN = 4, 16  # uses that are timed: so many, and then every so many


class DeviceClock:
    """How long a device takes for what it is sent one after the other. What the host does before,
    such as recording it, does not count."""

    # Events that were read, by device: to make one takes longer than to use it.
    _read: ClassVar[defaultdict[int, list[Any]]] = defaultdict(list)

    def __init__(self) -> None:
        self._marks: list[Any] = []
        self._laps: list[float] = []
        self._spare = self._read[torch.cuda.current_device()]

    def mark(self) -> None:
        event: Any = torch.cuda.Event
        self._marks.append(self._spare.pop() if self._spare else event(enable_timing=True))
        self._marks[-1].record()

    def laps(self) -> list[float]:
        """Seconds from each mark to the next; when all marks are set. Waits for the last."""
        if self._marks:
            self._marks[-1].synchronize()
            pairs = itertools.pairwise(self._marks)
            self._laps = [float(one.elapsed_time(other)) / 1e3 for one, other in pairs]
            self._spare.extend(self._marks)
            self._marks = []
        return self._laps


class KnownTimes:
    """Clocks for what takes a device as long today as yesterday: to set marks takes the host some
    time itself, so it is measured at first and then now and then."""

    def __init__(self) -> None:
        self._laps: dict[Hashable, list[float]] = {}
        self._uses: Counter[Hashable] = Counter()

    def clock(self, kind: Hashable) -> Laps:
        self._uses[kind] += 1
        measured = self._uses[kind] <= AT_FIRST or self._uses[kind] % NOW_AND_THEN == 0
        if measured or kind not in self._laps:
            return _Noting(self._laps, kind)
        return _Remembered(self._laps[kind])


class _Noting(DeviceClock):
    def __init__(self, noted: dict[Hashable, list[float]], kind: Hashable) -> None:
        super().__init__()
        self._noted, self._kind = noted, kind

    def laps(self) -> list[float]:
        self._noted[self._kind] = super().laps()
        return self._noted[self._kind]


class _Remembered(NamedTuple):
    known: list[float]

    def mark(self) -> None:
        pass

    def laps(self) -> list[float]:
        return self.known
