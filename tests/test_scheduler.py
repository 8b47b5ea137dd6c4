"""What becomes of a verdict: where a text ends, what is dropped, who runs next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from draftahead.core.detokenizer import Detokenizer
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Batch, Request, SequenceState, TokenLogprob, Verdict
from draftahead.engine.scheduler import Scheduler
from draftahead.errors import NonFiniteLogitsError
from draftahead.sampling.draft_sampler import RecordedDraftSampler

END = 9
PROMPT = (1, 2)


def decode(ids: Sequence[int]) -> str:
    """Small ids are letters, 7 and 8 the halves of one character."""
    halves = {7: "é".encode()[:1], 8: "é".encode()[1:]}
    data = b"".join(halves.get(i) or b"abcdefg"[i : i + 1] for i in ids)
    return data.decode("utf-8", errors="replace")


def sequence(number: int = 0, *, reuse: bool = False, **fields: Any) -> SequenceState:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 10} | fields))
    request = Request(PROMPT, params, 0, eos_token_ids=frozenset({END}), reuse=reuse)
    return SequenceState(request, number, 0, 0, list(PROMPT), Detokenizer(decode, params.stops))


def committed(one: SequenceState, tokens: list[int], *, failed: bool = False) -> int:
    """One step: all tokens but the last were drafted and accepted, after an error all of them."""
    scheduler = Scheduler(1)
    scheduler.add([one])
    scheduler.admit()
    errors = {0: NonFiniteLogitsError("no distribution")} if failed else {}
    accepted = len(tokens) if failed else len(tokens) - 1
    verdict = Verdict([list(range(accepted + 1))], [tokens], errors)
    batch = Batch((one,), (9,), RecordedDraftSampler([one], [0], 10, "law"))
    logprobs = {0: [TokenLogprob(token, -1.0, {}) for token in tokens]}
    if one.params.logprobs is None:
        logprobs = {}
    (kept,) = scheduler.commit(batch, verdict, logprobs)
    return kept


def test_tokens_are_appended_with_who_guessed_them() -> None:
    one = sequence(logprobs=0)
    assert committed(one, [3, 4, 5]) == 2
    assert one.tokens == [*PROMPT, 3, 4, 5]
    assert one.drafted == [True, True, False]
    assert [told.token_id for told in one.logprobs] == [3, 4, 5]
    assert (one.finish_reason, one.error) == (None, None)
    assert committed(one, [6]) == 0
    assert one.drafted == [True, True, False, False]
    assert one.tail.text == "defg"


def test_no_logprobs_where_none_were_asked_for() -> None:
    one = sequence()
    committed(one, [3, 4])
    assert one.logprobs == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_stop_id_before_a_node_with_an_error_ends_the_text_well(at: int) -> None:
    """What lies behind a stop was never said: neither its tokens nor its error."""
    tokens = [3, 4, 5]
    tokens[at] = END
    one = sequence(logprobs=0)
    assert committed(one, tokens, failed=True) == at + 1
    assert (one.finish_reason, one.error) == ("stop", None)
    assert one.output == tokens[: at + 1]
    assert len(one.logprobs) == len(one.drafted) == at + 1
    assert one.tail.text == decode(tokens[:at])  # the end token shows no text


def test_max_tokens_before_a_node_with_an_error_ends_the_text_well() -> None:
    one = sequence(max_tokens=2)
    assert committed(one, [3, 4, 5], failed=True) == 2
    assert (one.finish_reason, one.error) == ("length", None)
    assert one.output == [3, 4]


def test_an_error_ends_the_text_after_what_was_accepted_before_it() -> None:
    one = sequence()
    assert committed(one, [3, 4], failed=True) == 2
    assert one.finish_reason == "error"
    assert isinstance(one.error, NonFiniteLogitsError)
    assert one.output == [3, 4]


def test_an_error_of_one_row_is_not_its_mates() -> None:
    mates = [sequence(0), sequence(1), sequence(2)]
    scheduler = Scheduler(3)
    scheduler.add(mates)
    for _ in mates:
        scheduler.admit()
    error = NonFiniteLogitsError("no distribution")
    verdict = Verdict([[0], [0], [0, 1]], [[3], [], [4, 5]], {1: error})
    batch = Batch(tuple(mates), (9,) * 3, RecordedDraftSampler(mates, [0] * 3, 10, "law"))
    told = {2: [TokenLogprob(4, -1.0, {}), TokenLogprob(5, -2.0, {})]}
    assert scheduler.commit(batch, verdict, told) == [0, 0, 1]
    assert [one.finish_reason for one in mates] == [None, "error", None]
    assert [one.output for one in mates] == [[3], [], [4, 5]]
    assert [len(one.logprobs) for one in mates] == [0, 0, 2]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
def test_max_tokens_inside_an_accepted_run(most: int) -> None:
    one = sequence(max_tokens=most, logprobs=0)
    kept = committed(one, [3, 4, 5, 6])
    assert one.output == [3, 4, 5, 6][:most]
    assert one.finish_reason == ("length" if most <= 4 else None)
    assert kept == min(most, 3)
    assert len(one.logprobs) == min(most, 4)


def test_a_stop_string_that_the_last_token_completes_is_a_stop() -> None:
    """max_tokens and the stop at once: the text is cut, and the reason is the stop."""
    one = sequence(max_tokens=3, stop="ef", logprobs=0)
    assert committed(one, [3, 4, 5, 6]) == 1
    assert (one.finish_reason, one.tail.text, one.output) == ("stop", "d", [3])
    assert len(one.drafted) == len(one.logprobs) == 1


def test_a_stop_string_takes_back_tokens_of_an_earlier_step() -> None:
    one = sequence(stop="def", logprobs=0)
    assert committed(one, [2, 3]) == 1
    assert committed(one, [4, 5, 6]) == 0
    assert (one.finish_reason, one.tail.text, one.output) == ("stop", "c", [2])
    assert len(one.drafted) == len(one.logprobs) == 1


def test_half_a_character_at_max_tokens_is_shown() -> None:
    one = sequence(max_tokens=2)
    committed(one, [3, 7, 8])
    assert (one.finish_reason, one.tail.text) == ("length", "d�")
    whole = sequence(max_tokens=3)
    committed(whole, [3, 7, 8])
    assert (whole.finish_reason, whole.tail.text) == ("length", "dé")


def test_half_a_character_at_max_tokens_may_complete_a_stop_string() -> None:
    one = sequence(max_tokens=2, stop="d�")
    committed(one, [3, 7, 8])
    assert (one.finish_reason, one.tail.text, one.output) == ("stop", "", [])
    later = sequence(max_tokens=5, stop="d�")  # not before the text has ended
    committed(later, [3, 7, 8])
    assert (later.finish_reason, later.tail.text) == (None, "dé")


@pytest.mark.parametrize(("least", "reason"), [(1, "stop"), (2, "stop"), (3, None), (None, "stop")])
def test_a_stop_string_counts_from_min_tokens_on(least: int | None, reason: str | None) -> None:
    one = sequence(stop="e", min_tokens=least)
    committed(one, [3, 4])
    assert one.finish_reason == reason
    assert one.tail.text == ("d" if reason else "de")


def test_a_stop_string_that_ends_in_the_middle_of_a_run_drops_the_rest() -> None:
    one = sequence(stop=["e"], logprobs=0)
    assert committed(one, [3, 4, 5, 6]) == 1
    assert (one.output, one.tail.text, one.drafted) == ([3], "d", [True])
    assert len(one.logprobs) == 1


# --------------------------------------------------------------------------------- who runs


def test_a_batch_takes_as_many_as_it_has_slots() -> None:
    scheduler, four = Scheduler(2), [sequence(i) for i in range(4)]
    assert scheduler.next_to_admit is None
    scheduler.add(four)
    for one in four[:2]:
        assert scheduler.next_to_admit is one
        scheduler.admit()
    assert scheduler.next_to_admit is None
    assert scheduler.running == four[:2]
    assert list(scheduler.waiting) == four[2:]
    scheduler.remove(four[0])
    assert scheduler.next_to_admit is four[2]


def test_the_last_one_moves_into_a_place_that_was_left() -> None:
    scheduler, five = Scheduler(4), [sequence(i) for i in range(5)]
    scheduler.add(five)
    for _ in range(4):
        scheduler.admit()
    assert scheduler.remove(five[4]) is None  # it was waiting
    assert not scheduler.waiting
    assert scheduler.remove(five[1]) == (1, 3)
    assert scheduler.running == [five[0], five[3], five[2]]
    assert scheduler.remove(five[2]) == (2, 2)
    assert scheduler.running == [five[0], five[3]]


def test_a_draft_may_be_as_deep_as_leaves_room_for_the_own_token() -> None:
    one = sequence(max_tokens=5)
    assert Scheduler(1).room(one) == 4
    one.tokens += [3, 4]
    assert Scheduler(1).room(one) == 2
    one.tokens += [3, 4]
    assert Scheduler(1).room(one) == 0
    assert Scheduler(1).room(sequence(max_tokens=None)) == -1


def test_those_filled_together_share_nothing() -> None:
    """Samples of one request come one after the other; the second starts from the first's keys.
    One that reuses an idle slot's keys goes alone as well."""
    a, b, c = sequence(0), sequence(1), sequence(2)
    twin = SequenceState(c.request, 3, 1, 0, list(PROMPT), Detokenizer(decode))
    later, reusing = sequence(4), sequence(5, reuse=True)

    def together(
        waiting: list[SequenceState], slots: int = 9, running: int = 0
    ) -> list[SequenceState]:
        scheduler = Scheduler(slots)
        scheduler.add([sequence(90 + i) for i in range(running)] + waiting)
        for _ in range(running):
            scheduler.admit()
        return scheduler.prefill_batch()

    assert together([a, b, c]) == [a, b, c]
    assert together([a, c, twin, later]) == [a, c]
    assert together([c, twin, later]) == [c]
    assert together([a, reusing, b]) == [a]
    assert together([a, b, c], slots=2) == [a, b]
    assert together([a, b, c], slots=3, running=1) == [a, b]
    assert together([]) == []
