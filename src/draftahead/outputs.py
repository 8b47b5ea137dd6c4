"""What users get: streams, and the text of tokens beside their log-probabilities."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from draftahead.core.types import Completion, StreamChunk, TokenLogprob

# Log-probabilities of an output, or of a prompt, whose first token has none.
Logprob = TypeVar("Logprob", bound=TokenLogprob | None)


class Stream(Iterator[StreamChunk]):
    """The chunks of a text as it settles. `completion` is the whole of it once the last one was
    taken; it is also the value of `yield from` a stream. A stream that is closed, or dropped,
    ends its request."""

    def __init__(self, chunks: Generator[StreamChunk, None, Completion]) -> None:
        self._chunks = chunks
        self.completion: Completion | None = None

    def __next__(self) -> StreamChunk:
        try:
            return next(self._chunks)
        except StopIteration as end:
            self.completion = self.completion or end.value
            raise

    def close(self) -> None:
        self._chunks.close()

    def __repr__(self) -> str:
        return f"Stream({'running or closed' if self.completion is None else self.completion})"


class TokenTexts:
    """The text of single tokens, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = functools.lru_cache(maxsize=2**16)(self._text_of)

    def beside(self, logprobs: Iterable[Logprob] | None) -> list[Logprob] | None:
        """Log-probabilities with the text of each token."""
        if logprobs is None or self._tokenizer is None:
            return None if logprobs is None else list(logprobs)
        return [one if one is None else self._with_texts(one) for one in logprobs]

    def _with_texts(self, one: TokenLogprob) -> Any:
        texts: Mapping[int, str] = {i: self._text(i) for i in (one.token_id, *one.top)}
        return dataclasses.replace(one, texts=texts)

    def _text_of(self, token: int) -> str:
        """As it is in the middle of a text, where a leading space is not stripped."""
        once, twice = (
            self._tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2)
        )
        found: str = twice.removeprefix(once) if twice.startswith(once) else once
        return found
