"""The policy on a simulated machine: every time is given, none is taken."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from draftahead import LLM, Batch, Drafter, ForwardOutput, SamplingParams
from draftahead.control import policy as policy_module
from draftahead.control.policy import LOSS, Costs, Policy, Spent
from draftahead.control.promises import Offer
from draftahead.control.rates import Calibration, Usual
from draftahead.core import stats
from draftahead.core.draft import Draft
from draftahead.drafters.base import validated_confidence
from draftahead.engine.engine import likeliest, outcomes

FLAT = dict.fromkeys(range(1, 129), 1.0)  # rows cost nothing
STEEP = {n: float(n) for n in range(1, 129)}  # every row costs a whole pass
STAIRS = {n: 1.0 if n <= 8 else 1.9 if n <= 16 else 0.12 * n for n in range(1, 129)}


def seasoned(times: dict[int, float]) -> Policy:
    """A policy that has seen every width on such a machine."""
    policy = Policy()
    for _ in range(60):
        for rows in (1, 2, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64):
            policy.costs.note_pass(rows, times[rows])
    return policy


def test_free_rows_are_all_used() -> None:
    assert seasoned(FLAT).width([[0.9, 0.8, 0.3, 0.1, 0.05]]) == 6


def test_rows_as_dear_as_passes_are_never_used() -> None:
    assert seasoned(STEEP).width([[0.95, 0.9, 0.85]]) == 1


def test_a_step_of_the_staircase_is_filled_and_not_climbed_for_little() -> None:
    policy = seasoned(STAIRS)
    assert policy.width([[0.6] * 4 + [0.05] * 12]) <= 8
    assert policy.width([[0.95] * 15]) == 16


def test_a_batch_shares_the_staircase() -> None:
    """The same claims: eight rows for one text, two each for four of them."""
    policy, confidence = seasoned(STAIRS), [0.6, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1]
    assert policy.width([confidence]) == 8
    assert policy.width([confidence] * 4) <= 4
    assert policy.width([confidence] * 16) == 1


def test_what_drafting_took_is_no_reason_to_waste_it() -> None:
    policy = seasoned(FLAT)
    for _ in range(40):
        policy.costs.note_drafting(2.0)
    assert policy.width([[0.5, 0.3]]) == 3


def test_nodes_are_ranked_by_what_they_are_worth() -> None:
    """Claims of 0.9 that never come true are worth less than honest ones of 0.5."""
    policy = seasoned(FLAT)
    for _ in range(200):
        policy.calibration.note(0.95, False)
        policy.calibration.note(0.55, True)
    worth = policy.worth([0.95, 0.55, 0.95], [-1, 0, 0, 2])
    assert worth[0] < 0.1 < 0.9 < worth[1]
    assert worth[2] < 0.1
    assert likeliest(worth, 2) == [0, 2]


def test_claims_are_worth_what_they_turned_out_to_be() -> None:
    calibration = Calibration()
    chance = random.Random(0)
    for _ in range(500):
        calibration.note(0.85, chance.random() < 0.3)
    assert calibration(0.88) == pytest.approx(0.3, abs=0.12)
    assert calibration(0.15) == pytest.approx(0.15)  # nothing was seen there


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


def run(policy: Policy, steps: int, accepted: float, drafting: float, row: float) -> float:
    """A text on a machine where a pass takes 1 + row * (rows - 1); the drafter claims 0.9 for each
    of three guesses, and each is right with a chance of its own. Returns the speed-up."""
    chance = random.Random(1)
    spent = tokens = 0.0
    for _ in range(steps):
        asked, width, said = not policy.guard.closed(), 1, list[float]()
        if asked:
            confidence = [0.9, 0.81, 0.73]
            width = policy.width([policy.worth(confidence, [-1, 0, 1, 2])])
            said = confidence[: width - 1]
        kept = 0
        while kept < len(said) and chance.random() < accepted:
            kept += 1
        seconds = Spent(drafting if asked else 0.0, 1 + row * (width - 1))
        known = confidence[: kept + 1] if asked else []  # the target's own token tells of one more
        notes = [(claim, node < kept) for node, claim in enumerate(known)]
        policy.note(1, width, kept + 1, seconds, notes, asked=asked)
        spent += sum(seconds)
        tokens += kept + 1
    return tokens / spent


def test_a_drafter_that_is_never_right_costs_next_to_nothing() -> None:
    assert run(Policy(), 400, accepted=0.0, drafting=0.02, row=0.05) > 0.97


def test_a_drafter_that_sleeps_is_switched_off() -> None:
    policy = Policy()
    run(policy, 12, accepted=0.5, drafting=5.0, row=0.02)
    assert policy.guard.pauses  # within a few steps
    policy = Policy()
    speed = run(policy, 2000, accepted=0.5, drafting=5.0, row=0.02)
    assert policy.guard.pauses <= 8  # 16, 32, 64, ... 1024 steps apart
    assert speed > 1 / (1.03 + policy.guard.pauses * 5.0 / 2000)  # plain, and the probes


def test_a_good_drafter_is_left_alone() -> None:
    policy = Policy()
    assert run(policy, 400, accepted=0.8, drafting=0.02, row=0.03) > 2.0
    assert policy.guard.pauses == 0


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


class Sleeper(Drafter):
    """Takes five passes' time for guesses that it is sure of and that are wrong."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.calls = clock, 0

    def propose(self, batch: Batch) -> Draft | None:
        self.calls += 1
        self.clock[0] += 5.0
        return Draft.chains(batch.roots, [[1]] * len(batch.roots), [[0.9]] * len(batch.roots))


