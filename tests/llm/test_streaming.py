"""Streams give what `generate` gives, and show nothing that a stop string takes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import zoo
from draftahead import LLM, Completion, SamplingParams

PROMPTS = zoo.ragged_prompts(3)
LENGTH = 40


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **params})


def text_of(tokens: list[int]) -> str:
    """As `one_character_tokens` reads them."""
    return "".join(chr(48 + token) for token in tokens)


def streamed(llm: LLM, prompt: list[int], params: SamplingParams) -> Completion:
    """The completion, once its chunks were found to be in order and to be all of it."""
    stream: Any = llm.stream(prompt, params)
    shown, ids, drafted, reasons = "", [], [], []
    while True:
        try:
            chunk = next(stream)
        except StopIteration as end:
            out: Completion = end.value
            break
        shown += chunk.text
        ids += chunk.token_ids
        drafted += chunk.drafted
        reasons.append(chunk.finish_reason)
    assert shown == out.text  # so nothing that was shown is ever taken back
    assert ids == out.token_ids
    assert drafted == out.drafted
    assert reasons == [None] * (len(reasons) - 1) + [out.finish_reason]
    return out


def test_a_stream_gives_what_generate_gives(drafted: LLM) -> None:
    whole = drafted.generate(PROMPTS[0], greedy())[0]
    out = streamed(drafted, PROMPTS[0], greedy())
    assert (out.text, out.token_ids, out.drafted) == (whole.text, whole.token_ids, whole.drafted)
    assert out.finish_reason == "length"
    assert any(out.drafted)
    assert not all(out.drafted)


def test_a_stop_string_across_tokens_is_never_shown(drafted: LLM, outputs: list[list[int]]) -> None:
    params = greedy(stop=f"<{outputs[1][7]}><{outputs[1][8]}>")
    whole = drafted.generate(PROMPTS[1], params)[0]
    out = streamed(drafted, PROMPTS[1], params)
    assert (out.text, out.token_ids) == (whole.text, whole.token_ids)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("at", range(2, 9))
def test_stop_strings_with_one_character_tokens(
    one_character_tokens: LLM, outputs: list[list[int]], at: int, length: int
) -> None:
    """Wherever they lie, beside one that never comes whole."""
    for prompt, output in zip(PROMPTS[:2], outputs, strict=False):
        text = text_of(output)
        stops = [text[at : at + length], text[at : at + 2] + "\0"]
        out = streamed(one_character_tokens, prompt, greedy(stop=stops, logprobs=0))
        begin = text.index(stops[0])
        assert (out.text, out.finish_reason, out.stop_reason) == (text[:begin], "stop", stops[0])
        assert out.token_ids == output[: begin + length]
        assert out.logprobs is not None
        assert len(out.logprobs) == len(out.drafted) == begin + length


@pytest.mark.parametrize("most", [5, 6, 7, 8])
def test_a_stop_string_that_max_tokens_cuts_off_or_just_lets_through(
    one_character_tokens: LLM, outputs: list[list[int]], most: int
) -> None:
    output = outputs[0]
    text = text_of(output)
    stop = text[4:7]  # whole with seven tokens
    assert text.index(stop) == 4
    out = streamed(one_character_tokens, PROMPTS[0], greedy(max_tokens=most, stop=stop))
    reason, length = ("length", most) if most < 7 else ("stop", 4)
    assert (out.text, out.finish_reason) == (text[:length], reason)
    assert out.token_ids == output[: min(most, 7)]


@pytest.mark.parametrize("most", range(1, 16))
def test_incomplete_characters_are_held_back(
    one_character_tokens: LLM,
    outputs: list[list[int]],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third token is a whole character, the others are halves of one, in any order: chunks
    have whole characters, an incomplete one comes with the end."""
    halves = "é".encode()

    def decode(ids: Sequence[int]) -> str:
        data = b"".join(chr(48 + i).encode() if i % 3 == 0 else halves[i % 2 :][:1] for i in ids)
        return data.decode("utf-8", errors="replace")

    monkeypatch.setattr(one_character_tokens.engine, "decode", decode)
    out = streamed(one_character_tokens, PROMPTS[2], greedy(max_tokens=most))
    expected = decode(outputs[2][:most])
    assert out.token_ids == outputs[2][:most]
    assert out.text == expected


def test_streams_may_be_interleaved(drafted: LLM) -> None:
    """A step of one advances the other; neither loses anything."""
    params = greedy(max_tokens=12)
    expected = [out.token_ids for out in drafted.generate(PROMPTS[:2], params)]
    streams = [drafted.stream(prompt, params) for prompt in PROMPTS[:2]]
    found: list[list[int]] = [[], []]
    unfinished = {0, 1}
    while unfinished:
        for i in sorted(unfinished):
            chunk = next(streams[i], None)
            if chunk is None:
                unfinished.discard(i)
            else:
                found[i] += chunk.token_ids
    assert found == expected
    stream = drafted.stream(PROMPTS[0], params)
    first = next(stream).token_ids
    drafted.generate(PROMPTS[1], greedy())
    assert first + [i for chunk in stream for i in chunk.token_ids] == expected[0]


def test_tokens_that_another_stream_adds_between_two_chunks_delay_none(
    one_character_tokens: LLM, outputs: list[list[int]]
) -> None:
    """All tokens of a step are shown before the next one, although the text has become longer."""
    llm = one_character_tokens
    stream, other = llm.stream(PROMPTS[0], greedy()), llm.stream(PROMPTS[1], greedy())
    shown = [next(stream).token_ids]
    (sequence,) = llm.engine.scheduler.running
    count = sequence.num_generated
    shown += [next(stream).token_ids for _ in range(2, count)]
    next(other)
    generated = sequence.num_generated
    shown += [next(stream).token_ids for _ in range(len(shown), count)]
    assert sequence.num_generated == generated
    assert shown == [[token] for token in outputs[0][:count]]
    stream.close()
    other.close()


def test_a_dropped_stream_frees_its_slot(drafted: LLM) -> None:
    for _ in range(5):
        stream = drafted.stream(PROMPTS[0], greedy())
        next(stream)
        stream.close()
    assert not drafted.engine.scheduler.running
    assert not drafted.engine.scheduler.waiting
