"""One step: what is asked of drafter and policy, what is verified, and where time counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from draftahead import Batch, Draft, Drafter, DrafterFaultWarning, SamplingParams
from draftahead.control.promises import Offer
from draftahead.control.rates import Usual
from draftahead.core import stats
from draftahead.core.detokenizer import Detokenizer, no_text
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft
from draftahead.core.types import ForwardOutput, Request, SequenceState, Verdict
from draftahead.drafters.none import NoDrafter
from draftahead.engine.engine import Engine
from recording_verifier import Recording

VOCAB_SIZE = 32


class Counting(Recording):
    """A target that counts: after each token comes the next number. A forward takes 1 s, a commit
    2 s."""

    vocab_size, max_context, device = VOCAB_SIZE, 99, torch.device("cpu")

    def __init__(self, *, fixed_shape: bool = False, max_nodes: int = 64) -> None:
        super().__init__(4)
        self.fixed_shape, self.max_nodes = fixed_shape, max_nodes
        self.first_forwards_compile = True
        self.verified: list[Draft | DeviceDraft] = []
        self.paths: list[list[list[int]]] = []
        self.timed = 0

    def supports_device_draft(self, draft: DeviceDraft, batch: Batch) -> bool:
        return True

    def timed_forward(self, num_nodes: int, num_entries: int) -> float:
        self.timed += 1
        return 1.0

    def forward(self, batch: Batch, draft: Draft | DeviceDraft) -> ForwardOutput:
        self.verified.append(draft)
        self.clock[0] += 1
        return ForwardOutput(F.one_hot(draft.token_tensor + 1, VOCAB_SIZE).float())

    def commit(self, draft: Draft, verdict: Verdict) -> None:
        self.paths.append(verdict.paths)
        self.clock[0] += 2


class Script(Drafter):
    """Proposes what a function returns, and counts its calls. Each takes its own time."""

    def __init__(self, function: Callable[[Batch], Any] = lambda batch: None) -> None:
        self.function = function
        self.calls: list[str] = []
        self.clock = [0.0]

    def _called(self, name: str, seconds: float) -> None:
        self.calls.append(name)
        self.clock[0] += seconds

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        self._called("propose", 4)
        return self.function(batch)  # type: ignore[no-any-return]

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        self._called("learn", 8)

    def release(self, sequence: SequenceState) -> None:
        self._called("release", 16)

    def idle_work(self) -> None:
        self._called("idle_work", 32)

    def explain(self) -> list[str]:
        return ["the drafter"]


class Adaptive(Script):
    adaptive = True
    expected_offer = Offer(Usual(), 0.5)  # type: ignore[assignment]


class Policy:
    """Notes what it is told. Verifies the root and `keeps` nodes of each tree."""

    def __init__(self, *, asks: bool = True, keeps: int = 1) -> None:
        self.answer, self.keeps = asks, keeps
        self.costs: Any = None
        self.calls: list[Any] = []
        self.observed: list[dict[str, Any]] = []

    def begin(self, batch: Batch) -> None:
        self.calls.append(("begin", len(batch.sequences)))

    def asks(self, num_sequences: int, expected_offer: Offer | None) -> bool:
        self.calls.append(("asks", num_sequences, expected_offer))
        return self.answer

    def note_no_draft(self) -> None:
        self.calls.append("no draft")

    def part_to_verify(self, draft: Draft) -> Draft:
        return draft.subset([range(min(1 + self.keeps, size)) for size in draft.num_nodes])

    def observe(
        self, batch: Batch, verdict: Verdict, proposed: Any, spent: Any, **others: Any
    ) -> None:
        self.observed.append({"proposed": proposed, "spent": tuple(spent), **others})

    def reasons(self) -> list[str]:
        return ["the policy"]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time passes only where a test lets it."""
    monkeypatch.setattr(stats.time, "perf_counter", lambda: CLOCK[0])
    return


CLOCK = [0.0]
PLAIN = NoDrafter(None)  # type: ignore[arg-type]