def test_the_engine_stops_asking_a_drafter_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only drafting and passes move, in the real engine."""
    now = [0.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    sleeper = Sleeper(now)
    llm = LLM(zoo.tiny("llama"), sleeper, max_batch=1)
    score = llm.engine.verifier.score

    def passing(batch: Batch, draft: Draft) -> ForwardOutput:
        now[0] += 1.0
        return score(batch, draft)

    monkeypatch.setattr(llm.engine.verifier, "score", passing)
    out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))[
        0
    ]
    assert len(out.token_ids) == 120
    assert 1 <= sleeper.calls <= 4  # after 16, 32 and 64 steps
    assert llm.engine.policy.guard.pauses == sleeper.calls


@given(
    confidence=st.lists(st.floats(0, 1), min_size=0, max_size=12),
    parents=st.lists(st.integers(0, 100), min_size=12, max_size=12),
    width=st.integers(1, 14),
)
def test_what_is_kept_hangs_together(
    confidence: list[float], parents: list[int], width: int
) -> None:
    """Whatever a drafter claims, no node is scored without its parent."""
    tree = [(5, parent % (node + 1)) for node, parent in enumerate(parents[: len(confidence)])]
    draft = Draft.trees([1], [tree], [confidence])
    (sound,) = validated_confidence(draft) or [[]]
    kept = likeliest(sound, width)
    assert len(kept) == min(width, 1 + len(confidence))
    assert all(draft.parents[0][node] in kept for node in kept[1:])


def test_claims_that_make_no_sense_are_dropped() -> None:
    for confidence in ([[0.5]], [[0.5, 1.5]], [[float("nan"), 0.1]], [[0.1, 0.2, 0.3]]):
        draft = Draft.chains([1], [[2, 3]], confidence)
        assert validated_confidence(draft) is None
    assert validated_confidence(Draft.chains([1], [[2, 3]], [[0.5, 0.9]])) == [[0.5, 0.5]]


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


def test_keys_make_rows_dearer_and_drafts_smaller() -> None:
    policy, confidence = Policy(), [[0.5, 0.35, 0.25, 0.2, 0.15, 0.1, 0.08]]
    policy.costs.survey(lambda rows, keys: 1 + 0.01 * rows + 1e-4 * rows * keys, room=4096)
    widths = []
    for keys in (0, 1000, 4000, 16000):
        policy.costs.situate(1, keys)
        widths.append(policy.width(confidence))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 8 and widths[-1] < 4


def test_a_slow_machine_is_not_measured_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr(policy_module.time, "perf_counter", lambda: now[0])

    def timed(rows: int, keys: int) -> float:
        calls.append(rows)
        now[0] += 2.0
        return 2.0

    costs = Costs()
    costs.survey(timed, room=4096)
    assert calls == [1, 1]  # once to warm up, once for the time
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


def test_reasons_are_those_of_the_run() -> None:
    target = zoo.tiny("llama")
    llm = LLM(target, "auto", max_batch=1)
    assert llm.explain() == ["nothing has been decoded yet"]
    out = llm.generate([[1, 2, 3] * 4], SamplingParams(temperature=0, max_tokens=30))[0]
    said = "\n".join(llm.explain())
    assert f"{out.stats.steps} steps; nodes scored a text" in said
    assert f"{30 / out.stats.steps:.2f} tokens a step" in said
    policy = Policy()
    run(policy, 12, accepted=0.0, drafting=5.0, row=0.02)
    policy.tally.paused = 7
    assert any("7 of them plain: drafting was paused (1x)" in line for line in policy.reasons())


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


def test_what_was_not_scored_is_learnt_from_too() -> None:
    """The target's own token tells of every guess that stood there; beyond it nobody knows."""
    tree = [(1, 0), (2, 1), (3, 2), (4, 1), (5, 4), (6, 0)]
    draft = Draft.trees([9], [tree], [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]])
    assert outcomes(draft, 0, [1, 2]) == [
        (0.9, True),
        (0.8, True),
        (0.6, False),
        (0.5, False),
        (0.4, False),
    ]


