"""Where a verdict ends an output and what it drops; which sequence runs next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftahead.core import stats
from draftahead.core.detokenizer import Detokenizer
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import ForwardOutput, Request, RunningBatch, SequenceState, Verdict
from draftahead.engine.scheduler import Scheduler
from draftahead.errors import NonFiniteLogitsError
from recording_verifier import Recording

END, VOCAB_SIZE = 9, 10
PROMPT = (1, 2)


def scheduler_of(verifier: Recording) -> Scheduler:
    return Scheduler(verifier, "distribution")  # type: ignore[arg-type]


def decode(ids: Sequence[int]) -> str:
    """Small ids are letters, 7 and 8 the halves of one character."""
    halves = {7: "é".encode()[:1], 8: "é".encode()[1:]}
    data = b"".join(halves.get(i) or b"abcdefg"[i : i + 1] for i in ids)
    return data.decode("utf-8", errors="replace")


def sequence(number: int = 0, *, reuse: bool = False, **fields: Any) -> SequenceState:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 10} | fields))
    request = Request(PROMPT, params, 0, eos_token_ids=frozenset({END}), reuse=reuse)
    return SequenceState(
        request, number, 0, 0, list(PROMPT), Detokenizer(decode, params.stop_strings)
    )


def updated(one: SequenceState, tokens: list[int], *, failed: bool = False) -> int:
    """One step: all tokens but the last were drafted, with an error all of them. How many drafted
    ones are kept."""
    errors = {0: NonFiniteLogitsError("no distribution")} if failed else {}
    accepted = len(tokens) if failed else len(tokens) - 1
    verdict = Verdict([list(range(accepted + 1))], [tokens], errors)
    output = ForwardOutput(torch.zeros(1, accepted + 1, VOCAB_SIZE))
    (kept,) = update(scheduler_of(Recording(1)), [one], verdict, output)
    return kept


def update(
    scheduler: Scheduler, sequences: list[SequenceState], verdict: Verdict, output: ForwardOutput
) -> list[int]:
    batch = RunningBatch(tuple(sequences), (9,) * len(sequences))
    return scheduler.update(batch, verdict, scheduler.logprobs(batch, verdict, output))


# ------------------------------------------------------------------------------- an output's end


def test_tokens_are_appended_and_marked_as_drafted() -> None:
    one = sequence(logprobs=0)
    assert updated(one, [3, 4, 5]) == 2
    assert one.tokens == [*PROMPT, 3, 4, 5]
    assert one.drafted == [True, True, False]
    assert [found.token_id for found in one.logprobs] == [3, 4, 5]
    assert (one.finish_reason, one.error) == (None, None)
    assert updated(one, [6]) == 0
    assert one.drafted == [True, True, False, False]
    assert one.detokenizer.text == "defg"


def test_logprobs_are_those_of_the_nodes_along_the_path() -> None:
    """Under penalties, which count the accepted tokens before each."""
    one = sequence(logprobs=2, presence_penalty=1.0)
    logits = torch.randn(1, 5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    verdict = Verdict([[0, 2, 4]], [[3, 4, 3]])
    update(scheduler_of(Recording(1)), [one], verdict, ForwardOutput(logits))
    emitted: list[int] = []
    for found, node, token in zip(one.logprobs, [0, 2, 4], [3, 4, 3], strict=True):
        penalty = torch.zeros(VOCAB_SIZE)
        penalty[emitted] = 1.0
        expected = (logits[0, node] - penalty).log_softmax(-1)
        assert found.logprob == pytest.approx(float(expected[token]))
        assert list(found.top) == expected.topk(2).indices.tolist()
        emitted.append(token)


def test_no_logprobs_where_none_were_asked_for() -> None:
    one = sequence()
    updated(one, [3, 4])
    assert one.logprobs == []


def test_text_is_not_decoded_where_no_stop_string_needs_it() -> None:
    """Decoding would stand between two forwards."""
    one, decoded = sequence(max_tokens=2), []
    one.detokenizer = Detokenizer(lambda ids: decoded.append(ids) or "x" * len(ids))  # type: ignore[func-returns-value]
    updated(one, [3, 4])
    assert one.finish_reason == "length"
    assert not decoded
    assert one.detokenizer.text == "xx"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_stop_id_before_a_node_with_an_error_ends_the_output_without_it(at: int) -> None:
    """What lies behind a stop is not part of the output: neither its tokens nor its error."""
    tokens = [3, 4, 5]
    tokens[at] = END
    one = sequence(logprobs=0)
    assert updated(one, tokens, failed=True) == at + 1
    assert (one.finish_reason, one.error) == ("stop", None)
    assert one.output == tokens[: at + 1]
    assert len(one.logprobs) == len(one.drafted) == at + 1
    assert one.detokenizer.text == decode(tokens[:at])  # the end token shows no text


def test_max_tokens_before_a_node_with_an_error_ends_the_output_without_it() -> None:
    one = sequence(max_tokens=2)
    assert updated(one, [3, 4, 5], failed=True) == 2
    assert (one.finish_reason, one.error) == ("length", None)
    assert one.output == [3, 4]


def test_an_error_ends_the_output_after_what_was_accepted_before_it() -> None:
    one = sequence()
    assert updated(one, [3, 4], failed=True) == 2
    assert one.finish_reason == "error"
    assert isinstance(one.error, NonFiniteLogitsError)
    assert one.output == [3, 4]


def test_an_error_of_one_sequence_does_not_affect_the_others() -> None:
    three = [sequence(0), sequence(1), sequence(2, logprobs=0)]
    error = NonFiniteLogitsError("no distribution")
    verdict = Verdict([[0], [0], [0, 1]], [[3], [], [4, 5]], {1: error})
    output = ForwardOutput(torch.zeros(3, 2, VOCAB_SIZE))
    scheduler = scheduler_of(Recording(3))
    assert update(scheduler, three, verdict, output) == [0, 0, 1]
    assert [one.finish_reason for one in three] == [None, "error", None]
    assert [one.output for one in three] == [[3], [], [4, 5]]
    assert [len(one.logprobs) for one in three] == [0, 0, 2]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
def test_max_tokens_inside_an_accepted_run(most: int) -> None:
    one = sequence(max_tokens=most, logprobs=0)
    kept = updated(one, [3, 4, 5, 6])
    assert one.output == [3, 4, 5, 6][:most]
    assert one.finish_reason == ("length" if most <= 4 else None)
    assert kept == min(most, 3)
    assert len(one.logprobs) == min(most, 4)


def test_a_stop_string_that_the_last_token_completes_is_a_stop() -> None:
    """max_tokens and the stop at once: the text is cut, and the reason is the stop."""
    one = sequence(max_tokens=3, stop="ef", logprobs=0)
    assert updated(one, [3, 4, 5, 6]) == 3
    assert (one.finish_reason, one.detokenizer.text, one.output) == ("stop", "d", [3, 4, 5])
    assert len(one.drafted) == len(one.logprobs) == 3


def test_a_stop_string_takes_back_text_of_an_earlier_step() -> None:
    """Its tokens stay: text and ids disagree in nothing but the stop string."""
    one = sequence(stop="def", logprobs=0)
    assert updated(one, [2, 3]) == 1
    assert updated(one, [4, 5, 6]) == 2
    assert (one.finish_reason, one.detokenizer.text) == ("stop", "c")
    assert one.output == [2, 3, 4, 5]
    assert one.drafted == [True, False, True, True]
    assert len(one.logprobs) == 4


@pytest.mark.parametrize(
    ("params", "reason", "text"),
    [
        ({"stop": ["x", "ef"]}, "ef", "d"),
        ({"stop": ["x", "ef"], "include_stop_str_in_output": True}, "ef", "def"),
        ({"stop_token_ids": [5]}, 5, "de"),
        ({"stop_token_ids": [5], "include_stop_str_in_output": True}, 5, "def"),
        ({"stop_token_ids": [END]}, None, "def"),  # the model's end token
        ({"stop_token_ids": [END], "ignore_eos": True}, END, "def"),
        ({}, None, "def"),
        ({"max_tokens": 3}, None, "def"),
    ],
)
def test_the_stop_reason_is_what_the_request_named(
    params: dict[str, Any], reason: str | int | None, text: str
) -> None:
    one = sequence(**params)
    updated(one, [3, 4, 5, END])
    assert (one.stop_reason, one.detokenizer.text) == (reason, text)
    assert one.finish_reason == ("length" if "max_tokens" in params else "stop")


def test_an_incomplete_character_at_max_tokens_is_shown() -> None:
    one = sequence(max_tokens=2)
    updated(one, [3, 7, 8])
    assert (one.finish_reason, one.detokenizer.text) == ("length", "d�")
    whole = sequence(max_tokens=3)
    updated(whole, [3, 7, 8])
    assert (whole.finish_reason, whole.detokenizer.text) == ("length", "dé")


def test_an_incomplete_character_at_max_tokens_may_complete_a_stop_string() -> None:
    one = sequence(max_tokens=2, stop="d�")
    updated(one, [3, 7, 8])
    assert (one.finish_reason, one.detokenizer.text, one.output) == ("stop", "", [3, 7])
    later = sequence(max_tokens=5, stop="d�")  # not before the output has ended
    updated(later, [3, 7, 8])
    assert (later.finish_reason, later.detokenizer.text) == (None, "dé")


@pytest.mark.parametrize(("least", "reason"), [(1, "stop"), (2, "stop"), (3, None), (None, "stop")])
def test_a_stop_string_counts_from_min_tokens_on(least: int | None, reason: str | None) -> None:
    one = sequence(stop="e", min_tokens=least)
    updated(one, [3, 4])
    assert one.finish_reason == reason
    assert one.detokenizer.text == ("d" if reason else "de")


def test_a_stop_string_inside_an_accepted_run_drops_the_rest() -> None:
    one = sequence(stop=["e"], logprobs=0)
    assert updated(one, [3, 4, 5, 6]) == 2
    assert (one.output, one.detokenizer.text, one.drafted) == ([3, 4], "d", [True, True])
    assert len(one.logprobs) == 2


# ------------------------------------------------------------------------------------- who runs


def test_a_batch_takes_as_many_as_it_has_slots() -> None:
    scheduler, four = scheduler_of(Recording(2)), [sequence(i) for i in range(4)]
    assert scheduler.schedule() is None
    scheduler.add(four)
    batch = scheduler.schedule()
    assert batch is not None
    assert list(batch.sequences) == scheduler.running == four[:2]
    assert list(scheduler.waiting) == four[2:]
    assert scheduler.remove(four[0])
    scheduler.schedule()
    assert scheduler.running == [four[1], four[2]]
    assert not scheduler.remove(four[0])  # it was removed before


def test_a_batch_stays_as_it_is_when_others_are_admitted() -> None:
    scheduler, two = scheduler_of(Recording(2)), [sequence(i) for i in range(2)]
    scheduler.add(two[:1])
    batch = scheduler.schedule()
    scheduler.add(two[1:])
    scheduler.schedule()
    assert batch is not None
    assert list(batch.sequences) == two[:1]


def test_the_last_sequence_moves_into_a_slot_that_became_free() -> None:
    verifier = Recording(4)
    scheduler, five = scheduler_of(verifier), [sequence(i) for i in range(5)]
    scheduler.add(five)
    scheduler.schedule()
    verifier.calls.clear()
    assert scheduler.remove(five[4])  # it was waiting
    assert not scheduler.waiting
    assert verifier.calls == []
    assert scheduler.remove(five[1])
    assert scheduler.running == [five[0], five[3], five[2]]
    assert scheduler.remove(five[2])
    assert scheduler.running == [five[0], five[3]]
    assert verifier.calls == [("swap", 1, 3), ("swap", 2, 2)]


def test_the_slot_of_a_sequence_with_an_error_is_cleared() -> None:
    """Before the swap: NaN must not stay behind in any slot."""
    verifier = Recording(3)
    scheduler, three = scheduler_of(verifier), [sequence(i) for i in range(3)]
    scheduler.add(three)
    scheduler.schedule()
    verifier.calls.clear()
    three[1].finish_reason = "error"
    scheduler.remove(three[1])
    assert verifier.calls == [("clear", 1), ("swap", 1, 2)]


def test_a_draft_leaves_room_for_the_targets_own_token() -> None:
    one, other = sequence(max_tokens=5), sequence(max_tokens=None)
    scheduler = scheduler_of(Recording(2))
    scheduler.add([one, other])
    for expected in (4, 2, 0):
        batch = scheduler.schedule()
        assert batch is not None
        assert batch.max_depths == (expected, 0)
        updated(one, [3, 4])
    limited = scheduler_of(Recording(1, max_depth=3))
    limited.add([sequence(max_tokens=5)])
    batch = limited.schedule()
    assert batch is not None
    assert batch.max_depths == (3,)


def test_sequences_that_share_nothing_are_filled_by_one_forward() -> None:
    """Samples of one request come one after the other; the second gets a copy of the first one's
    KV entries. One that reuses an idle slot's entries is filled alone as well."""
    a, b, c = sequence(0), sequence(1), sequence(2)
    second = SequenceState(c.request, 3, 1, 0, list(PROMPT), Detokenizer(decode))
    later, reusing = sequence(4), sequence(5, reuse=True)

    def calls(waiting: list[SequenceState], slots: int = 9, running: int = 0) -> list[Any]:
        verifier = Recording(slots, held=[0, 0, 0, 5])
        scheduler = scheduler_of(verifier)
        scheduler.add(sequence(90 + i) for i in range(running))
        scheduler.schedule()
        verifier.calls.clear()
        scheduler.add(waiting)
        scheduler.schedule()
        return verifier.calls

    assert calls([a, b, c]) == [("prefill", 0, [0, 1, 2])]
    assert calls([a, c, second, later]) == [
        ("prefill", 0, [0, 2]),
        ("copy", 1, 2),
        ("prefill", 3, [4]),
    ]
    assert second.stats.reused_tokens == len(PROMPT) - 1
    assert calls([c, second, later]) == [
        ("prefill", 0, [2]),
        ("copy", 0, 1),
        ("prefill", 2, [4]),
    ]
    assert calls([a, reusing, b]) == [
        ("prefill", 0, [0]),
        ("swap", 1, 3),  # where most of its prompt is
        ("reuse", 1, 5),
        ("prefill", 2, [1]),
    ]
    assert reusing.stats.reused_tokens == 1
    assert calls([a, b, c], slots=2) == [("prefill", 0, [0, 1])]
    assert calls([a, b, c], slots=3, running=1) == [("prefill", 1, [0, 1])]
    assert calls([]) == []


