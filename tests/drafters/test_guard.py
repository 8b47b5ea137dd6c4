"""A guarded drafter: its faults and invalid drafts mean no draft, and it cannot modify the engine's
data."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftahead import Batch, Draft, Drafter, DrafterFaultWarning
from draftahead.control.promises import Offer
from draftahead.control.rates import Usual
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceDraft
from draftahead.core.types import ForwardOutput, Verdict
from draftahead.drafters.guard import GuardedDrafter
from drafted import ZeroTimer
from toy import VOCAB_SIZE, batch_of_roots

OUTPUT = ForwardOutput(torch.zeros(1, 1, VOCAB_SIZE))
EMPTY = Draft.root_only([1])


class Fake(Drafter):
    """Proposes what a function returns."""

    def __init__(self, function: Callable[[Batch], Any] = lambda batch: None) -> None:
        self.function = function

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        return self.function(batch)  # type: ignore[no-any-return]


class ThreeMethods:
    """No subclass of Drafter, without the optional methods."""

    def propose(self, batch: Batch) -> None: ...

    def learn(self, *args: Any) -> None: ...

    def release(self, *args: Any) -> None: ...


def guarded(
    drafter: Any, supports: Callable[[DeviceDraft, Batch], bool] = lambda draft, batch: True
) -> GuardedDrafter:
    return GuardedDrafter(drafter, VOCAB_SIZE, supports)


def proposing(returned: Any, **options: Any) -> GuardedDrafter:
    return guarded(Fake(lambda batch: returned), **options)


def fail(batch: Batch) -> Any:
    raise RuntimeError("broken")


def draw(batch: Batch) -> list[int]:
    """Draws one token for each sequence."""
    logits = torch.zeros(len(batch.sequences), VOCAB_SIZE)
    return batch.draft_sampler.draw(logits).tolist()  # type: ignore[no-any-return]


def probs_of_width(width: int) -> Tensor:
    return torch.full((1, width, VOCAB_SIZE), 1 / VOCAB_SIZE)


# ------------------------------------------------------------------------------------ host drafts


def test_a_valid_draft_is_proposed_without_a_warning() -> None:
    batch = batch_of_roots(1, 2)
    stated = Draft.trees([1, 2], [[(3, 0), (0, 0)], [(2, 0)]], [[0.5, 0.25], [0.75]])
    assert proposing(stated).propose(batch) == stated


def test_stated_probs_are_dropped() -> None:
    stated = Draft([[1, 2]], [[-1, 0]], [2], probs=probs_of_width(2))
    found = proposing(stated).propose(batch_of_roots(1))
    assert isinstance(found, Draft)
    assert found.tokens == [[1, 2]]
    assert found.probs is None


def test_a_drafter_that_changes_its_draft_later_changes_its_own() -> None:
    stated = Draft.chains([1], [[2, 3]], [[0.5, 0.25]])
    found = proposing(stated).propose(batch_of_roots(1))
    assert stated.confidence is not None
    for values in (stated.tokens, stated.parents, stated.confidence):
        values[0][1] = 99
    stated.num_nodes[0] = 99
    assert found == Draft.chains([1], [[2, 3]], [[0.5, 0.25]])


@pytest.mark.parametrize(
    ("returned", "message"),
    {
        "of another type": ("guess", "TypeError: propose returned str, not a Draft or None"),
        "false, but not None": ([], "TypeError: propose returned list, not a Draft or None"),
        "another batch": (Draft.root_only([1, 1]), "ValueError: a draft of 2 trees for a batch"),
        "outside the vocabulary": (
            Draft.chains([1], [[VOCAB_SIZE]]),
            "ValueError: a token outside",
        ),
        "without tokens": (Draft([None], [[-1]], [1]), "TypeError: "),  # type: ignore[list-item]
        "confidence of words": (
            Draft.chains([1], [[2]], [["high"]]),  # type: ignore[list-item]
            "ValueError: could not convert",
        ),
    }.values(),
)
def test_an_invalid_draft_is_no_draft(returned: Any, message: str) -> None:
    drafter = proposing(returned)
    expected = f"^drafter Fake raised an exception and is ignored: {message}"
    with pytest.warns(DrafterFaultWarning, match=expected):
        assert drafter.propose(batch_of_roots(1)) is None


def test_a_drafter_that_raises_has_no_draft() -> None:
    expected = "^drafter Fake raised an exception and is ignored: RuntimeError: broken$"
    with pytest.warns(DrafterFaultWarning, match=expected):
        assert guarded(Fake(fail)).propose(batch_of_roots(1)) is None


def test_an_interrupt_is_not_a_fault_of_the_drafter() -> None:
    def interrupt(batch: Batch) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(Fake(interrupt)).propose(batch_of_roots(1))


# ---------------------------------------------------------------------------------- sampled drafts


def test_the_draft_is_what_was_drawn() -> None:
    drawn: list[list[int]] = []
    found = guarded(Fake(lambda batch: drawn.append(draw(batch)))).propose(batch_of_roots(1))
    assert isinstance(found, DeviceDraft)
    assert found.token_tensor.tolist() == [[1, *drawn[0]]]
    assert found.probs is not None


def test_the_draft_is_what_was_drawn_whatever_is_returned() -> None:
    def propose(batch: Batch) -> Draft:
        (token,) = draw(batch)
        return Draft.chains([1], [[(token + 1) % VOCAB_SIZE]])

    found = guarded(Fake(propose)).propose(batch_of_roots(1))
    assert isinstance(found, DeviceDraft)
    assert found.probs is not None


def test_the_draft_is_what_was_drawn_before_a_fault() -> None:
    def propose(batch: Batch) -> Any:
        draw(batch)
        raise RuntimeError("broken after the draw")

    drafter = guarded(Fake(propose))
    with pytest.warns(DrafterFaultWarning, match="broken after the draw"):
        found = [drafter.propose(batch_of_roots(1)) for _ in range(8)]
    assert all(isinstance(draft, DeviceDraft) for draft in found)
    assert drafter.gave_up


# ---------------------------------------------------------------------------------- device drafts


def device_trees(*, probs: Tensor | None = None) -> DeviceDraft:
    parts = [[1, 2, 3], [-1, 0, 0], [CONFIDENCE_SCALE, CONFIDENCE_SCALE // 2, 0]]
    trees = torch.tensor([parts])
    return DeviceDraft([1], trees[:, 0], [3], probs, trees, ZeroTimer())


ON_HOST = Draft.trees([1], [[(2, 0), (3, 0)]], [[0.5, 0.0]])


def test_device_trees_that_the_target_supports_stay_on_the_device() -> None:
    stated, batch, asked = device_trees(), batch_of_roots(1), []

    def supports(*args: Any) -> bool:
        asked.append(args)
        return True

    assert proposing(stated, supports=supports).propose(batch) is stated
    assert asked == [(stated, batch)]


def test_device_trees_that_the_target_does_not_support_are_copied_to_the_host() -> None:
    drafter = proposing(device_trees(), supports=lambda draft, batch: False)
    assert drafter.propose(batch_of_roots(1)) == ON_HOST


def test_device_trees_with_stated_probs_are_copied_to_the_host_without_them() -> None:
    """Probabilities that the draft sampler has not recorded would bias the acceptance."""
    drafter = proposing(device_trees(probs=probs_of_width(3)))
    assert drafter.propose(batch_of_roots(1)) == ON_HOST


@pytest.mark.parametrize("probs", [None, probs_of_width(2)])
def test_device_chains_are_copied_to_the_host(probs: Tensor | None) -> None:
    stated = DeviceDraft([1], torch.tensor([[1, 2]]), [2], probs)
    assert proposing(stated).propose(batch_of_roots(1)) == Draft.chains([1], [[2]])


def test_device_chains_outside_the_vocabulary_are_no_draft() -> None:
    stated = DeviceDraft([1], torch.tensor([[1, VOCAB_SIZE]]), [2])
    with pytest.warns(DrafterFaultWarning, match="a token outside the vocabulary"):
        assert proposing(stated).propose(batch_of_roots(1)) is None


# -------------------------------------------------------------------------------------- giving up


class Scripted:
    """Proposals that fail, are drafts, or are none."""

    def __init__(self) -> None:
        self.next: Any = None
        self.guard = guarded(Fake(self._propose))

    def _propose(self, batch: Batch) -> Any:
        return fail(batch) if self.next == "fault" else self.next

    def ask(self, kind: Any, times: int) -> bool:
        self.next = kind
        for _ in range(times):
            self.guard.propose(batch_of_roots(1))
        return self.guard.gave_up


@pytest.mark.filterwarnings("ignore::draftahead.DrafterFaultWarning")
@pytest.mark.parametrize("recovery", [None, Draft.chains([1], [[2]]), device_trees()])
def test_a_drafter_is_given_up_after_eight_faults_in_a_row(recovery: Any) -> None:
    drafter = Scripted()
    assert not drafter.guard.gave_up
    assert not drafter.ask("fault", 7)
    assert not drafter.ask(recovery, 1)
    assert not drafter.ask("fault", 7)
    assert drafter.ask("fault", 1)
    assert drafter.ask("fault", 1)


def test_a_drafter_without_drafts_is_not_given_up() -> None:
    assert not Scripted().ask(None, 20)


@pytest.mark.filterwarnings("ignore::draftahead.DrafterFaultWarning")
def test_invalid_drafts_count_as_faults() -> None:
    assert Scripted().ask("guess", 8)


class FailsAtAll(Drafter):
    adaptive = property(fail)  # type: ignore[assignment]
    expected_offer = property(fail)  # type: ignore[assignment]

    def propose(self, batch: Batch) -> Any:
        raise RuntimeError("propose")

    def learn(self, *args: Any) -> None:
        raise RuntimeError("learn")

    def release(self, *args: Any) -> None:
        raise RuntimeError("release")

    def idle_work(self) -> None:
        raise RuntimeError("idle_work")

    def explain(self) -> list[str]:
        raise RuntimeError("explain")


def learn(drafter: GuardedDrafter) -> None:
    drafter.learn(batch_of_roots(1), EMPTY, OUTPUT, Verdict([[0]], [[2]]))


def release(drafter: GuardedDrafter) -> None:
    drafter.release(batch_of_roots(1).sequences[0])


@pytest.mark.filterwarnings("ignore::draftahead.DrafterFaultWarning")
def test_only_proposals_count_for_giving_up() -> None:
    drafter = guarded(FailsAtAll())
    for _ in range(20):
        learn(drafter)
        release(drafter)
        drafter.idle_work()
        assert (drafter.adaptive, drafter.expected_offer, drafter.explain()) == (False, None, [])
    assert not drafter.gave_up


# -------------------------------------------------------------------------------------- warnings


CALLS: dict[str, Callable[[GuardedDrafter], Any]] = {
    "propose": lambda drafter: drafter.propose(batch_of_roots(1)),
    "learn": learn,
    "release": release,
    "idle_work": lambda drafter: drafter.idle_work(),
    "explain": lambda drafter: drafter.explain(),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_warning_names_the_fault_and_the_call(name: str) -> None:
    with pytest.warns(DrafterFaultWarning, match=f"FailsAtAll .* RuntimeError: {name}$") as caught:
        CALLS[name](guarded(FailsAtAll()))
    lines, start = inspect.getsourcelines(getattr(GuardedDrafter, name))
    assert caught[0].filename == inspect.getfile(GuardedDrafter)
    assert caught[0].lineno in range(start, start + len(lines))


def test_a_drafter_is_warned_of_once_and_each_fault_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "draftahead")
    drafter = guarded(FailsAtAll())
    with pytest.warns(DrafterFaultWarning) as caught:
        for call in CALLS.values():
            call(drafter)
    assert len(caught) == 1
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [*map(str, logged)] == [*CALLS]
    with pytest.warns(DrafterFaultWarning):  # another drafter
        guarded(FailsAtAll()).idle_work()


# --------------------------------------------------------------------------------------- feedback


class Keeps(Fake):
    """Keeps what it is told."""

    def learn(self, *args: Any) -> None:
        self.told = args

    def release(self, *args: Any) -> None:
        self.released = args


@pytest.mark.parametrize("confidence", [None, [[0.5, 0.25]]])
def test_learn_gets_a_copy_of_the_draft_and_of_the_verdict(
    confidence: list[list[float]] | None,
) -> None:
    def verified() -> tuple[Draft, Verdict]:
        copied = confidence and [list(values) for values in confidence]
        draft = Draft([[1, 2, 3]], [[-1, 0, 0]], [3], copied, probs_of_width(3))
        return draft, Verdict([[0, 2]], [[3, 1]])

    drafter, batch, (draft, verdict) = Keeps(), batch_of_roots(1), verified()
    guarded(drafter).learn(batch, draft, OUTPUT, verdict)
    told_batch, told_draft, told_output, told_verdict = drafter.told
    assert told_batch is batch
    assert told_output is OUTPUT
    assert told_draft == Draft([[1, 2, 3]], [[-1, 0, 0]], [3], confidence)
    assert told_verdict == verdict
    for lists in (told_draft.tokens, told_draft.parents, told_verdict.paths, told_verdict.tokens):
        lists[0][0] = 99
        lists.append([99])
    if told_draft.confidence is not None:
        told_draft.confidence[0][0] = 99
    told_draft.num_nodes[0] = 99
    expected, expected_verdict = verified()
    assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
    assert (draft.num_nodes, draft.confidence) == (expected.num_nodes, expected.confidence)
    assert verdict == expected_verdict


def test_release_names_the_sequence_that_ended() -> None:
    drafter, (sequence,) = Keeps(), batch_of_roots(1).sequences
    guarded(drafter).release(sequence)
    assert drafter.released == (sequence,)


# ------------------------------------------------------------------------------- optional methods


def test_optional_methods_may_be_missing() -> None:
    drafter = guarded(ThreeMethods())
    drafter.idle_work()
    assert drafter.adaptive is False
    assert drafter.expected_offer is None
    assert drafter.explain() == []


@pytest.mark.parametrize(
    ("stated", "expected"), [(True, True), (1, True), (0, False), (None, False)]
)
def test_whether_a_drafter_is_adaptive(stated: Any, expected: bool) -> None:
    drafter = Fake()
    drafter.adaptive = stated
    assert guarded(drafter).adaptive is expected


def test_idle_work_is_done() -> None:
    done = []

    class Works(Fake):
        def idle_work(self) -> None:
            done.append(1)

    guarded(Works()).idle_work()
    assert done == [1]


def offering(offer: Any) -> GuardedDrafter:
    class Offers(Fake):
        expected_offer = property(lambda self: offer)

    return guarded(Offers())


def test_the_expected_offer_is_that_of_the_drafter() -> None:
    offer = Offer(Usual(), 0.5)
    assert offering(offer).expected_offer is offer
    assert offering(None).expected_offer is None


@pytest.mark.parametrize("offer", [(Usual(), 0.5), 0])
def test_an_offer_of_another_type_is_none(offer: Any) -> None:
    with pytest.warns(DrafterFaultWarning, match="expected_offer is (tuple|int), not an Offer"):
        assert offering(offer).expected_offer is None


def test_an_expected_offer_that_is_a_method_is_none() -> None:
    class Offers(Fake):
        def expected_offer(self) -> Any: ...

    with pytest.warns(DrafterFaultWarning, match="expected_offer is method, not an Offer"):
        assert guarded(Offers()).expected_offer is None


def test_an_attribute_that_is_missing_within_expected_offer_is_a_fault() -> None:
    class Offers(Fake):
        @property
        def expected_offer(self) -> Any:
            return self.costs  # type: ignore[attr-defined]

    with pytest.warns(DrafterFaultWarning, match="AttributeError"):
        assert guarded(Offers()).expected_offer is None


def test_an_explanation_is_a_list_of_text() -> None:
    class Explains(Fake):
        def explain(self) -> Any:
            return ("slow", 3)

    assert guarded(Explains()).explain() == ["slow", "3"]


def test_an_explanation_of_another_type_is_empty() -> None:
    class Explains(Fake):
        def explain(self) -> Any: ...

    with pytest.warns(DrafterFaultWarning, match="TypeError"):
        assert guarded(Explains()).explain() == []
