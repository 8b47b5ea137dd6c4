"""How often guesses came true: first opinions, what fades, and what claims are worth."""

from __future__ import annotations

import random

import pytest

from draftahead.control.rates import Calibration, Rates


def test_a_first_opinion_counts_as_a_few_guesses_and_old_ones_fade() -> None:
    rates: Rates[str] = Rates({"a": 0.25, "b": 0.5}.__getitem__, prior_weight=4.0, decay=0.9)
    assert rates["a"] == 0.25 and not rates.seen()
    rates.note("a", True)
    assert rates["a"] == pytest.approx((0.25 * 4 * 0.9 + 1) / (4 * 0.9 + 1))
    rates.note("a", False)
    share = (0.25 * 4 * 0.9 + 1) * 0.9 / ((4 * 0.9 + 1) * 0.9 + 1)
    assert rates.seen() == {"a": (pytest.approx(share), pytest.approx((4 * 0.9 + 1) * 0.9 + 1))}
    assert rates["b"] == 0.5  # of another kind


def test_claims_are_worth_what_such_claims_came_to_of_late() -> None:
    worth = Calibration()
    assert [worth(claim) for claim in (0.0, 0.34, 0.99, 1.0)] == [0.05, 0.35, 0.95, 0.95]
    assert (worth(-1.0), worth(7.0)) == (0.05, 0.95)
    seen = []
    for number in range(300):
        worth.note(0.34, number % 3 == 0)
        seen.append(worth(0.36))
    assert all(share == pytest.approx(1 / 3, abs=0.05) for share in seen[100:])  # no single guess
    assert worth(0.44) == 0.45
    for _ in range(150):
        worth.note(0.34, True)
    assert worth(0.34) > 0.9  # and habits change


def test_claims_are_worth_what_they_turned_out_to_be() -> None:
    calibration = Calibration()
    chance = random.Random(0)
    for _ in range(500):
        calibration.note(0.85, chance.random() < 0.3)
    assert calibration(0.88) == pytest.approx(0.3, abs=0.12)
    assert calibration(0.15) == pytest.approx(0.15)  # nothing was seen there
