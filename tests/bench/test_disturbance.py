"""Repetitions that other processes disturbed: noticed, dropped, counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
import pytest

from draftahead import SamplingParams
from draftahead.bench.disturbance import CpuWatch, Reading
from draftahead.bench.measure import PromptBatch, measure
from draftahead.bench.report import disturbance_note
from draftahead.bench.results import repetitions_of, results_of
from scripted_engines import Scripted


class Machine:
    """Counters of a machine on which others take CPU time during some repetitions."""

    def __init__(self, foreign: Sequence[float]) -> None:
        self._foreign, self._number = list(foreign), 0
        self._at = self._machine = self._own = 0.0

    def read(self, pids: Sequence[int]) -> Reading:
        """Called before and after each run, which takes a second and one CPU."""
        self._number += 1
        if self._number % 2 == 0:
            self._at += 1.0
            self._own += 1.0
            self._machine += 1.0 + self._foreign.pop(0)
        return Reading(self._at, self._machine, self._own, self._machine - self._own)


def test_disturbed_repetitions_are_dropped_and_counted() -> None:
    """Of two CPUs others took 50%, 4% and so on in the repetitions, the warm-up first."""
    machine = Machine([9, 1.0, 0.08, 0.0, 1.0, 1.0, 0.3])
    plain = Scripted("none", [9.0, 2.0, 2.1, 9.0, 9.0, 7.0], [])
    batches = [PromptBatch("a", [[1]])]
    watch = CpuWatch(machine.read, cpus=2)
    found = measure([plain], batches, SamplingParams(max_tokens=9), 3, watch)
    assert [outcome.seconds for outcome in batches[0].outcomes["none"]] == [2.0, 2.1, 7.0]
    assert [outcome.disturbed for outcome in batches[0].outcomes["none"]] == [False, False, True]
    assert batches[0].outcomes["none"][0].foreign_share == pytest.approx(0.04)
    assert found.disturbances() == {"limit": 0.05, "known": True, "dropped": 3, "kept": 1}
    rows = repetitions_of(found)
    assert [row["dropped"] for row in rows] == [False] * 3 + [True] * 3
    assert "3 repetitions" in (note := disturbance_note(found.disturbances()))
    assert "5% of the CPU time; 1 stayed so" in note
    assert results_of(found)[0]["tokens_per_second"] == pytest.approx(10 / 2.1)


def test_a_repetition_is_repeated_three_times_at_most() -> None:
    plain = Scripted("none", [float(number) for number in range(20)], [])
    batches = [PromptBatch("a", [[1]]), PromptBatch("a", [[1]])]
    params = SamplingParams(max_tokens=9)
    found = measure([plain], batches, params, 4, CpuWatch(Machine([1.0] * 20).read, cpus=2))
    # Three retries of the first two, two of the third, and none left after as many as runs.
    assert [o.seconds for o in batches[0].outcomes["none"]] == [3.0, 7.0, 10.0, 11.0]
    assert [o.seconds for o in batches[1].outcomes["none"]] == [12.0, 13.0, 14.0, 15.0]
    assert found.disturbances()["dropped"] == 8 and found.disturbances()["kept"] == 8


def test_a_short_disturbance_is_below_the_clock() -> None:
    watch = CpuWatch(Machine([0.04, 0.06]).read, cpus=0.5)
    shares = [watch.foreign_share(watch.start([1]), [1]) for _ in range(2)]
    assert shares == [0.0, pytest.approx(0.12)]


def test_with_a_quota_the_time_without_a_cpu_counts() -> None:
    """Others on the host's further CPUs do not disturb."""
    readings = [Reading(0, 0, 0, 0), Reading(1, 50, 1, 0.3)]
    watch = CpuWatch(lambda pids: readings.pop(0), cpus=64, quota=2)
    assert watch.foreign_share(watch.start([1]), [1]) == pytest.approx(0.15)


def test_without_counters_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(pids: Sequence[int]) -> Reading:
        raise OSError("no /proc")

    still = [Reading(0, 5, 0), Reading(1, 5, 1)]  # of a sandbox
    for watch in (CpuWatch(read), CpuWatch(lambda pids: still.pop(0), cpus=2)):
        assert watch.foreign_share(watch.start([1]), [1]) is None
    monkeypatch.setattr("sys.platform", "darwin")
    found = measure(
        [Scripted("none", [1.0], [])], [PromptBatch("a", [[1]])], SamplingParams(max_tokens=9), 1
    )
    assert found.disturbances()["known"] is False
    assert "is not known here" in disturbance_note(found.disturbances())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_counters_of_this_machine() -> None:
    """What this process does itself is not foreign; what a child does is, unless it is named."""
    watch = CpuWatch()
    before = watch.start([os.getpid()])
    assert before is not None and before.machine > before.own > 0
    code = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    child = subprocess.Popen([sys.executable, "-c", code])
    quiet = watch.start([os.getpid(), child.pid])
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    after = watch.start([os.getpid()])
    both = watch.start([os.getpid(), child.pid])
    child.wait()
    assert after is not None and both is not None and quiet is not None
    assert after.machine - before.machine > 0.4
    assert both.own - quiet.own > 0.4 > after.own - before.own