def engine_of(
    drafter: Drafter, policy: Policy | None = None, *, ahead: bool = False, **options: Any
) -> tuple[Engine, Counting]:
    verifier = Counting(**options)
    verifier.clock = CLOCK
    if isinstance(drafter, Script):
        drafter.clock = CLOCK
    engine = Engine(
        verifier,  # type: ignore[arg-type]
        drafter,
        no_text,
        exact="distribution",
        rule="block",
        lossless=True,
    )
    engine.policy = policy or Policy()  # type: ignore[assignment]
    engine._launches_ahead = ahead
    return engine, verifier


def add(engine: Engine, root: int = 1, **params: Any) -> SequenceState:
    given = SamplingParams(**({"temperature": 0, "max_tokens": 9} | params))
    (sequence,) = engine.add(Request((0, root), given, 0))
    return sequence


def chain(*tokens: int, confidence: list[float] | None = None) -> Callable[[Batch], Draft]:
    """The same tokens for every sequence."""

    def propose(batch: Batch) -> Draft:
        count = len(batch.sequences)
        stated = None if confidence is None else [confidence] * count
        return Draft.chains(batch.roots, [tokens] * count, stated)

    return propose


class Timer:
    """The trees took 0.25 s, their verification 0.75 s."""

    def mark(self) -> None: ...

    def laps(self) -> list[float]:
        return [0.25, 0.75]


def device_trees(batch: Batch) -> DeviceDraft:
    """Two children of the root: the next number, and another."""
    parts = [
        [[root, root + 9, root + 1], [-1, 0, 0], [CONFIDENCE_SCALE] * 3] for root in batch.roots
    ]
    return DeviceDraft.of_trees(batch.roots, torch.tensor(parts), Timer())


def draw(batch: Batch) -> None:
    roots = torch.tensor(batch.roots)
    batch.draft_sampler.draw(F.one_hot(roots + 1, VOCAB_SIZE).float())


# -------------------------------------------------------------------------------------- the step


def test_a_step_emits_the_accepted_tokens_and_the_targets_own() -> None:
    drafter = Script(chain(2, 3, 9))
    engine, verifier = engine_of(drafter)
    one = add(engine)
    assert engine.step() == [one]
    assert one.output == [2, 3, 4]
    assert one.drafted == [True, True, False]
    assert verifier.paths == [[[0, 1, 2]]]
    assert (one.stats.steps, one.stats.drafted, one.stats.accepted) == (1, 3, 2)
    assert (one.stats.drafted_at, one.stats.accepted_at) == ([1, 1, 1], [1, 1, 0])
    assert (one.stats.steps_by_nodes, one.stats.seconds_by_nodes) == ([0, 0, 0, 1], [0, 0, 0, 3])
    assert drafter.calls == ["propose", "learn"]


def test_without_requests_there_is_no_step() -> None:
    engine, verifier = engine_of(Script())
    assert engine.step() == []
    assert verifier.verified == []


def test_sequences_that_ended_are_released() -> None:
    drafter = Script(chain(2))
    engine, _ = engine_of(drafter)
    short, long = add(engine, max_tokens=2), add(engine)
    assert engine.step() == [short, long]
    assert engine.scheduler.running == [long]
    assert drafter.calls == ["propose", "learn", "release"]
    engine.release(long)
    engine.release(long)  # has no more effect
    assert drafter.calls == ["propose", "learn", "release", "release"]


def test_a_request_has_a_sequence_for_each_sample() -> None:
    engine, _ = engine_of(PLAIN)
    request = Request((0, 1), SamplingParams(temperature=1.0, max_tokens=9, n=2), 0)
    first, second = engine.add(request)
    assert (first.id, first.sample, second.id, second.sample) == (0, 0, 1, 1)
    assert first.rng_key != second.rng_key
    assert first.stats.prompt_tokens == 2
    assert [*engine.scheduler.waiting] == [first, second]


# ------------------------------------------------------------------------- when a draft is asked


