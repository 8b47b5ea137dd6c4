"""Token ids to text: decoders that strip a space, incomplete characters, stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from draftahead.core.detokenizer import Decode, Detokenizer, no_text


def of_bytes(ids: Sequence[int]) -> str:
    """One byte for each token, as byte-level vocabularies fall back to."""
    return bytes(ids).decode("utf-8", errors="replace")


def texts_of(*texts: str) -> Decode:
    """Token i reads as the i-th text."""
    return lambda ids: "".join(texts[i] for i in ids)


def stripping(*texts: str) -> Decode:
    """The same, but the first text of what is decoded loses its leading space (SentencePiece)."""
    return lambda ids: texts_of(*texts)(ids).removeprefix(" ")


@pytest.mark.parametrize("read_each_time", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_text_is_that_of_all_ids_for_a_decoder_that_strips_a_leading_space(
    seed: int, read_each_time: bool
) -> None:
    """Words with and without a space before them, spaces alone, tokens without text."""
    decode = stripping(" one", "two", " ", "", " three", "four ")
    numbers = random.Random(seed)
    ids = [0, 1, 4, 3, 0, 2, 4] + [numbers.randrange(6) for _ in range(30)]
    detokenizer = Detokenizer(decode)
    for count, token in enumerate(ids, start=1):
        detokenizer.push(token)
        if read_each_time:
            assert detokenizer.text == decode(ids[:count])
    assert detokenizer.text == decode(ids)
    begins = [len(decode(ids[:count])) for count in range(len(ids))]
    shown = [decode([i]) for i in range(6)]
    for start, at in zip(detokenizer.starts, range(len(ids)), strict=True):
        assert start == begins[at] or not shown[ids[at]]


def test_every_read_decodes_two_tokens_at_most() -> None:
    """The cost of a step must not grow with the output."""
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return texts_of("ab", "c")(ids)

    detokenizer = Detokenizer(decode)
    for token in [0, 1] * 20:
        detokenizer.push(token)
        assert detokenizer.text.endswith("ab" if token == 0 else "c")
    assert max(decoded) == 2
    count = len(decoded)
    _ = detokenizer.text, detokenizer.starts, detokenizer.num_stable_chars()
    assert len(decoded) == count  # nothing new, nothing decoded


def test_decoding_is_deferred_until_the_text_is_read() -> None:
    decoded: list[Any] = []
    detokenizer = Detokenizer(lambda ids: decoded.append(ids) or "x" * len(ids))  # type: ignore[func-returns-value]
    for token in range(5):
        detokenizer.push(token)
    detokenizer.flush()
    assert not decoded
    assert detokenizer.text == "xxxxx"


def test_an_incomplete_character_is_held_back() -> None:
    data = "añ→😀b".encode()
    detokenizer = Detokenizer(of_bytes)
    shown = []
    for byte in data:
        detokenizer.push(byte)
        shown.append(detokenizer.text)
    assert shown == ["a", "a", "añ", "añ", "añ", "añ→", *["añ→"] * 3, "añ→😀", "añ→😀b"]
    assert detokenizer.starts == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]


def test_an_incomplete_character_at_the_end_is_shown() -> None:
    detokenizer = Detokenizer(of_bytes)
    for byte in "a→".encode()[:-1]:
        detokenizer.push(byte)
    assert detokenizer.text == "a"
    detokenizer.flush()
    assert detokenizer.text == "a�"
    assert detokenizer.text == "a�"  # once
    assert detokenizer.starts == [0, 1, 1]
    detokenizer.flush()
    assert detokenizer.text == "a�"  # nothing more came


def test_a_flush_with_nothing_held_back_adds_nothing() -> None:
    detokenizer = Detokenizer(of_bytes)
    detokenizer.flush()
    assert detokenizer.text == ""
    shown = []
    for byte in "aéb".encode():  # the earlier flush does not count for what comes later
        detokenizer.push(byte)
        shown.append(detokenizer.text)
    detokenizer.flush()
    assert detokenizer.text == "aéb"
    assert shown == ["a", "a", "aé", "aéb"]


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    assert no_text([1, 2, 3]) == ""
    assert not Detokenizer(no_text).has_text
    assert Detokenizer(of_bytes).has_text
    detokenizer = Detokenizer(no_text)
    detokenizer.push(1)
    detokenizer.flush()
    assert (detokenizer.text, detokenizer.num_stable_chars()) == ("", 0)


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
    numbers = random.Random(seed)
    texts = ["a", "b", "ab", "ba", "abba", "c", ""]
    stops = [["aba", "c"], ["bb", "abb"], ["cab", "b"], ["abc", "ca", "bcb"]][seed % 4]
    decode = texts_of(*texts)
    found = 0
    for _ in range(40):
        detokenizer = Detokenizer(decode, stops)
        ids: list[int] = []
        for _ in range(8):
            ids.append(numbers.randrange(len(texts)))
            detokenizer.push(ids[-1])
            expected = found_by_hand(decode, ids, stops)
            assert detokenizer.find_stop() == expected
            if expected is None:
                continue
            found += 1
            begins = [len(decode(ids[:count])) for count in range(len(ids))]
            keep = detokenizer.truncate(expected)
            assert detokenizer.text == decode(ids)[:expected]
            # Gone are the token in which the stop begins, all behind it, and tokens without text
            # right before it.
            assert keep == begins.index(max(start for start in begins if start <= expected))
            break
    assert found > 15


def test_a_stop_after_characters_of_several_tokens() -> None:
    detokenizer = Detokenizer(of_bytes, ["→😀"])
    for byte in "añ→😀".encode():
        assert detokenizer.find_stop() is None
        detokenizer.push(byte)
        assert "�" not in detokenizer.text
    assert detokenizer.find_stop() == 2
    assert detokenizer.truncate(2) == 3  # 'a' and the two bytes of 'ñ'
    assert detokenizer.text == "añ"


def test_of_two_stops_in_one_token_the_first_counts() -> None:
    for stops in (["c", "b"], ["b", "c"]):
        detokenizer = Detokenizer(texts_of("a", "xbxc"), stops)
        detokenizer.push(0)
        assert detokenizer.find_stop() is None
        detokenizer.push(1)
        assert detokenizer.find_stop() == 2
        assert detokenizer.truncate(2) == 1
        assert detokenizer.text == "ax"


def test_a_stop_that_an_earlier_token_completed_does_not_count() -> None:
    """Longer stop strings beside it change nothing."""
    detokenizer = Detokenizer(texts_of("ab", "c", "d"), ["ab", "x" * 9])
    detokenizer.push(0)
    for token in (1, 2):
        detokenizer.push(token)
        assert detokenizer.find_stop() is None
    detokenizer.push(0)
    assert detokenizer.find_stop() == 4


def test_a_stop_at_the_very_beginning() -> None:
    detokenizer = Detokenizer(texts_of("ab", "c"), ["a"])
    assert detokenizer.find_stop() is None  # no text yet
    detokenizer.push(0)
    assert detokenizer.find_stop() == 0
    assert detokenizer.truncate(0) == 0
    assert detokenizer.text == ""
    assert Detokenizer(texts_of("ab"), ["a"]).truncate(0) == 0


def test_a_cut_reaches_into_text_that_was_not_read_yet() -> None:
    detokenizer = Detokenizer(texts_of("ab", "cd"))
    detokenizer.push(0)
    detokenizer.push(1)
    assert detokenizer.truncate(3) == 1
    assert detokenizer.text == "abc"


def settled_by_hand(text: str, stops: list[str]) -> int:
    """The largest part behind which nothing could still become a stop."""
    return min(
        (at for at in range(len(text)) for stop in stops if stop.startswith(text[at:])),
        default=len(text),
    )


@pytest.mark.parametrize("stops", [["aab"], ["ab", "bba"], ["a"], ["abcabd", "c"], []])
def test_what_may_begin_a_stop_is_held_back_and_nothing_else(stops: list[str]) -> None:
    """One character for each token."""
    numbers = random.Random(len(stops))
    for _ in range(30):
        detokenizer, text = Detokenizer(texts_of("a", "b", "c", "d"), stops), ""
        for _ in range(7):
            token = numbers.randrange(4)
            text += "abcd"[token]
            detokenizer.push(token)
            assert detokenizer.num_stable_chars() == settled_by_hand(text, stops)
            if detokenizer.find_stop() is not None:
                break


def test_one_that_is_rebuilt_has_the_text_of_its_tokens() -> None:
    decode = texts_of("a", "bc", "d")
    old = Detokenizer(decode, ["c"])
    old.push(2)
    assert old.text == "d"
    new = old.rebuilt([0, 1])
    assert (new.text, new.starts, new.find_stop()) == ("abc", [0, 1], 2)
    new.push(2)
    assert new.text == "abcd" and old.text == "d"
