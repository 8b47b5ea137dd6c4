"""Whether a drafter that takes its time is worth asking, by what it brought where it was asked."""

from __future__ import annotations

import pytest

from draftahead.control.promises import (
    AT_FIRST,
    LONGEST_RETRY,
    RETRY,
    TRIES,
    Costly,
    Promise,
    Unseen,
)
from draftahead.core.types import Batch

POOR = Promise(1.2 / 1.02, 0.2, 2)  # what others promise where they know little


class Price:
    def of(self, rows: int) -> float:
        return 1.0 + 0.01 * rows


def batch_of_one(price: Price | None) -> Batch:
    return Batch((None,), (9,), None, "distribution", price)  # type: ignore[arg-type]


def test_a_costly_drafter_is_asked_where_it_pays() -> None:
    """By what it adds where the others promise about as much: the more they do, the less."""
    costly, batch = Costly(), batch_of_one(Price())
    poor, rich = Promise(1.2 / 1.02, 0.2, 2), Promise(4.0 / 1.05, 3.0, 5)
    for _ in range(TRIES):
        assert costly.pays(batch, poor) and costly.pays(batch, rich)
        costly.note(0.3, poor, Promise(2.5 / 1.06, 1.5, 6))
        costly.note(0.3, rich, Promise(4.1 / 1.06, 3.1, 6))
    assert costly.pays(batch, poor)  # 2.5 tokens in 1.36
    assert not costly.pays(batch, rich)  # 4.1 in 1.36, where there are 4 in 1.05
    for _ in range(40):
        costly.note(5.0, poor, Promise(2.5 / 1.06, 1.5, 6))
    asked = [costly.pays(batch, poor) for _ in range(7 * RETRY)]
    assert TRIES <= sum(asked) <= 3 * TRIES  # a few times now and then, more and more rarely
    assert costly.pays(batch_of_one(None), poor)


def test_trees_nobody_sees_are_taken_where_they_turned_out_better() -> None:
    """By what came true, where the others promise about as much."""
    unseen, batch = Unseen(), batch_of_one(Price())
    poor, rich = Promise(1.2 / 1.02, 0.2, 2), Promise(4.0 / 1.05, 3.0, 5)
    for _ in range(TRIES):
        assert unseen.is_sent(batch)
        assert unseen.wins(batch, poor, 16) and unseen.wins(batch, rich, 16)
        unseen.note_worth(0.1, poor, 1.5, 16, 1)
        unseen.note_worth(0.1, rich, 2.0, 16, 1)
    assert unseen.wins(batch, poor, 16)  # 2.5 tokens in 1.15
    dear = Promise(2.6, 0.2, 2)
    assert unseen.wins(batch, dear, 16)  # not known well enough yet
    for _ in range(AT_FIRST):
        unseen.note_worth(0.1, poor, 1.5, 16, 1)
    assert not unseen.wins(batch, dear, 16)
    assert not unseen.wins(batch, rich, 16)  # 3 tokens, where there are 4 in 1.05
    for _ in range(60):
        unseen.note_worth(0.1, poor, 1.5, 16, 1)
        unseen.note_others(poor)
    assert unseen.is_sent(batch)  # 2.5 tokens in 1.25, where the others usually have 1.2 in 1.02
    for _ in range(60):
        unseen.note_worth(5.0, poor, 1.5, 16, 1)
    sent = [unseen.is_sent(batch) for _ in range(7 * RETRY)]
    assert TRIES <= sum(sent) <= 3 * TRIES  # one tree tells little: a few in a row
    assert sent[RETRY - 1 : RETRY - 1 + TRIES] == [True] * TRIES and not sent[RETRY - 1 + TRIES]
    assert unseen.is_sent(batch_of_one(None)) and unseen.wins(batch_of_one(None), rich, 16)


def test_a_stall_is_no_price_and_habits_can_change() -> None:
    """One slow moment is not believed for long; what it adds is as of late."""
    costly, batch = Costly(), batch_of_one(Price())
    for _ in range(200):
        costly.note(0.1, POOR, Promise(2.0, 1.5, 6))
    costly.note(60.0, POOR, Promise(2.0, 1.5, 6))
    assert costly.pays(batch, POOR)
    for _ in range(40):
        costly.note(0.1, POOR, Promise(1.0, 0.2, 2))
    assert not costly.pays(batch, POOR)