def test_plain_decoding_asks_nothing() -> None:
    policy = Policy()
    engine, verifier = engine_of(PLAIN, policy)
    one = add(engine, max_tokens=2)
    engine.step()
    engine.step()
    assert one.output == [2, 3]
    assert [draft.token_tensor.tolist() for draft in verifier.verified] == [[[1]], [[2]]]
    assert policy.calls == policy.observed == []
    assert engine.explain() == ["plain decoding: the drafter is 'none'"]


def test_the_last_token_is_not_drafted() -> None:
    drafter, policy = Script(chain(2)), Policy()
    engine, _ = engine_of(drafter, policy)
    add(engine, max_tokens=1)
    engine.step()
    assert drafter.calls == ["release"]
    assert policy.calls == []
    add(engine, max_tokens=1)
    add(engine)
    engine.step()  # the other sequence is drafted for
    assert drafter.calls[1:] == ["propose", "learn", "release"]


def test_a_drafter_that_was_given_up_is_not_asked() -> None:
    drafter = Script(lambda batch: "nonsense")
    engine, _ = engine_of(drafter)
    one = add(engine, max_tokens=12)
    with pytest.warns(DrafterFaultWarning):
        for _ in range(10):
            engine.step()
    assert one.output == [*range(2, 12)]
    assert drafter.calls == ["propose", "learn"] * 8


def test_the_policy_decides_whether_an_adaptive_drafter_is_asked() -> None:
    for answer in (True, False):
        drafter, policy = Adaptive(chain(2)), Policy(asks=answer)
        engine, _ = engine_of(drafter, policy)
        add(engine)
        add(engine)
        engine.step()
        assert drafter.calls == (["propose", "learn"] if answer else [])
        assert policy.calls == [("begin", 2), ("asks", 2, drafter.expected_offer)]
        assert [step["asked"] for step in policy.observed] == [answer]


def test_another_drafter_is_asked_at_every_step() -> None:
    class Offers(Script):
        @property
        def expected_offer(self) -> Any:
            raise AssertionError("not asked for")

    drafter, policy = Offers(chain(2)), Policy(asks=False)
    engine, _ = engine_of(drafter, policy)
    add(engine)
    engine.step()
    assert drafter.calls == ["propose", "learn"]
    assert policy.calls == [("begin", 1)]
    assert [step["asked"] for step in policy.observed] == [False]
    assert engine.explain() == ["the policy", "the drafter"]


@pytest.mark.parametrize(
    ("adaptive", "fixed_shape", "surveyed"),
    [(True, False, True), (False, False, False), (True, True, False), (False, True, False)],
)
def test_forwards_are_timed_at_first_where_the_policy_needs_it(
    adaptive: bool, fixed_shape: bool, surveyed: bool
) -> None:
    _, verifier = engine_of(Adaptive() if adaptive else Script(), fixed_shape=fixed_shape)
    assert (verifier.timed > 0) == surveyed


def test_a_drafter_becomes_adaptive_with_its_first_confidence() -> None:
    drafter = Script(draw)
    engine, _ = engine_of(drafter)
    add(engine)
    confident = chain(2, confidence=[0.5])
    for function, adaptive in ((draw, False), (chain(3), False), (confident, True), (draw, True)):
        drafter.function = function
        engine.step()
        assert engine.adaptive == adaptive
    drafter.function = chain(9)
    engine.step()
    assert engine.adaptive


def test_device_trees_of_a_fixed_size_stay_fixed() -> None:
    """Their confidence comes with every tree. If the policy paused them, time would decide the
    text of sampled requests."""
    policy = Policy()
    engine, verifier = engine_of(Script(device_trees), policy)
    add(engine)
    for _ in range(3):
        engine.step()
    assert not engine.adaptive
    assert all(isinstance(draft, DeviceDraft) for draft in verifier.verified)


def test_no_draft_is_noted() -> None:
    policy = Policy()
    engine, verifier = engine_of(Script(), policy)
    one = add(engine)
    engine.step()
    assert one.output == [2]
    assert policy.calls == [("begin", 1), "no draft"]
    assert verifier.verified == [Draft.root_only([1])]


