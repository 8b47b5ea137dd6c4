"""The expensive drafter behind `auto`: when it is asked, and what its confidence is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import drafted
import zoo
from draftahead import LLM, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.control.promises import AT_FIRST, Promise, Unseen
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft
from draftahead.core.types import Batch, Request, Verdict
from draftahead.drafters.auto import Auto, Guess, Sent, promised
from draftahead.drafters.base import DrafterContext
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.drafter import Eagle

POOR = Promise(1.2 / 1.02, 0.2, 2)  # what others promise where they know little


class Price:
    def of(self, rows: int) -> float:
        return 1.0 + 0.01 * rows


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


def auto_of(cheap: dict[str, Drafter], expensive: Drafter | None = None) -> Auto:
    """Behind which these drafters are."""

    def load(name: str) -> Any:
        raise NotImplementedError

    auto = Auto(DrafterContext(torch.device("cpu"), torch.float32, 99, None, 1, 64, load))
    auto.cheap, auto.other, auto.name = cheap, expensive, "expensive"
    return auto


def test_claims_are_worth_what_such_claims_of_theirs_came_to() -> None:
    auto = auto_of({})
    auto.most = 1
    for _ in range(200):
        auto._calibrations["boaster",].note(0.95, False)
    boast, modest = Guess(1, 0, 1, ("boaster",), 0.95), Guess(2, 0, 1, ("modest",), 0.55)
    (chosen,) = auto._chosen([boast, modest])
    assert (chosen.token, chosen.worth) == (2, pytest.approx(0.55))
    # Of siblings the likelier has the first say, and the other what is left.
    auto = auto_of({})
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


def test_learn_and_release_reach_the_others() -> None:
    """Else texts that have ended would be kept for ever."""
    cheap, expensive = Noting(), Noting()
    auto = auto_of({"cheap": cheap}, expensive)
    auto.learn(None, None, None, Verdict([], []))  # type: ignore[arg-type]
    auto.release(None)  # type: ignore[arg-type]
    assert cheap.told == ["learn", "release"]
    assert expensive.told == ["release"]


class OnDevice(Noting):
    """A head whose trees a device builds; and its timer."""

    def observe(self, launched: DeviceDraft, draft: Draft) -> None:
        self.told.append("observe")

    def mark(self) -> None: ...

    def laps(self) -> list[float]:
        return [0.3, 0.9]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_device_draft_is_learnt_while_the_device_builds_the_next(is_cut: bool) -> None:
    """By what such confidence is worth, not by the luck of one step; and when there is time. As it
    was built, also where a part of it was verified."""
    cheap, head = Noting(), OnDevice()
    auto = auto_of({"cheap": cheap}, head)
    auto.costly = auto.unseen = Unseen()
    for _ in range(50):
        auto._calibrations["expensive",].note(0.55, True)
    confidence = [int(CONFIDENCE_SCALE * value) for value in (1.0, 0.55, 0.05, 0.35)]
    trees = torch.tensor([[[5, 7, 8, 9], [-1, 0, 0, 1], confidence]])
    launched = DeviceDraft.of_trees([5], trees, head)
    draft, _ = launched.to_host()
    assert draft.tokens == [[5, 7, 8, 9]]
    auto._sent = Sent(launched, POOR)
    draft, path = (draft.subset([[0, 2]]), [0, 1]) if is_cut else (draft, [0, 2])
    auto.learn(None, draft, None, Verdict([path], [[8, 4]]))  # type: ignore[arg-type]
    trees.zero_()  # by the next launch
    assert cheap.told == ["learn"]
    assert not auto.unseen.asked
    auto._sent, auto._trees = None, [[Guess(3, 0, 1, ("cheap",), 0.5)]]  # the next are on their way
    auto.idle_work()
    auto.idle_work()  # nothing is learnt twice
    assert head.told == ["observe"]
    (now,) = auto.unseen.situations.values()
    assert (auto.unseen.asked, auto.unseen.seconds, now.asked, now.width) == (1, 0.3, 1, 4.0)
    assert 1.2 < now.more < 1.5  # 0.9 or more, and 0.05, and 0.35; not the one that came true
    assert auto._scored == {"expensive": 1 if is_cut else 3}
    assert auto._kept == {"expensive": 1}
    assert auto._calibrations["expensive",].rates.seen()[0][0] > 0.2
    assert ("cheap",) not in auto._calibrations  # not of this step


def a_batch() -> Batch:
    (sequence,) = LLM(zoo.tiny("llama"), "none").engine.add(Request((9,), SamplingParams(), seed=1))
    return Batch((sequence,), (9,), None, "distribution", Price())  # type: ignore[arg-type]


def test_what_is_proposed_claims_what_it_is_worth() -> None:
    auto = auto_of({"boaster": Noting(claim=0.95)})
    for _ in range(200):
        auto._calibrations["boaster",].note(0.95, False)
    draft = auto.propose(a_batch())
    assert draft is not None and draft.confidence is not None
    assert draft.confidence[0][0] < 0.05


def test_a_number_that_is_asked_for_is_no_matter_of_what_pays() -> None:
    other, batch = Noting(), a_batch()
    auto = auto_of({}, other)
    for _ in range(AT_FIRST):
        auto.costly.note(5.0, Promise(1.0, 0.0, 1), Promise(1.0, 0.0, 1))
    assert auto.propose(batch) is None and not other.told
    auto.adaptive = False
    assert auto.propose(batch) is not None and other.told == ["propose"]


def test_a_costly_drafter_that_fails_is_not_asked_again() -> None:
    other, batch = Noting(fault=RuntimeError("out of order")), a_batch()
    auto = auto_of({}, other)
    auto._aside = {"recycle": (spare := Noting())}
    with pytest.warns(DrafterFaultWarning, match="expensive failed and is left out"):
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
    io.save(drafted.random_head(target), tmp_path, with_lm_head=True)
    monkeypatch.setattr("draftahead.loader.embedded.head_of", lambda model: tmp_path)
    auto = LLM(target, "auto").engine.drafter
    assert isinstance(auto, Auto) and isinstance(auto.other, Eagle)