def test_one_that_does_not_pay_is_asked_ever_more_rarely_until_it_does() -> None:
    costly, batch = Costly(), batch_of_one(Price())
    for _ in range(AT_FIRST):
        assert costly.pays(batch, POOR)
        costly.note(5.0, POOR, Promise(1.2, 0.3, 6))
    assert sum(costly.pays(batch, POOR) for _ in range(8 * LONGEST_RETRY)) < 20 * TRIES
    for _ in range(80):
        costly.note(0.01, POOR, Promise(2.5, 1.5, 6))
    assert costly.pays(batch, POOR)
    for _ in range(40):
        costly.note(5.0, POOR, Promise(1.2, 0.3, 6))
    assert any(costly.pays(batch, POOR) for _ in range(2 * RETRY))  # as in the beginning


def test_what_pays_is_a_matter_of_the_whole_batch() -> None:
    """Four texts in a pass that costs little more than one's: all of their tokens count, those of
    the others' guesses too, and the rows that are scored then."""
    four = Batch((None,) * 4, (9,) * 4, None, "distribution", Price())  # type: ignore[arg-type]
    others = Promise(4 * 1.8 / 1.12, 0.8, 3)

    def judged(seconds: float, gain: float, width: int) -> bool:
        costly = Costly()
        assert costly.pays(four, others)
        costly.note(seconds, others, Promise(0.0, gain, width), texts=4)
        return costly.pays(four, others)  # a batch of four is as good as four tries

    assert judged(0.1, 1.6, 6)  # 4 * 2.6 tokens in 1.34, where there are 4 * 1.8 in 1.12
    assert not judged(0.1, 0.9, 6)  # 4 * 1.9
    assert not judged(0.9, 1.6, 6)  # in 2.14
    assert not judged(0.1, 1.6, 30)  # in 2.3


def test_trees_nobody_sees_are_sent_where_most_of_them_turned_out_well() -> None:
    """By the situation that it was in most often; and by what the others promise, lately."""
    unseen, batch = Unseen(), batch_of_one(Price())
    rich = Promise(4.0 / 1.05, 3.0, 5)
    for _ in range(20):
        unseen.note_others(POOR)
        unseen.note_worth(0.1, POOR, 1.5, 16, 1)
    unseen.note_worth(0.1, rich, 0.0, 16, TRIES)
    assert unseen.is_sent(batch)
    for _ in range(60):
        unseen.note_others(rich)
    assert not unseen.is_sent(batch)  # 2.5 tokens in 1.26, where the others have come to 3.8
    for _ in range(4):
        unseen.note_others(POOR)
    assert unseen.is_sent(batch)  # back to less than 2.6 in no time
    taken = [unseen.wins(batch, rich, 16) for _ in range(8 * LONGEST_RETRY)]
    assert TRIES <= sum(taken) < 20 * TRIES
    # Of four texts all tokens count, and all rows: 4 * 2.5 in 1.64 or 2.6, against 4.3.
    four = Batch((None,) * 4, (9,) * 4, None, "distribution", Price())  # type: ignore[arg-type]
    usual = Promise(4 * 1.2 / 1.12, 0.2, 3)
    assert unseen.wins(four, usual, 16) and not unseen.wins(four, usual, 40)


def test_what_it_makes_up_for_after_a_pause_is_no_price() -> None:
    """Else it would seem dear because it is asked rarely, and be asked rarely for being dear."""
    costly, nothing, some = Costly(), Promise(1.0, 0.0, 1), Promise(2.0, 1.0, 4)
    for _ in range(TRIES + 2):
        costly.note(0.3, nothing, some)
    dear = batch_of_one(Price())
    assert costly.seconds == pytest.approx(0.3)
    rich = Promise(50.0, 1.9, 4)
    for _ in range(TRIES):
        costly.note(0.3, rich, rich)
    assert not costly.pays(dear, rich)
    costly.note(9.0, nothing, some)
    assert costly.seconds == pytest.approx(0.3)
    costly.note(9.0, nothing, some)  # asked at once again, and still slow
    assert costly.seconds > 0.31