# ------------------------------------------------------------------------------ what is verified


def branches(batch: Batch) -> Draft:
    """A tree of five nodes and depth 2, and a chain of two."""
    trees = [[(2, 0), (7, 0), (3, 1), (8, 2)], [(6, 0)]]
    return Draft.trees(batch.roots, trees[: len(batch.sequences)])


def verified(engine: Engine, verifier: Counting) -> Draft:
    engine.step()
    (draft,) = verifier.verified
    assert isinstance(draft, Draft)
    return draft


def test_a_draft_within_the_limits_is_verified_whole() -> None:
    engine, verifier = engine_of(Script(branches), max_nodes=5)
    one, other = add(engine, max_tokens=3), add(engine, 5, max_tokens=2)
    draft = verified(engine, verifier)
    assert draft.num_nodes == [5, 2]
    assert draft.parents == [[-1, 0, 0, 1, 2], [-1, 0, 0, 0, 0]]
    assert (one.stats.drafted, other.stats.drafted) == (4, 1)
    assert (one.stats.drafted_at, other.stats.drafted_at) == ([1, 1], [1])


def test_nodes_below_max_depth_are_dropped() -> None:
    engine, verifier = engine_of(Script(branches))
    add(engine, max_tokens=2), add(engine, 5, max_tokens=1)
    draft = verified(engine, verifier)
    assert draft.tokens == [[1, 2, 7], [5, 5, 5]]
    assert draft.num_nodes == [3, 1]


def test_nodes_beyond_the_size_of_a_forward_are_dropped() -> None:
    engine, verifier = engine_of(Script(branches), max_nodes=4)
    add(engine), add(engine, 5)
    draft = verified(engine, verifier)
    assert draft.tokens == [[1, 2, 7, 3], [5, 6, 5, 5]]
    assert draft.num_nodes == [4, 2]


def test_forwards_of_fixed_shape_verify_the_first_child_of_each_node() -> None:
    engine, verifier = engine_of(Script(branches), fixed_shape=True)
    add(engine), add(engine, 5)
    draft = verified(engine, verifier)
    assert draft.tokens == [[1, 2, 3], [5, 6, 5]]
    assert draft.num_nodes == [3, 2]


CONFIDENT = chain(2, 3, confidence=[0.5, 0.25])


def test_the_policy_cuts_a_draft_with_confidence() -> None:
    policy = Policy()
    engine, verifier = engine_of(Adaptive(CONFIDENT), policy)
    one = add(engine)
    assert verified(engine, verifier) == Draft.chains([1], [[2]], [[0.5]])
    assert one.output == [2, 3]
    (step,) = policy.observed
    assert step == {
        "proposed": Draft.chains([1], [[2, 3]], [[0.5, 0.25]]),  # the whole draft
        "spent": (12.0, 3.0),
        "width": 2,
        "asked": True,
        "unseen": False,
    }


def test_forwards_of_fixed_shape_verify_a_draft_with_confidence_whole() -> None:
    policy = Policy()
    engine, verifier = engine_of(Adaptive(CONFIDENT), policy, fixed_shape=True)
    add(engine)
    assert verified(engine, verifier).num_nodes == [3]
    assert policy.observed[0]["width"] == 1  # its nodes cost nothing


def test_a_draft_without_confidence_is_verified_whole() -> None:
    engine, verifier = engine_of(Script(chain(2, 3)))
    add(engine)
    assert verified(engine, verifier).num_nodes == [3]


def test_a_device_draft_is_verified_as_it_is() -> None:
    policy = Policy()
    engine, verifier = engine_of(Adaptive(device_trees), policy)
    one = add(engine)
    engine.step()
    assert isinstance(verifier.verified[0], DeviceDraft)
    assert one.output == [2, 3]
    (step,) = policy.observed
    assert step["proposed"] == Draft.trees([1], [[(10, 0), (2, 0)]], [[1.0, 1.0]])
    assert (step["width"], step["unseen"]) == (3, True)


# --------------------------------------------------------------------------- where time counts