def test_a_copied_slot_holds_the_prompt_but_for_its_last_token() -> None:
    """What the other sample has generated meanwhile is not this one's."""
    prompt = (5, 6, 7, 8)
    request = Request(prompt, SamplingParams(temperature=0, max_tokens=10), 0)
    samples = [SequenceState(request, i, i, 0, list(prompt), Detokenizer(decode)) for i in range(2)]
    verifier = Recording(2)
    scheduler = scheduler_of(verifier)
    scheduler.add(samples[:1])
    scheduler.schedule()
    verifier.tokens_in[0] += [8, 3, 4]
    scheduler.add(samples[1:])
    scheduler.schedule()
    assert verifier.tokens_in == [[5, 6, 7, 8, 3, 4], [5, 6, 7]]
    assert samples[1].stats.reused_tokens == 3


def test_the_time_of_a_prefill_is_divided_among_its_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It includes the wait for a device: a forward that was launched is not done."""
    verifier = Recording(4)
    monkeypatch.setattr(stats.time, "perf_counter", lambda: verifier.clock[0])
    four = [sequence(i) for i in range(4)]
    scheduler = scheduler_of(verifier)
    scheduler.add(four)
    scheduler.schedule()
    assert [one.stats.prefill_seconds for one in four] == [0.25] * 4
