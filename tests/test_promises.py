"""Whether a drafter that takes its time is worth asking, and what guesses of several are worth."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import drafted
import zoo
from draftahead import LLM, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.control.promises import (
    AT_FIRST,
    LONGEST_RETRY,
    RETRY,
    TRIES,
    Costly,
    Promise,
    Unseen,
)
from draftahead.control.rates import Calibration, Usual
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft
from draftahead.core.types import Batch, Request, Verdict
from draftahead.drafters.auto import Auto, Guess, Sent, promised
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.drafter import Eagle
from test_auto import Price, batch_of_one

POOR = Promise(1.2 / 1.02, 0.2, 2)  # what others promise where they know little


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


class Steep:
    def of(self, rows: int) -> float:
        return 1.0 + 0.1 * rows


def test_a_promise_is_that_of_the_best_width() -> None:
    worths = [[0.2, 0.9, 0.1], [0.7, 0.05]]
    trees = [[Guess(i, 0, 1, ("a",), 0.5, worth) for i, worth in enumerate(w)] for w in worths]
    batch = Batch((None,) * 2, (9,) * 2, None, "distribution", Steep())  # type: ignore[arg-type]
    # Of each text the root and its best guess: 2 + 0.9 + 0.7 tokens in a pass of four rows.
    assert promised(trees, batch) == Promise(pytest.approx(3.6 / 1.4), pytest.approx(0.8), 2)
    assert promised([[], []], batch) == Promise(pytest.approx(2 / 1.2), 0.0, 1)


def bare(most: int = 15) -> Auto:
    """Without drafters."""
    auto = Auto.__new__(Auto)
    auto._calibrations, auto._trees, auto.most = defaultdict(Calibration), [], most
    auto._scored, auto._kept = Counter(), Counter()
    auto.cheap, auto.other, auto.name, auto._sent, auto._lesson = {}, None, "", None, None
    auto._together, auto._aside = Usual(), {}
    auto.costly, auto.unseen, auto.adaptive, auto.vocabulary = Costly(), None, True, 99
    return auto


def test_claims_are_worth_what_such_claims_of_theirs_came_to() -> None:
    auto = bare(most=1)
    for _ in range(200):
        auto._calibrations["boaster",].note(0.95, False)
    boast, modest = Guess(1, 0, 1, ("boaster",), 0.95), Guess(2, 0, 1, ("modest",), 0.55)
    (chosen,) = auto._chosen([boast, modest])
    assert (chosen.token, chosen.worth) == (2, pytest.approx(0.55))
    # Of siblings the likelier has the first say, and the other what is left.
    auto = bare()
    found = auto._chosen([Guess(1, 0, 1, ("a",), 0.65), Guess(2, 0, 1, ("b",), 0.85)])
    assert [guess.worth for guess in found] == [pytest.approx(0.15), pytest.approx(0.85)]


class Noting(Drafter):
    """Says one token, with a claim, or raises."""

    def __init__(self, token: int = 5, claim: float = 0.95, fault: Exception | None = None) -> None:
        self.token, self.claim, self.fault = token, claim, fault
        self.told: list[str] = []

    def propose(self, batch: Batch) -> Draft | None:
        self.told.append("propose")
        if self.fault is not None:
            raise self.fault
        return Draft.chains(batch.roots, [[self.token]], [[self.claim]])

    def learn(self, *_: Any) -> None:
        self.told.append("learn")

    def release(self, *_: Any) -> None:
        self.told.append("release")


def test_all_that_is_told_is_passed_on() -> None:
    """Texts that are over would otherwise be kept for ever."""
    auto, cheap, costly = bare(), Noting(), Noting()
    auto.cheap, auto.other, auto.name = {"cheap": cheap}, costly, "costly"
    auto.learn(None, Verdict([], []), SimpleNamespace(draft=None))  # type: ignore[arg-type]
    auto.release(None)  # type: ignore[arg-type]
    assert cheap.told == ["learn", "release"]
    assert costly.told == ["release"]


class Grown(Noting):
    def note_grown(self, draft: Draft) -> None:
        self.told.append("grown")

    def mark(self) -> None: ...

    def laps(self) -> list[float]:
        return [0.3, 0.9]


def test_what_a_device_grew_is_learnt_while_it_grows_the_next() -> None:
    """By what such claims are worth, not by the luck of one step; and when there is time for it."""
    auto, cheap, head = bare(), Noting(), Grown()
    auto.cheap, auto.other, auto.name = {"cheap": cheap}, head, "head"
    auto.costly = auto.unseen = Unseen()
    for _ in range(50):
        auto._calibrations["head",].note(0.55, True)
    sure = [
        [
            [5, 7, 8, 9],
            [-1, 0, 0, 1],
            [
                CONFIDENCE_SCALE,
                CONFIDENCE_SCALE * 0.55,
                CONFIDENCE_SCALE * 0.05,
                CONFIDENCE_SCALE * 0.35,
            ],
        ]
    ]
    draft = Draft.from_device(DeviceDraft([5], torch.tensor(sure).long(), head))
    assert draft.tokens == [[5, 7, 8, 9]]
    auto._sent = Sent(draft, POOR)
    scores: Any = SimpleNamespace(draft=draft.copied())
    auto.learn(None, Verdict([[0, 2]], [[8, 4]]), scores)  # type: ignore[arg-type]
    assert cheap.told == ["learn"]
    assert not auto.unseen.asked
    auto._sent, auto._trees = None, [[Guess(3, 0, 1, ("cheap",), 0.5)]]  # the next are on their way
    auto.idle_work()
    auto.idle_work()  # nothing is learnt twice
    assert head.told == ["grown"]
    (now,) = auto.unseen.situations.values()
    assert (auto.unseen.asked, auto.unseen.seconds, now.asked, now.width) == (1, 0.3, 1, 4.0)
    assert 1.2 < now.more < 1.5  # 0.9 or more, and 0.05, and 0.35; not the one that came true
    assert auto._scored == {"head": 3}
    assert auto._kept == {"head": 1}
    assert auto._calibrations["head",].rates.seen()[0][0] > 0.2
    assert ("cheap",) not in auto._calibrations  # not of this step


def a_batch() -> Batch:
    (sequence,) = LLM(zoo.tiny("llama"), "none").engine.add(Request((9,), SamplingParams(), seed=1))
    return Batch((sequence,), (9,), None, "distribution", Price())  # type: ignore[arg-type]


def test_what_is_proposed_claims_what_it_is_worth() -> None:
    auto = bare()
    auto.cheap = {"boaster": Noting(claim=0.95)}
    for _ in range(200):
        auto._calibrations["boaster",].note(0.95, False)
    draft = auto.propose(a_batch())
    assert draft is not None and draft.confidence is not None
    assert draft.confidence[0][0] < 0.05


def test_a_number_that_is_asked_for_is_no_matter_of_what_pays() -> None:
    auto, other = bare(), Noting()
    auto.other, auto.name, batch = other, "costly", a_batch()
    for _ in range(AT_FIRST):
        auto.costly.note(5.0, Promise(1.0, 0.0, 1), Promise(1.0, 0.0, 1))
    assert auto.propose(batch) is None and not other.told
    auto.adaptive = False
    assert auto.propose(batch) is not None and other.told == ["propose"]


def test_a_costly_drafter_that_fails_is_not_asked_again() -> None:
    auto, other = bare(), Noting(fault=RuntimeError("out of order"))
    auto.other, auto.name, batch = other, "costly", a_batch()
    auto._aside = {"recycle": (spare := Noting())}
    with pytest.warns(DrafterFaultWarning, match="costly failed and is left out"):
        assert auto.propose(batch) is None
    assert auto.cheap == {"recycle": spare}  # which was not needed beside it
    assert auto.propose(batch) is not None and other.told == ["propose"]
    assert spare.told == ["propose"]


def test_earlier_outputs_draft_where_that_is_asked_for() -> None:
    prompt, sampling = [1, 2, 3], SamplingParams(temperature=0, max_tokens=40)
    config = {"method": "auto", "num_speculative_tokens": 7, "shared_tokens": 1000}
    llm = LLM(zoo.tiny("llama"), config, max_batch=1)
    first, again, other = (
        llm.generate([prompt], sampling, namespace=scope)[0].stats.steps
        for scope in ("a", "a", "b")
    )
    assert again < 0.5 * first and again < 0.5 * other


def test_a_head_that_comes_with_the_model_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = zoo.tiny("llama")
    io.save(drafted.random_head(target), tmp_path, with_vocabulary=True)
    monkeypatch.setattr("draftahead.loader.embedded.head_of", lambda model: tmp_path)
    auto = LLM(target, "auto").engine.drafter
    assert isinstance(auto, Auto) and isinstance(auto.other, Eagle)


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
