"""Prompt look-up (Saxena 2023): drafts what followed the last n-gram at its latest occurrence.

The longest n-gram counts that ends the sequence and occurs earlier in it, from `prompt_lookup_max`
tokens down to `prompt_lookup_min`.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftahead.core.draft import Draft
from draftahead.core.types import Batch, SequenceView
from draftahead.drafters.base import Drafter, DrafterContext, positive_int
from draftahead.drafters.registry import register
from draftahead.errors import ConfigError


class NgramIndex:
    """The latest occurrence of each n-gram of a growing sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the next token
        self._indexed = 0  # tokens whose preceding n-grams are in the index

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(self._indexed, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        for size in self._sizes:
            if size <= len(tokens):
                start = self._next.get(tuple(tokens[len(tokens) - size :]))
                if start is not None:
                    period = len(tokens) - start  # past the end, the continuation repeats
                    return [tokens[start + offset % period] for offset in range(count)]
        return []


@register("lookup", synonyms=("ngram",))
class Lookup(Drafter):
    """Drafts what followed the same n-gram earlier in the sequence."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        num_speculative_tokens: int = 5,  # six nodes cost little more than one, even on a CPU
        prompt_lookup_max: int = 3,
        prompt_lookup_min: int = 1,
    ) -> None:
        self.count = positive_int("num_speculative_tokens", num_speculative_tokens)
        self.longest = positive_int("prompt_lookup_max", prompt_lookup_max)
        self.shortest = positive_int("prompt_lookup_min", prompt_lookup_min)
        if self.shortest > self.longest:
            raise ConfigError(
                f"prompt_lookup_min ({self.shortest}) must not exceed prompt_lookup_max "
                f"({self.longest})"
            )
        self._indexes: dict[int, NgramIndex] = {}  # by sequence

    def propose(self, batch: Batch) -> Draft | None:
        chains = []
        for sequence, max_depth in zip(batch.sequences, batch.max_depths, strict=True):
            index = self._indexes.get(sequence.id) or NgramIndex(self.shortest, self.longest)
            self._indexes[sequence.id] = index
            index.extend(sequence.tokens)
            chains.append(index.continuation(sequence.tokens, min(self.count, max_depth)))
        return Draft.chains(batch.roots, chains) if any(chains) else None

    def release(self, sequence: SequenceView) -> None:
        self._indexes.pop(sequence.id, None)
