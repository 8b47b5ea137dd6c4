"""Token ids to text: decoders that strip a space, incomplete characters, stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftahead.core.detokenizer import Decode, Detokenizer, byte_tokens, no_text


def of_bytes(ids: Sequence[int]) -> str:
    """One byte for each token, as byte-level vocabularies fall back to."""
    return bytes(ids).decode("utf-8", errors="replace")


def texts_of(*texts: str) -> Decode:
    """Token i reads as the i-th text."""
    return lambda ids: "".join(texts[i] for i in ids)


def stripping(*texts: str) -> Decode:
    """The same, but the first text of what is decoded loses its leading space (SentencePiece)."""
    return lambda ids: texts_of(*texts)(ids).removeprefix(" ")


def tokenizer_of(vocab: list[str], decoder: Any, **options: Any) -> Any:
    """With a special token, which is not shown, and an added one, which is."""
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(vocab)}, [], **options))
    raw.decoder = decoder
    raw.add_tokens([AddedToken("[new]", special=False)])
    raw.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENIZERS = {
    "byte fallback": tokenizer_of(
        [*BYTES, "▁", "▁a", "b", "é", "�"],
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        byte_fallback=True,
    ),
    "byte level": tokenizer_of(
        # Tokens of several bytes, which begin or end inside a character, among them.
        [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "aâ", "âĤ", "Ĥ¬b", "ï¿½"],
        decoders.ByteLevel(),
    ),
    "words": tokenizer_of(["▁", "▁a", "b", "é", "▁�", "�"], decoders.Metaspace()),
}


def decoding(tokenizer: Any) -> Decode:
    return lambda ids: tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any tokens, and often the bytes of a whole character."""
    ids = st.integers(0, len(TOKENIZERS[name]) - 1).map(lambda i: [i])
    spelled = st.sampled_from(["a", "é", "€", "😀"]).map(
        {
            "byte fallback": lambda character: list(character.encode()),
            "byte level": lambda character: TOKENIZERS[name].convert_tokens_to_ids(
                list(pre_tokenizers.ByteLevel(False).pre_tokenize_str(character)[0][0])
            ),
            "words": lambda character: [0],
        }[name]
    )
    parts = st.lists(ids | spelled, max_size=12)
    return parts.map(lambda lists: [i for ids in lists for i in ids])


@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)))
def test_text_is_what_the_tokenizer_decodes(data: st.DataObject, name: str) -> None:
    """Read at any time, it is the beginning of it."""
    tokenizer = TOKENIZERS[name]
    ids, decode = data.draw(ids_of(name)), decoding(tokenizer)
    detokenizer, shown = Detokenizer(decode, (), byte_tokens(tokenizer)), [""]
    for token in ids:
        detokenizer.push(token)
        if data.draw(st.booleans()):
            shown.append(detokenizer.text)
    detokenizer.flush()
    assert detokenizer.text == decode(ids)
    for before, after in zip(shown, [*shown[1:], detokenizer.text], strict=True):
        assert after.startswith(before)


def test_byte_tokens_are_those_of_the_vocabulary() -> None:
    found = {name: byte_tokens(tokenizer) for name, tokenizer in TOKENIZERS.items()}
    assert found == {"byte fallback": set(range(256)), "byte level": set(), "words": set()}


def test_a_run_of_byte_tokens_is_shown_when_it_has_ended() -> None:
    """All of its text may still become U+FFFD; a token without text does not end it."""
    tokenizer = TOKENIZERS["byte fallback"]
    end, letter = tokenizer.convert_tokens_to_ids(["<end>", "b"])
    detokenizer = Detokenizer(decoding(tokenizer), (), byte_tokens(tokenizer))
    shown = []
    for token in [letter, *"€".encode(), end, letter, 10, *"€".encode(), end, 0xE2, letter]:
        detokenizer.push(token)
        shown.append(detokenizer.text)
    assert shown == [*["b"] * 5, *["b€b"] * 7, "b€b�����b"]


