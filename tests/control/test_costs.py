"""Costs of a forward by its nodes and KV entries, on a simulated machine."""

from __future__ import annotations

import pytest

from draftahead.control import policy as policy_module
from draftahead.control.policy import Costs


def test_costs_between_and_beyond_what_was_seen() -> None:
    costs = Costs()
    assert costs.of(4) > costs.of(1)
    costs.note_pass(1, 2.0)
    assert costs.of(1) == 2.0
    assert 2.0 < costs.of(8) < 3.0
    costs = Costs()
    for _ in range(80):
        costs.note_pass(1, 1.0)
        costs.note_pass(9, 3.0)
    assert costs.of(5) == pytest.approx(2.0, rel=0.05)


def test_a_slower_minute_is_one_for_every_width() -> None:
    costs = Costs()
    for _ in range(80):
        for rows in (1, 8):
            costs.note_pass(rows, 1.0 + 0.02 * rows)
    ratio = costs.of(8) / costs.of(1)
    for _ in range(60):
        costs.note_pass(8, 2 * (1.0 + 0.02 * 8))  # only this one is seen
    assert costs.of(1) > 1.6
    assert costs.of(8) / costs.of(1) == pytest.approx(ratio, rel=0.25)


def test_a_first_pass_that_compiles_is_not_taken_for_the_price() -> None:
    costs = Costs()
    for seconds in (30.0, 1.0, 1.1):
        costs.note_pass(1, seconds)
    for seconds in (50.0, 1.2):
        costs.note_pass(8, seconds)
    assert costs.of(1) == 1.0
    assert costs.of(8) == pytest.approx(1.2)
    costs.note_pass(1, 100.0)  # and nothing that happens once is taken for more than it is
    assert costs.of(1) < 1.4


def test_the_machine_is_measured_before_the_first_step() -> None:
    """A pass of 10 ms, 0.1 more a row, and keys that are read once and multiplied in each row."""
    costs, calls = Costs(), []

    def timed(rows: int, keys: int) -> float:
        calls.append((rows, keys))
        return 0.01 + 1e-4 * rows + 1e-6 * keys + 5e-7 * rows * keys

    costs.survey(timed, room=4096)
    assert len(set(calls)) == 7
    assert costs.of(8) == pytest.approx(timed(8, 0))
    assert costs.of(12) == pytest.approx(timed(12, 0))
    costs.situate(texts=1, keys=3000)
    assert costs.of(1) == pytest.approx(timed(1, 3000))
    assert costs.of(16) == pytest.approx(timed(16, 3000))
    costs.situate(texts=4, keys=4000)  # two nodes of each of four texts of a thousand keys
    assert costs.of(8) == pytest.approx(0.01 + 8e-4 + 4e-3 + 5e-7 * 2 * 4000)


@pytest.mark.parametrize(("compiles", "passes"), [(True, [1, 1]), (False, [1])])
def test_a_slow_machine_is_not_measured_for_long(
    compiles: bool, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr(policy_module.time, "perf_counter", lambda: now[0])

    def timed(rows: int, keys: int) -> float:
        calls.append(rows)
        now[0] += 2.0
        return 2.0

    costs = Costs()
    costs.survey(timed, room=4096, compiles=compiles)
    assert calls == passes  # once to warm up, if that may be needed, and once for the time
    assert costs.of(1) == 2.0


def test_a_first_pass_that_compiles_says_nothing_in_the_survey() -> None:
    seen: set[tuple[int, int]] = set()

    def timed(rows: int, keys: int) -> float:
        first = (rows, keys) not in seen
        seen.add((rows, keys))
        return 30.0 if first else 1.0 + 0.01 * rows

    costs = Costs()
    costs.survey(timed, room=4096)
    assert costs.of(8) == pytest.approx(1.08)
    assert costs.of(1) == pytest.approx(1.01)


def test_fewer_rows_are_not_thought_dearer_for_one_bad_moment() -> None:
    """A first pass of some width may meet anything; one look at it must not rule it out."""
    costs = Costs()
    for rows, seconds in ((1, 1.0), (8, 1.2), (2, 50.0), (16, 1.4)):
        costs.note_pass(rows, seconds)
    assert [costs.of(rows) for rows in (1, 2, 8, 16)] == [1.0, 1.2, 1.2, 1.4]


def test_a_pass_that_took_no_time_tells_nothing() -> None:
    costs = Costs()
    for seconds in (0.0, 1.0, -1.0, 0.0):
        costs.note_pass(4, seconds)
    assert costs.of(4) == 1.0
