"""Who runs now, and what becomes of a verdict: tokens, stop conditions, the end of a text."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from draftahead.core.types import Batch, SequenceState, TokenLogprob, Verdict


class Scheduler:
    """Running sequences stand in the order of the cache's rows: index is row."""

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []

    def add(self, sequences: Iterable[SequenceState]) -> None:
        self.waiting.extend(sequences)

    @property
    def next_to_admit(self) -> SequenceState | None:
        full = len(self.running) >= self.max_batch
        return None if full or not self.waiting else self.waiting[0]

    def prefill_batch(self) -> list[SequenceState]:
        """The next to admit and those behind it that share nothing with others: they can be
        filled together."""
        found: list[SequenceState] = []
        for sequence in itertools.islice(self.waiting, self.max_batch - len(self.running)):
            request = sequence.request
            if request.reuse or any(mate.request is request for mate in found[-1:]):
                break
            found.append(sequence)
        return found

    def admit(self) -> None:
        self.running.append(self.waiting.popleft())

    def room(self, sequence: SequenceState) -> int:
        """How many guesses could still be used: the last token is always the target's own."""
        return (sequence.params.max_tokens or 0) - sequence.generated - 1

    def commit(
        self, batch: Batch, verdict: Verdict, logprobs: dict[int, list[TokenLogprob]]
    ) -> list[int]:
        """Appends the new tokens, each checked for being the last; what follows it is dropped.
        Returns how many drafted ones each row keeps."""
        kept = []
        for row, sequence in enumerate(batch.sequences):
            accepted = len(verdict.paths[row]) - 1
            before = sequence.generated
            for index, token in enumerate(verdict.tokens[row]):
                if row in logprobs:
                    sequence.logprobs.append(logprobs[row][index])
                self._append(sequence, token, drafted=index < accepted)
                if sequence.finish_reason is not None:
                    break
            if row in verdict.errors and sequence.finish_reason is None:
                sequence.finish_reason, sequence.error = "error", verdict.errors[row]
            kept.append(sum(sequence.drafted[before:]))
        return kept

    def _append(self, sequence: SequenceState, token: int, *, drafted: bool) -> None:
        sequence.tokens.append(token)
        sequence.drafted.append(drafted)
        sampling, generated = sequence.params, sequence.generated
        if token in sequence.request.end_ids:
            sequence.finish_reason = "stop"
            return  # an end token stays among the ids, and shows no text
        sequence.tail.push(token)
        early = generated < (sampling.min_tokens or 0)
        if generated >= (sampling.max_tokens or 0):
            sequence.finish_reason = "length"
            sequence.tail.flush()  # half a character may still complete a stop string
        if not early and (at := sequence.tail.find_stop()) is not None:
            sequence.finish_reason = "stop"
            keep = sequence.tail.cut(at)
            del sequence.tokens[len(sequence.request.prompt) + keep :]
            del sequence.drafted[keep:], sequence.logprobs[keep:]

    def remove(self, sequence: SequenceState) -> tuple[int, int] | None:
        """Takes a sequence out. The last row fills its place: returns the two rows to swap."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return None
        row, last = self.running.index(sequence), len(self.running) - 1
        self.running[row] = self.running[last]
        self.running.pop()
        return row, last