def test_a_stop_string_is_found_in_a_run_of_byte_tokens() -> None:
    """Not a token later: in many vocabularies a line break is a byte token."""
    tokenizer = TOKENIZERS["byte fallback"]
    letter = tokenizer.convert_tokens_to_ids("b")
    detokenizer = Detokenizer(decoding(tokenizer), ["b\n", "€"], byte_tokens(tokenizer))
    found = []
    for token in [letter, letter, 10, *"€".encode()]:
        detokenizer.push(token)
        found.append(detokenizer.find_stop())
    assert found == [None, None, (1, "b\n"), None, None, (3, "€")]


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
    assert detokenizer.starts == [0, 1, 2, 3, 4]
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
            stop = detokenizer.find_stop()
            if expected is None:
                assert stop is None
                continue
            found += 1
            assert stop is not None and stop[0] == expected
            assert stop[1] in stops and decode(ids).startswith(stop[1], expected)
            detokenizer.cut(expected)
            assert detokenizer.text == decode(ids)[:expected]
            break
    assert found > 15


def test_a_stop_after_characters_of_several_tokens() -> None:
    detokenizer = Detokenizer(of_bytes, ["→😀"])
    for byte in "añ→😀".encode():
        assert detokenizer.find_stop() is None
        detokenizer.push(byte)
        assert "�" not in detokenizer.text
    assert detokenizer.find_stop() == (2, "→😀")
    detokenizer.cut(2)
    assert detokenizer.text == "añ"


def test_of_two_stops_in_one_token_the_first_counts() -> None:
    for stops in (["c", "b"], ["b", "c"]):
        detokenizer = Detokenizer(texts_of("a", "xbxc"), stops)
        detokenizer.push(0)
        assert detokenizer.find_stop() is None
        detokenizer.push(1)
        assert detokenizer.find_stop() == (2, "b")


def test_of_two_stops_that_begin_together_the_first_given_counts() -> None:
    for stops in (["bc", "b"], ["b", "bc"]):
        detokenizer = Detokenizer(texts_of("abc"), stops)
        detokenizer.push(0)
        assert detokenizer.find_stop() == (1, stops[0])


def test_a_stop_is_found_before_an_incomplete_character() -> None:
    detokenizer = Detokenizer(
        lambda ids: b"".join([b"a\xe2", b"b"][i] for i in ids).decode(errors="replace"), ["a"]
    )
    detokenizer.push(0)
    assert detokenizer.find_stop() == (0, "a")
    detokenizer.push(1)
    assert detokenizer.find_stop() is None


def test_a_stop_that_an_earlier_token_completed_does_not_count() -> None:
    """Longer stop strings beside it change nothing."""
    detokenizer = Detokenizer(texts_of("ab", "c", "d"), ["ab", "x" * 9])
    detokenizer.push(0)
    for token in (1, 2):
        detokenizer.push(token)
        assert detokenizer.find_stop() is None
    detokenizer.push(0)
    assert detokenizer.find_stop() == (4, "ab")


def test_a_stop_at_the_very_beginning() -> None:
    detokenizer = Detokenizer(texts_of("ab", "c"), ["a"])
    assert detokenizer.find_stop() is None  # no text yet
    detokenizer.push(0)
    assert detokenizer.find_stop() == (0, "a")
    detokenizer.cut(0)
    assert detokenizer.text == ""


def test_a_cut_reaches_into_text_that_was_not_read_yet() -> None:
    detokenizer = Detokenizer(texts_of("ab", "cd"))
    detokenizer.push(0)
    detokenizer.push(1)
    detokenizer.cut(3)
    assert detokenizer.text == "abc"
    detokenizer.flush()
    assert detokenizer.text == "abc"


def test_a_cut_drops_what_is_held_back() -> None:
    detokenizer = Detokenizer(of_bytes)
    for byte in (97, 98, 0xE2):
        detokenizer.push(byte)
    detokenizer.cut(1)
    detokenizer.flush()
    assert detokenizer.text == "a"


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
    assert (new.text, new.starts, new.find_stop()) == ("abc", [0, 1], (2, "c"))
    new.push(2)
    assert new.text == "abcd" and old.text == "d"
