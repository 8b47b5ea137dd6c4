"""Token ids to text, incrementally, and where a stop string cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from operator import itemgetter
from typing import Any

Decode = Callable[[Sequence[int]], str]


def no_text(ids: Sequence[int]) -> str:
    """For a model without a tokenizer: tokens only."""
    return ""


def decoder_of(tokenizer: Any) -> Decode:
    def decode(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    return decode


def byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that stand for single bytes, `<0x00>` to `<0xFF>` (SentencePiece)."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    return frozenset(tokenizer.convert_tokens_to_ids(names)) - {None, tokenizer.unk_token_id}


class Detokenizer:
    """The text of a growing output, and the place in it where each token's text begins.

    The text of all tokens is what the tokenizer decodes them to, to the character. So what a later
    token may still change is held back: an incomplete character at the end, and a run of byte
    tokens, all of which are decoded to U+FFFD if the run turns out not to be UTF-8.
    Decoding is deferred until the text is read, which can be while a device computes a forward.
    """

    def __init__(
        self,
        decode: Decode,
        stop_strings: Sequence[str] = (),
        byte_tokens: Set[int] = frozenset(),
    ) -> None:
        self._decode, self.stop_strings, self._byte_tokens = decode, stop_strings, byte_tokens
        self._longest_stop = max((len(stop) for stop in stop_strings), default=0)
        self.has_text = decode is not no_text
        self._text = ""
        self._tail = ""  # what is held back behind it
        self._starts: list[int] = []  # of each token, in characters
        self._pushed: list[int] = []  # tokens that are not decoded yet
        self._ids: list[int] = []
        self._decoded = 0  # tokens whose text is in self._text
        self._searched = 0  # characters that some token before the newest had completed
        self._ended = False
        # Decoding starts at this token: the text of a token may depend on the one before it
        # (leading spaces).
        self._context = 0

    @property
    def text(self) -> str:
        self._decode_pending()
        return self._text

    @property
    def starts(self) -> list[int]:
        self._decode_pending()
        return self._starts

    def push(self, token: int) -> None:
        self._pushed.append(token)

    def flush(self) -> None:
        """The output has ended: what is held back is shown as it is."""
        self._ended = True

    def rebuilt(self, tokens: Sequence[int]) -> Detokenizer:
        """One for these tokens, after an interrupt of unknown effect."""
        found = Detokenizer(self._decode, self.stop_strings, self._byte_tokens)
        found._pushed += tokens
        return found

    def _decode_pending(self) -> None:
        for token in self._pushed:
            complete = len(self._text) + len(self._complete_tail())
            self._searched = max(self._searched, complete)
            self._ids.append(token)
            self._starts.append(len(self._text))
            before, self._tail = self._tail, self._undecoded()
            # A token without text (skipped, special) does not end what was held back.
            has_text = self._tail != before
            if has_text and token not in self._byte_tokens and not self._tail.endswith("�"):
                self._settle()
        self._pushed.clear()
        if self._ended:
            self._ended = False
            self._settle()

    def _undecoded(self) -> str:
        before = self._decode(self._ids[self._context : self._decoded])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _complete_tail(self) -> str:
        return self._tail.rstrip("�")

    def _settle(self) -> None:
        self._text += self._tail
        self._tail = ""
        self._context, self._decoded = self._decoded, len(self._ids)

    # ------------------------------------------------------------------------------ stop strings

    def find_stop(self) -> tuple[int, str] | None:
        """Where the first stop string begins, and which it is. Only one that the newest token
        completes counts: earlier ones were found earlier, or came before min_tokens."""
        self._decode_pending()
        start = max(0, min(len(self._text), self._searched - self._longest_stop))
        recent, found = self._text[start:] + self._complete_tail(), []
        for stop in self.stop_strings:
            since = max(0, self._searched - len(stop) + 1 - start)
            if (at := recent.find(stop, since)) >= 0:
                found.append((start + at, stop))
        return min(found, key=itemgetter(0), default=None)

    def num_stable_chars(self) -> int:
        """How many characters can no longer become part of a stop string."""
        text = self.text
        for start in range(max(0, len(text) - self._longest_stop), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stop_strings):
                return start
        return len(text)

    def cut(self, end: int) -> None:
        """Ends the text at a character."""
        self._decode_pending()
        self._settle()
        self._text = self._text[:end]