def test_the_time_of_a_step_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of(Script(chain(2, 3)))
    logprobs = engine.scheduler.logprobs

    def slow(*args: Any) -> Any:
        CLOCK[0] += 64
        return logprobs(*args)

    monkeypatch.setattr(engine.scheduler, "logprobs", slow)
    one = add(engine, max_tokens=3)
    engine.step()
    assert one.stats.draft_seconds == 4 + 8  # propose and learn
    assert one.stats.verify_seconds == 1 + 2  # the forward and the commit
    assert one.stats.other_seconds == 64 + 16  # log-probabilities and release
    assert one.stats.seconds_by_nodes == [0, 0, 3]


def test_the_time_of_device_trees_is_that_of_drafting() -> None:
    """Of the 3 s for which the host waited, 0.75 s were the verification."""
    engine, _ = engine_of(Adaptive(device_trees))
    one = add(engine)
    engine.step()
    assert one.stats.draft_seconds == 4 + 8 + 2.25
    assert one.stats.verify_seconds == 0.75


def test_the_time_between_steps_does_not_count() -> None:
    """A step that was launched ahead: the reader of a stream may do something else meanwhile."""
    drafter = Script(chain(9))
    engine, _ = engine_of(drafter, ahead=True)
    one = add(engine, max_tokens=2)
    engine.step()
    CLOCK[0] += 1000
    assert engine.step() == [one]
    # The second step has no draft. The idle work after its launch is in its time.
    assert one.stats.draft_seconds == 4 + 8
    assert one.stats.verify_seconds == 2 * (1 + 2) + 32
    assert one.stats.other_seconds == 16
    assert drafter.calls == ["propose", "learn", "idle_work", "release"]


# ------------------------------------------------------------------------------- launching ahead


def test_the_next_forward_is_launched_before_a_step_returns() -> None:
    for ahead in (False, True):
        engine, verifier = engine_of(PLAIN, ahead=ahead)
        one = add(engine, max_tokens=2)
        engine.step()
        assert len(verifier.verified) == 1 + ahead
        engine.step()
        assert len(verifier.verified) == 2
        assert one.output == [2, 3]
        assert engine.step() == []


def test_a_launch_that_fails_does_not_repeat_the_step_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, verifier = engine_of(PLAIN, ahead=True)
    one, forward = add(engine, max_tokens=3), verifier.forward
    engine.step()

    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(verifier, "forward", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert one.output == [2, 3]
    assert one.stats.steps == 2
    monkeypatch.setattr(verifier, "forward", forward)
    engine.step()
    assert one.output == [2, 3, 4]


def test_a_forward_is_launched_again_if_one_of_its_sequences_is_released() -> None:
    engine, verifier = engine_of(PLAIN, ahead=True)
    synchronized = []
    verifier.synchronize = lambda: synchronized.append(1)  # type: ignore[method-assign]
    given_up, kept = add(engine), add(engine, 5)
    engine.step()
    synchronized.clear()
    engine.release(given_up)
    assert synchronized == [1]
    assert len(verifier.verified) == 2
    engine.step()
    assert len(verifier.verified) == 4
    assert given_up.output == [2]
    assert kept.output == [6, 7]


def test_a_forward_goes_on_if_a_waiting_sequence_is_released() -> None:
    engine, verifier = engine_of(PLAIN, ahead=True)
    running = add(engine)
    engine.step()
    waiting, before = add(engine, 5), CLOCK[0]
    engine.release(waiting)
    assert CLOCK[0] == before  # it was not waited for
    engine.step()
    assert len(verifier.verified) == 3
    assert running.output == [2, 3]


def test_a_sequence_that_is_given_up_shows_an_incomplete_character() -> None:
    engine, _ = engine_of(PLAIN)
    one = add(engine)
    one.detokenizer = Detokenizer(lambda ids: "".join("xxab�"[token] for token in ids))
    for _ in range(3):
        engine.step()
    assert one.detokenizer.text == "ab"
    engine.release(one)
    assert one.detokenizer.text == "ab�"