def test_where_rows_are_dear_the_drafter_is_hardly_asked() -> None:
    """Guesses worth their rows for one text are not for sixteen; and back."""
    policy, confidence = seasoned(STAIRS), [0.4, 0.3, 0.2]
    policy.costs.note_drafting(0.05)
    for _ in range(100):
        assert policy.asks(1)
        assert policy.width([confidence]) > 1
    asked = sum(policy.asks(16) for _ in range(640))
    assert asked == 10  # now and then, to see whether it has got better
    assert policy.tally.hopeless == 630
    assert policy.asks(1)
    for _ in range(100):  # a drafter that becomes sure of everything is asked again
        policy.width([[0.99] * 15] * 4)
    assert all(policy.asks(4) for _ in range(100))


def test_what_a_drafter_could_offer_besides_is_reason_to_ask_it() -> None:
    """What it proposed lately was without its best part, and does not tell."""
    policy, usual = seasoned(STAIRS), Usual()
    policy.costs.note_drafting(0.05)
    for _ in range(40):
        policy.width([[0.01]])
        usual.note([0.9, 0.8, 0.7])
    policy.asks(1)
    assert not policy.asks(1)
    assert policy.asks(1, Offer(usual, 0.3))
    assert not policy.asks(1, Offer(usual, 9.0))
    assert not policy.asks(1, Offer(Usual(), 0.0))


class Modest(Drafter):
    """Says of itself that it could do better."""

    adaptive, expected_offer = True, None

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, batch: Batch) -> Draft:
        self.asked += 1
        return Draft.chains(batch.roots, [[0]] * len(batch.sequences), [[0.0]])


def test_the_engine_hears_what_a_drafter_has_in_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whose guesses are worth nothing; one of them says that it has others."""
    monkeypatch.setattr(policy_module.Guard, "closed", lambda self: False)
    usual, asked = Usual(), []
    usual.note([0.9, 0.8, 0.7])
    for expected_offer in (None, Offer(usual, 0.0)):
        drafter = Modest()
        drafter.expected_offer = expected_offer  # type: ignore[assignment]
        llm = LLM(zoo.tiny("llama"), drafter, max_batch=1)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        asked.append(drafter.asked)
    assert asked[0] < 50 < asked[1]


def test_what_is_set_up_is_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling and recording count as time, not as what a step costs; and what a stage waited for
    goes to whom it was for."""
    now = [0.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    clock = stats.StepTimer()
    now[0] += 1.0
    clock.lap("draft_seconds")
    with stats.CompileTime.counted():
        now[0] += 30.0
    now[0] += 5.0
    clock.lap("verify_seconds")
    assert clock.spent == {"draft_seconds": 1.0, "verify_seconds": 35.0}
    assert clock.price("verify_seconds") == pytest.approx(5.0)
    # A device's clock may have run while something was recorded: it does not tell for whom.
    clock.shift("verify_seconds", "draft_seconds", but=34.0)
    assert clock.price("verify_seconds") == pytest.approx(5.0)
    assert clock.price("draft_seconds") == pytest.approx(1.0)
    clock = stats.StepTimer()
    with stats.CompileTime.counted():
        now[0] += 30.0
    now[0] += 1.0
    clock.lap("draft_seconds")
    now[0] += 5.0
    clock.lap("verify_seconds")
    clock.shift("verify_seconds", "draft_seconds", but=2.0)
    assert clock.spent == {"draft_seconds": 34.0, "verify_seconds": 2.0}
    assert clock.price("verify_seconds") == pytest.approx(2.0)
    assert clock.price("draft_seconds") == pytest.approx(4.0)


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


def test_what_a_drafter_makes_up_for_is_no_price() -> None:
    """Else one that is asked rarely would seem too dear to be asked."""
    policy = seasoned(FLAT)
    for _ in range(10):
        policy.note(1, 4, 2, Spent(0.5, 1.0), [], asked=True)
    policy.note(1, 1, 1, Spent(0.0, 1.0), [], asked=False)
    policy.note(1, 4, 2, Spent(20.0, 1.0), [], asked=True)
    assert policy.costs.drafting == pytest.approx(0.5)
    policy.note(1, 4, 2, Spent(20.0, 1.0), [], asked=True)
    assert policy.costs.drafting > 0.6
