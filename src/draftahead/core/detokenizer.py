"""Token ids to text, incrementally, and where a stop string cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def no_text(ids: Sequence[int]) -> str:
    """For a model without a tokenizer: tokens only."""
    return ""


class Detokenizer:
    """The text of a growing output, and the place in it where each token's text begins.

    A token may hold part of a character only: its text appears with the token that completes it.
    Decoding is deferred until the text is read, which can be while a device computes a forward.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self._decode, self.stop_strings = decode, tuple(stop_strings)
        self._longest_stop = max((len(stop) for stop in stop_strings), default=0)
        self.has_text = decode is not no_text
        self._text = ""
        self._starts: list[int] = []  # of each token, in characters
        self._pushed: list[int] = []  # tokens that are not decoded yet
        self._ids: list[int] = []
        self._decoded = 0  # tokens whose text is in self._text
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
        """The output has ended: an incomplete character is shown as it is."""
        self._ended = True

    def rebuilt(self, tokens: Sequence[int]) -> Detokenizer:
        """One for these tokens, after an interrupt of unknown effect."""
        found = Detokenizer(self._decode, self.stop_strings)
        found._pushed += tokens
        return found

    def _decode_pending(self) -> None:
        for token in self._pushed:
            self._ids.append(token)
            self._starts.append(len(self._text))
            new = self._undecoded()
            if new and not new.endswith("�"):
                self._append(new)
        self._pushed.clear()
        if self._ended:
            self._ended = False
            self._append(self._undecoded())

    def _undecoded(self) -> str:
        before = self._decode(self._ids[self._context : self._decoded])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _append(self, new: str) -> None:
        self._text += new
        self._context, self._decoded = self._decoded, len(self._ids)

    # ------------------------------------------------------------------------------ stop strings

    def find_stop(self) -> int | None:
        """Where the first stop string begins, or None. Only one that the newest token completes
        counts: earlier ones were found earlier, or came before min_tokens."""
        new = self.starts[-1] if self.starts else 0
        ends = ((stop, max(0, new - len(stop) + 1)) for stop in self.stop_strings)
        found = [at for stop, since in ends if (at := self.text.find(stop, since)) >= 0]
        return min(found, default=None)

    def num_stable_chars(self) -> int:
        """How many characters can no longer become part of a stop string."""
        text = self.text
        for start in range(max(0, len(text) - self._longest_stop), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stop_strings):
                return start
        return len(text)

    def truncate(self, at: int) -> int:
        """Ends the text at a character. Returns how many tokens lie wholly before it: only they
        remain part of the output."""
        self._decode_pending()
        self._text = self._text[:at]
        begin = max((start for start in self.starts if start <= at), default=0)
        return self.starts.index(begin) if self.starts else 0
