"""Device timers: work of a kind is measured at first, and then every so many times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from draftahead.backends.cuda.timing import MEASURE_EVERY, TimerCache
from draftahead.core.stats import CompileTime
from emulated_gpu import EmulatedEvent, EmulatedGpu, emulated_gpu


class Clock:
    """The device's time, which the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made = 0

    def event(self, gpu: EmulatedGpu, *, timing: bool = False) -> EmulatedEvent:
        assert timing
        self.made += 1
        event, clock = EmulatedEvent(), self

        def record(stream: object = None) -> None:
            event.at = clock.now

        event.record = record  # type: ignore[method-assign]
        return event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(EmulatedGpu, "event", lambda gpu, **options: found.event(gpu, **options))
    monkeypatch.setattr("draftahead.backends.cuda.timing.EventTimer._unused_events", {"cpu": []})
    with emulated_gpu():
        yield found


def test_work_of_one_kind_is_timed_at_first_and_then_every_16th_time(clock: Clock) -> None:
    """Events take the host some time: they are reused, and not recorded where the time is known."""
    timers, found = TimerCache(torch.device("cpu")), []
    for use in range(1, 34):
        timer = timers.timer("a kind")
        for seconds in (0.0, use, 10.0):
            clock.now += seconds
            timer.mark()
        found.append([round(lap) for lap in timer.laps()])
        assert timer.laps() == timer.laps()
    assert [lap for lap, _ in found] == [1, 2, 3, 4, *[4] * 11, *[16] * 16, *[32] * 2]
    assert all(after == 10 for _, after in found)
    assert clock.made == 3
    assert timers.timer("another").laps() == []  # not measured yet


@pytest.mark.parametrize(
    ("laps", "compiles", "is_noted"),
    [((5.0, 1.0), True, False), ((2.0,), False, False), ((5.0, 1.0), False, True)],
    ids=["graph captured meanwhile", "not all of it", "measured"],
)
def test_only_whole_measurements_are_remembered(
    clock: Clock,
    laps: tuple[float, ...],
    compiles: bool,
    is_noted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers = TimerCache(torch.device("cpu"))

    def measure(seconds: tuple[float, ...], compiles: bool) -> None:
        timer = timers.timer("a kind")
        timer.mark()
        for lap in seconds:
            clock.now += lap
            if compiles:
                monkeypatch.setattr(CompileTime, "seconds", CompileTime.seconds + 1.0)
            timer.mark()
        timer.laps()

    for _ in range(MEASURE_EVERY):
        measure((3.0, 1.0), False)
    for _ in range(MEASURE_EVERY):
        measure(laps, compiles)
    assert [round(lap) for lap in timers.timer("a kind").laps()] == ([5, 1] if is_noted else [3, 1])
