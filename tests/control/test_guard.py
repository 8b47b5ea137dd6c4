"""The regret guard: when drafting is paused, and for how long."""

from __future__ import annotations

from draftahead.control.policy import LOSS, Policy


def test_a_pause_grows_and_ends() -> None:
    policy = Policy()
    lengths = []
    for _ in range(4):
        policy.guard.note(10.0, 1.0, a_pass=1.0, drafted=True)
        length = 0
        while policy.guard.closed():
            length += 1
        lengths.append(length)
    assert lengths == [16, 32, 64, 128]
    policy.guard.note(1.0, 30.0, a_pass=1.0, drafted=True)
    policy.guard.note(100.0, 1.0, a_pass=1.0, drafted=True)
    assert policy.guard.steps_left == 16
    assert 0 < LOSS < 0.05


def test_a_dear_guess_may_fail_at_first_and_not_after_a_pause() -> None:
    """One that is right two times in three begins with two failures every ninth time."""
    guard = Policy().guard
    pauses = []
    for _ in range(6):
        guard.note(1.8, 1.0, a_pass=1.0, drafted=True)
        pauses.append(guard.pauses)
        guard.steps_left = 0  # and goes on
    assert pauses == [0, 0, 0, 1, 2, 3]
    guard.note(1.8, 4.0, a_pass=1.0, drafted=True)
    for _ in range(4):
        guard.note(1.8, 1.0, a_pass=1.0, drafted=True)
    assert guard.pauses == 3
    guard = Policy().guard
    for seconds in (1.8, 1.8, 1.1):  # a narrow one after two that were dear is no reason
        guard.note(seconds, 1.0, a_pass=1.0, drafted=True)
    assert guard.pauses == 0


def test_a_pause_is_not_lengthened_by_what_was_under_way() -> None:
    """A device is sent its next pass, drafted too, before the last one is looked at."""
    guard = Policy().guard
    for _ in range(2):
        guard.note(10.0, 1.0, a_pass=1.0, drafted=True)
    assert (guard.steps_left, guard.pause, guard.pauses) == (16, 32, 1)


def test_long_ago_gains_do_not_pay_for_ever() -> None:
    guard = Policy().guard
    for _ in range(10_000):
        guard.note(1.0, 2.0, a_pass=1.0, drafted=True)
    steps = 0
    while not guard.steps_left:
        guard.note(2.0, 1.0, a_pass=1.0, drafted=True)
        steps += 1
    assert steps < 250  # 2% of that run, and what the cap lets it owe
