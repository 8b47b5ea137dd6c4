"""The policy on a simulated machine: every time is given, none is taken."""

from __future__ import annotations

import random

import pytest

import zoo
from draftahead import LLM, Batch, Drafter, ForwardOutput, SamplingParams
from draftahead.control import policy as policy_module
from draftahead.control.policy import Policy, Spent
from draftahead.control.promises import Offer
from draftahead.control.rates import Usual
from draftahead.core import stats, tree
from draftahead.core.draft import Draft
from draftahead.core.stats import StepTimer
from draftahead.models.verifier import Verifier

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
    assert tree.most_confident(worth, 1) == [0, 2]


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
    forward = llm.engine.verifier.forward

    def passing(batch: Batch, draft: Draft) -> ForwardOutput:
        now[0] += 1.0
        return forward(batch, draft)

    monkeypatch.setattr(llm.engine.verifier, "forward", passing)
    out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))[
        0
    ]
    assert len(out.token_ids) == 120
    assert 1 <= sleeper.calls <= 4  # after 16, 32 and 64 steps
    assert llm.engine.policy.guard.pauses == sleeper.calls


def test_keys_make_rows_dearer_and_drafts_smaller() -> None:
    policy, confidence = Policy(), [[0.5, 0.35, 0.25, 0.2, 0.15, 0.1, 0.08]]
    policy.costs.survey(lambda rows, keys: 1 + 0.01 * rows + 1e-4 * rows * keys, room=4096)
    widths = []
    for keys in (0, 1000, 4000, 16000):
        policy.costs.situate(1, keys)
        widths.append(policy.width(confidence))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 8 and widths[-1] < 4


def test_reasons_are_those_of_the_run() -> None:
    target = zoo.tiny("llama")
    llm = LLM(target, "auto", max_batch=1)
    assert llm.explain() == ["nothing has been decoded yet"]
    out = llm.generate([[1, 2, 3] * 4], SamplingParams(temperature=0, max_tokens=30))[0]
    said = "\n".join(llm.explain())
    assert f"{out.stats.steps} steps; tokens verified per sequence" in said
    assert f"{30 / out.stats.steps:.2f} tokens per step" in said
    policy = Policy()
    run(policy, 12, accepted=0.0, drafting=5.0, row=0.02)
    policy.tally.paused = 7
    assert any(
        "7 steps without drafting: drafting was paused (1x)" in line for line in policy.reasons()
    )


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
    # A machine on which everything takes as long: how busy it is decides nothing here.
    monkeypatch.setattr(StepTimer, "cost", lambda self, stage: 1e-3)
    monkeypatch.setattr(Verifier, "timed_forward", lambda self, num_nodes, kv_len: 1e-3)
    usual, asked = Usual(), []
    usual.note([0.9, 0.8, 0.7])
    for expected_offer in (None, Offer(usual, 0.0)):
        drafter = Modest()
        drafter.expected_offer = expected_offer  # type: ignore[assignment]
        llm = LLM(zoo.tiny("llama"), drafter, max_batch=1)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        asked.append(drafter.asked)
    assert asked[0] < 50 < asked[1]


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
