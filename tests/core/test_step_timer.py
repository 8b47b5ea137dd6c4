"""Seconds of a step by stage, with and without compilation."""

from __future__ import annotations

import pytest

from draftahead.core import stats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; only tests move it."""
    now = [0.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    return now


def test_compilation_counts_as_time_and_not_as_cost(clock: list[float]) -> None:
    timer = stats.StepTimer()
    clock[0] += 1.0
    timer.lap("draft")
    with stats.CompileTime.counted():
        clock[0] += 30.0
    clock[0] += 5.0
    timer.lap("verify")
    assert timer.seconds == {"draft": 1.0, "verify": 35.0}
    assert timer.cost("verify") == pytest.approx(5.0)
    # A device may have worked while something was compiled: it is not known for which stage.
    timer.reassign("verify", "draft", rest=34.0)
    assert timer.cost("verify") == pytest.approx(5.0)
    assert timer.cost("draft") == pytest.approx(1.0)


def test_time_that_a_stage_waited_for_another_is_moved(clock: list[float]) -> None:
    timer = stats.StepTimer()
    with stats.CompileTime.counted():
        clock[0] += 30.0
    clock[0] += 1.0
    timer.lap("draft")
    clock[0] += 5.0
    timer.lap("verify")
    timer.reassign("verify", "draft", rest=2.0)
    assert timer.seconds == {"draft": 34.0, "verify": 2.0}
    assert timer.cost("verify") == pytest.approx(2.0)
    assert timer.cost("draft") == pytest.approx(4.0)
