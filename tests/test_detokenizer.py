"""Ids to text as they come: decoders with habits, half characters, stop strings, streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import zoo
from draftahead import LLM, SamplingParams
from draftahead.core.detokenizer import Detokenizer, no_text
from drafted import Clairvoyant

Decode = Callable[[Sequence[int]], str]
LENGTH = 40
PROMPTS = zoo.ragged_prompts(3)


def of_bytes(ids: Sequence[int]) -> str:
    """One byte a token, as byte-level vocabularies fall back to."""
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(*texts: str) -> Decode:
    """Token i reads as the i-th text."""
    return lambda ids: "".join(texts[i] for i in ids)


def stripping(*texts: str) -> Decode:
    """The same, but the first text of what is decoded loses its leading space (SentencePiece)."""
    return lambda ids: pieces(*texts)(ids).removeprefix(" ")


# --------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("look_each_time", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_text_is_that_of_all_ids_for_a_decoder_that_strips_a_leading_space(
    seed: int, look_each_time: bool
) -> None:
    """Words with and without a space before them, spaces alone, tokens that show nothing."""
    decode = stripping(" one", "two", " ", "", " three", "four ")
    dice = random.Random(seed)
    ids = [0, 1, 4, 3, 0, 2, 4] + [dice.randrange(6) for _ in range(30)]
    tail = Detokenizer(decode)
    for count, token in enumerate(ids, start=1):
        tail.push(token)
        if look_each_time:
            assert tail.text == decode(ids[:count])
    assert tail.text == decode(ids)
    begins = [len(decode(ids[:count])) for count in range(len(ids))]
    shown = [decode([i]) for i in range(6)]
    for start, at in zip(tail.starts, range(len(ids)), strict=True):
        assert start == begins[at] or not shown[ids[at]]


def test_every_look_asks_the_decoder_about_two_tokens_at_most() -> None:
    """The cost of a step must not grow with the text."""
    asked: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        asked.append(len(ids))
        return pieces("ab", "c")(ids)

    tail = Detokenizer(decode)
    for token in [0, 1] * 20:
        tail.push(token)
        assert tail.text.endswith("ab" if token == 0 else "c")
    assert max(asked) == 2
    count = len(asked)
    _ = tail.text, tail.starts, tail.settled()
    assert len(asked) == count  # nothing new, nothing asked


def test_decoding_waits_until_somebody_looks() -> None:
    asked: list[Any] = []
    tail = Detokenizer(lambda ids: asked.append(ids) or "x" * len(ids))  # type: ignore[func-returns-value]
    for token in range(5):
        tail.push(token)
    tail.flush()
    assert tail.find_stop() is None  # there is none to look for
    assert not asked
    assert tail.text == "xxxxx"


def test_half_a_character_waits_for_its_other_half() -> None:
    data = "añ→😀b".encode()
    tail = Detokenizer(of_bytes)
    shown = []
    for byte in data:
        tail.push(byte)
        shown.append(tail.text)
    assert shown == ["a", "a", "añ", "añ", "añ", "añ→", *["añ→"] * 3, "añ→😀", "añ→😀b"]
    assert tail.starts == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]


def test_a_text_that_ends_with_half_a_character_shows_it() -> None:
    tail = Detokenizer(of_bytes)
    for byte in "a→".encode()[:-1]:
        tail.push(byte)
    assert tail.text == "a"
    tail.flush()
    assert tail.text == "a�"
    assert tail.text == "a�"  # once
    assert tail.starts == [0, 1, 1]
    tail.flush()
    assert tail.text == "a�"  # nothing more came


def test_a_flush_without_a_rest_adds_nothing() -> None:
    tail = Detokenizer(of_bytes)
    tail.flush()
    assert tail.text == ""
    shown = []
    for byte in "aéb".encode():  # and the flush of before does not count for what comes later
        tail.push(byte)
        shown.append(tail.text)
    tail.flush()
    assert tail.text == "aéb"
    assert shown == ["a", "a", "aé", "aéb"]


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    assert no_text([1, 2, 3]) == ""
    assert not Detokenizer(no_text).decodes
    assert Detokenizer(of_bytes).decodes
    tail = Detokenizer(no_text)
    tail.push(1)
    tail.flush()
    assert (tail.text, tail.settled()) == ("", 0)


# ----------------------------------------------------------------------------- stop strings


def found_by_hand(decode: Decode, ids: list[int], stops: list[str]) -> int | None:
    """Where the first stop begins that the newest token completes."""
    before, text = len(decode(ids[:-1])), decode(ids)
    ends = [
        at
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > before
    ]
    return min(ends, default=None)


@pytest.mark.parametrize("seed", range(6))
def test_a_stop_is_found_with_the_token_that_completes_it(seed: int) -> None:
    """Inside a token, across several, two of them in one token, one inside the other."""
    dice = random.Random(seed)
    texts = ["a", "b", "ab", "ba", "abba", "c", ""]
    stops = [["aba", "c"], ["bb", "abb"], ["cab", "b"], ["abc", "ca", "bcb"]][seed % 4]
    decode = pieces(*texts)
    found = 0
    for _ in range(40):
        tail = Detokenizer(decode, stops)
        ids: list[int] = []
        for _ in range(8):
            ids.append(dice.randrange(len(texts)))
            tail.push(ids[-1])
            expected = found_by_hand(decode, ids, stops)
            assert tail.find_stop() == expected
            if expected is None:
                continue
            found += 1
            begins = [len(decode(ids[:count])) for count in range(len(ids))]
            keep = tail.cut(expected)
            assert tail.text == decode(ids)[:expected]
            # Gone are the token in which the stop begins, all behind it, and what stands right
            # before it without any text.
            assert keep == begins.index(max(start for start in begins if start <= expected))
            break
    assert found > 15


def test_of_two_stops_in_one_token_the_first_counts() -> None:
    for stops in (["c", "b"], ["b", "c"]):
        tail = Detokenizer(pieces("a", "xbxc"), stops)
        tail.push(0)
        assert tail.find_stop() is None
        tail.push(1)
        assert tail.find_stop() == 2
        assert tail.cut(2) == 1
        assert tail.text == "ax"


def test_a_stop_that_an_earlier_token_completed_does_not_count() -> None:
    """It was looked for then, or came before min_tokens: long stops beside it change nothing."""
    tail = Detokenizer(pieces("ab", "c", "d"), ["ab", "x" * 9])
    for token in (0, 1, 2):
        tail.push(token)
    assert tail.find_stop() is None
    tail.push(0)
    assert tail.find_stop() == 4


def test_a_stop_at_the_very_beginning() -> None:
    tail = Detokenizer(pieces("ab", "c"), ["a"])
    assert tail.find_stop() is None  # no text yet
    tail.push(0)
    assert tail.find_stop() == 0
    assert tail.cut(0) == 0
    assert tail.text == ""
    assert Detokenizer(pieces("ab"), ["a"]).cut(0) == 0


def test_a_cut_reaches_into_what_nobody_has_looked_at_yet() -> None:
    tail = Detokenizer(pieces("ab", "cd"))
    tail.push(0)
    tail.push(1)
    assert tail.cut(3) == 1
    assert tail.text == "abc"


def settled_by_hand(text: str, stops: list[str]) -> int:
    """The largest part behind which nothing could still become a stop."""
    return min(
        (at for at in range(len(text)) for stop in stops if stop.startswith(text[at:])),
        default=len(text),
    )


@pytest.mark.parametrize("stops", [["aab"], ["ab", "bba"], ["a"], ["abcabd", "c"], []])
def test_what_may_begin_a_stop_is_held_back_and_nothing_else(stops: list[str]) -> None:
    """One character a token: text that could still be taken back is a beginning of a stop."""
    dice = random.Random(len(stops))
    for _ in range(30):
        tail, text = Detokenizer(pieces("a", "b", "c", "d"), stops), ""
        for _ in range(7):
            token = dice.randrange(4)
            text += "abcd"[token]
            tail.push(token)
            assert tail.settled() == settled_by_hand(text, stops)
            if tail.find_stop() is not None:
                break


# --------------------------------------------------------------------------------- streams


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def answers(target: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): zoo.reference(target, prompt, LENGTH) for prompt in PROMPTS}


def letter(token: int) -> str:
    return chr(ord("0") + token)


@pytest.fixture(scope="module", params=["none", "drafted"])
def llm(request: Any, target: Any, answers: dict[tuple[int, ...], list[int]]) -> LLM:
    """Every token reads as one character."""
    model = models.WordLevel({letter(i): i for i in range(zoo.VOCABULARY)}, unk_token="0")
    raw = Tokenizer(model)
    raw.decoder = decoders.Fuse()
    drafter = "none" if request.param == "none" else Clairvoyant(answers)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    return LLM(target, drafter, tokenizer=tokenizer, max_batch=2)


def streamed(llm: LLM, prompt: list[int], sampling: SamplingParams) -> Any:
    """The completion, once its stream was found to be in order."""
    stream, shown, ids, reasons = llm.stream(prompt, sampling), "", [], []
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            out = end.value
            break
        shown += piece.text
        ids += piece.token_ids
        reasons.append(piece.finish_reason)
    assert shown == out.text  # so nothing that was shown is ever taken back
    assert ids == out.token_ids
    assert reasons == [None] * (len(reasons) - 1) + [out.finish_reason]
    return out


def test_streams_of_one_character_tokens_with_stops(
    llm: LLM, answers: dict[tuple[int, ...], list[int]]
) -> None:
    """Stops of one to three characters, wherever they lie; also one that never comes whole."""
    for prompt in PROMPTS[:2]:
        answer = answers[tuple(prompt)]
        text = "".join(map(letter, answer))
        for at in range(2, 9):
            for length in (1, 3):
                stops = [text[at : at + length], text[at : at + 2] + "\0"]
                sampling = SamplingParams(temperature=0, max_tokens=LENGTH, stop=stops, logprobs=0)
                out = streamed(llm, prompt, sampling)
                begin = text.index(stops[0])
                assert (out.text, out.finish_reason) == (text[:begin], "stop")
                assert out.token_ids == answer[:begin]
                assert len(out.logprobs) == len(out.drafted) == begin


@pytest.mark.parametrize("most", [5, 6, 7, 8])
def test_a_stop_that_max_tokens_cuts_off_or_just_lets_through(
    llm: LLM, answers: dict[tuple[int, ...], list[int]], most: int
) -> None:
    answer = answers[tuple(PROMPTS[0])]
    text = "".join(map(letter, answer))
    stop = text[4:7]  # whole with seven tokens
    assert text.index(stop) == 4
    out = streamed(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=most, stop=stop))
    if most < 7:
        assert (out.text, out.finish_reason) == (text[:most], "length")
        assert out.token_ids == answer[:most]
    else:
        assert (out.text, out.finish_reason) == (text[:4], "stop")
        assert out.token_ids == answer[:4]


def test_streams_of_half_characters(
    llm: LLM, answers: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token in three is a whole character, two in three are halves of one, in any order: pieces
    come with whole characters, the rest of a text with its end."""
    halves = "é".encode()

    def decode(ids: Sequence[int]) -> str:
        data = b"".join(letter(i).encode() if i % 3 == 0 else halves[i % 2 :][:1] for i in ids)
        return data.decode("utf-8", errors="replace")

    monkeypatch.setattr(llm.engine, "decode", decode)
    answer = answers[tuple(PROMPTS[2])]
    for most in range(1, 16):
        out = streamed(llm, PROMPTS[2], SamplingParams(temperature=0, max_tokens=most))
        assert out.token_ids == answer[:most]
        assert out.text.replace("�", "") == decode(answer[:most]).replace("�", "")
        assert out.text.endswith("�") == decode(answer[:most]).endswith("�")
