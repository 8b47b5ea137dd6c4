"""Schedules sequences into batch slots, and appends to them the tokens of verdicts.

Running sequences are in the order of their slots: sequence b of a batch is in slot b.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping

from draftahead.core.stats import StepTimer
from draftahead.core.types import (
    Exact,
    ForwardOutput,
    RunningBatch,
    SequenceState,
    TokenLogprob,
    Verdict,
)
from draftahead.models.verifier import Verifier
from draftahead.sampling.noise import NodeContext
from draftahead.sampling.sample import token_logprobs

# Admissions after which an idle slot gives its memory back, if none of them continued its text.
# Fewer: chats that go on later compute their text again; more: memory is kept for those that end.
UNUSED_ADMISSIONS = 64


class Scheduler:
    def __init__(self, verifier: Verifier, exact: Exact) -> None:
        self._verifier, self._cache, self._exact = verifier, verifier.cache, exact
        self.max_batch = self._cache.num_slots
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._num_admitted = 0

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Queues sequences. One that is queued twice runs once."""
        self.waiting.extend(sequences)

    # ------------------------------------------------------------------------- the next batch

    def schedule(self) -> RunningBatch | None:
        """Admits waiting sequences and returns the batch of the next step; None if it is empty."""
        while self.waiting and len(self.running) < self.max_batch:
            if self.waiting[0] in self.running:  # an interrupt came while it was admitted
                self.waiting.popleft()
            else:
                self._admit()
        if not self.running:
            return None
        sequences = tuple(self.running)
        max_depths = tuple(map(self._max_depth, sequences))
        return RunningBatch(sequences, max_depths, self._exact)

    def _admit(self) -> None:
        """Gives the next waiting sequence a slot and fills it: with what another sample of the same
        request holds, with what an idle slot still holds of the prompt, or by prefill, several
        sequences in one forward."""
        timer, slot, sequence = StepTimer(), len(self.running), self.waiting[0]
        admitted, request = [sequence], sequence.request
        samples = [b for b, other in enumerate(self.running) if other.request is request]
        if samples:
            self._cache.copy_slot(samples[0], slot)
            del self._cache.tokens_in[slot][sequence.prompt_length - 1 :]
            sequence.stats.reused_tokens = sequence.prompt_length - 1
            sequence.prompt_logprobs = self.running[samples[0]].prompt_logprobs
        elif request.reuse:
            prompt, idle = request.prompt[:-1], range(slot, self.max_batch)
            matching = {b: self._cache.matching_prefix(b, prompt) for b in idle}
            self._cache.swap_slots(slot, max(idle, key=matching.__getitem__))
            sequence.stats.reused_tokens = self._verifier.prefill(slot, sequence)
        else:
            admitted = self._prefill_batch()
            self._verifier.prefill_slots(slot, admitted)
        self._verifier.runner.synchronize()
        timer.lap("prefill")
        for one in admitted:
            timer.add_to(one.stats, 1 / len(admitted))
            self.running.append(one)
            self.waiting.popleft()
            self._num_admitted += 1
        for unused in range(len(self.running), self.max_batch):
            if self._num_admitted - self._cache.last_used[unused] > UNUSED_ADMISSIONS:
                self._cache.give_back(unused, 0)

    def _prefill_batch(self) -> list[SequenceState]:
        """The next waiting sequence and those behind it that are filled by prefill as well."""
        found: list[SequenceState] = []
        for sequence in itertools.islice(self.waiting, self.max_batch - len(self.running)):
            request = sequence.request
            if request.reuse or any(other.request is request for other in found[-1:]):
                break
            found.append(sequence)
        return found

    def _max_depth(self, sequence: SequenceState) -> int:
        """How deep a draft may be: one less than the tokens left, as a step also emits the target's
        own token."""
        left = (sequence.params.max_tokens or 0) - len(sequence.drafted) - 1
        return max(0, min(left, self._verifier.max_depth(sequence)))

    # ------------------------------------------------------------------------ after a verdict

    def logprobs(
        self, batch: RunningBatch, verdict: Verdict, output: ForwardOutput
    ) -> dict[int, list[TokenLogprob]]:
        """Of the emitted tokens of each sequence that asks for them, at the nodes they follow."""
        found = {}
        for b, sequence in enumerate(batch.sequences):
            if sequence.params.logprobs is not None:
                tokens, path = verdict.tokens[b], verdict.paths[b]
                contexts = [NodeContext(sequence, tuple(tokens[:i])) for i in range(len(tokens))]
                found[b] = token_logprobs(output.logits[b, path[: len(tokens)]], contexts, tokens)
        return found

    def update(
        self, batch: RunningBatch, verdict: Verdict, logprobs: Mapping[int, list[TokenLogprob]]
    ) -> list[int]:
        """Appends the emitted tokens up to an end token, a stop string or max_tokens. Returns how
        many drafted tokens each sequence keeps. An interrupt undoes the sequence it meets, because
        the step is done again."""
        num_kept = []
        for b, sequence in enumerate(batch.sequences):
            before, reason = len(sequence.drafted), sequence.finish_reason
            emitted = verdict.tokens[b] if sequence.params.max_tokens else []
            try:
                for index, token in enumerate(emitted):
                    if sequence.finish_reason is not None:
                        break
                    sequence.logprobs += logprobs.get(b, [])[index : index + 1]
                    self._append(sequence, token, drafted=index < len(verdict.paths[b]) - 1)
            except BaseException:
                _truncate(sequence, before)
                sequence.detokenizer = sequence.detokenizer.rebuilt(sequence.output)
                sequence.finish_reason, sequence.stop_reason = reason, None
                raise
            if b in verdict.errors and sequence.finish_reason is None:
                sequence.error, sequence.finish_reason = verdict.errors[b], "error"
            elif not sequence.params.max_tokens and sequence.finish_reason is None:
                sequence.finish_reason = "length"  # a prompt without an output
            num_kept.append(sum(sequence.drafted[before:]))
        return num_kept

    def _append(self, sequence: SequenceState, token: int, *, drafted: bool) -> None:
        sequence.tokens.append(token)
        sequence.drafted.append(drafted)
        params, detokenizer = sequence.params, sequence.detokenizer
        if token in sequence.end_ids:
            is_eos = token in sequence.request.eos_token_ids and not params.ignore_eos
            sequence.finish_reason, sequence.stop_reason = "stop", None if is_eos else token
            if params.include_stop_str_in_output:
                detokenizer.push(token)
            return  # an end token is part of the ids, but not of the text
        detokenizer.push(token)
        generated = len(sequence.drafted)
        if generated >= (params.max_tokens or 0):
            sequence.finish_reason = "length"
            detokenizer.flush()  # an incomplete character may still complete a stop string
        if not detokenizer.stop_strings or generated < (params.min_tokens or 0):
            return
        if (found := detokenizer.find_stop()) is not None:
            begin, stop = found
            sequence.finish_reason, sequence.stop_reason = "stop", stop
            detokenizer.cut(begin + len(stop) * params.include_stop_str_in_output)

    def remove(self, sequence: SequenceState) -> bool:
        """Takes a sequence out; the last running one moves into its slot. Returns False if the
        sequence was neither waiting nor running."""
        was_waiting = sequence in self.waiting
        if was_waiting:
            self.waiting.remove(sequence)
        if sequence not in self.running:
            return was_waiting
        slot, last = self.running.index(sequence), len(self.running) - 1
        if sequence.finish_reason == "error":
            self._cache.clear_slot(slot)
        self._cache.last_used[slot] = self._num_admitted
        # In one assignment, so that an interrupt loses no sequence. One between this line and the
        # next leaves the entries of other tokens in the slot, which Verifier.forward notices.
        behind = self.running[slot + 1 :]
        self.running = [*self.running[:slot], *behind[-1:], *behind[:-1]]
        self._cache.swap_slots(slot, last)
        return True


def _truncate(sequence: SequenceState, count: int) -> None:
    """Drops all output tokens but the first few."""
    del sequence.tokens[sequence.prompt_length + count :]
    del sequence.drafted[count:], sequence.logprobs[count:]
