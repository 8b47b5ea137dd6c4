"""The target: scores whole drafts in one pass, keeps what was accepted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from draftahead.backends.base import DeviceTree
from draftahead.core.stats import CompileTime
from draftahead.core.types import Batch, Draft, Exact, ForwardOutput, SequenceState, Verdict
from draftahead.errors import ReplayUnsupportedError
from draftahead.models.runner import ModelRunner

MAX_NODES = 64  # of one row's draft, the root included
REPLAY_ROWS = 8  # nodes of every replay pass, drafted or not
REPLAY_CHUNK = 128


class Verifier:
    """A model under speculation. Row b of a batch lives in row b of the cache."""

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        max_context: int | None,
        exact: Exact,
        compiled: bool = False,
    ) -> None:
        replay = exact == "replay"
        spare = REPLAY_CHUNK if replay else MAX_NODES
        self.runner = ModelRunner(
            model, max_batch=max_batch, max_context=max_context, spare=spare, compiled=compiled
        )
        self.replay = replay
        # Kernels whose bits depend on the shape of a pass are given one shape only.
        self.fixed_shape = replay and not self.runner.batch_invariant
        self._proven: set[int] = set()  # numbers of slots that passed the self-test
        self._touched = 0  # slots that were written for the sake of timing
        if replay:
            self._self_test(0, min(256, self.runner.cache.length))

    @property
    def max_nodes(self) -> int:
        return REPLAY_ROWS if self.fixed_shape else MAX_NODES

    @property
    def max_context(self) -> int:
        return self.runner.max_context

    @property
    def vocabulary(self) -> int:
        return self.runner.vocabulary

    def room(self, sequence: SequenceState) -> int:
        """How deep a draft may go before it leaves the context, or crosses longrope's switch."""
        length, switch = len(sequence.tokens), self.runner.switch
        room = self.max_context - length
        if switch is not None and length <= switch:
            room = min(room, switch - length)
        return room

    # ------------------------------------------------------------------------------ a step

    def prefill(self, row: int, sequence: SequenceState) -> int:
        """All of the text but its last token, which is the root of the next step."""
        tokens = sequence.tokens[:-1]
        if self.replay:
            self._self_test(row, self._live(sequence))
        if self.fixed_shape:
            live = self._live(sequence)
            return self.runner.prefill(row, tokens, fixed=REPLAY_CHUNK, live=live)
        if not sequence.request.reuse:
            self.runner.cache.tokens_in[row].clear()
        return self.runner.prefill(row, tokens)

    def prefill_slots(self, first: int, sequences: Sequence[SequenceState]) -> None:
        """The same for several texts in rows from `first` on, of which nothing is held yet."""
        if self.replay:
            for row, sequence in enumerate(sequences, start=first):
                self.prefill(row, sequence)
        else:
            self.runner.prefill_slots(first, [sequence.tokens[:-1] for sequence in sequences])

    def score(self, batch: Batch, draft: Draft) -> ForwardOutput:
        """One pass over all nodes of all rows, but for replay and for rows rotated apart."""
        for row, sequence in enumerate(batch.sequences):
            # A step that was interrupted may have kept keys of tokens that never were committed,
            # or lost keys of some that were.
            held = self.runner.cache.tokens_in[row]
            del held[len(sequence.tokens) - 1 :]
            if len(held) < len(sequence.tokens) - 1:
                self.prefill(row, sequence)
        self._rotate_crossed(batch)
        rows = range(len(batch.sequences))
        if draft.on_device is not None:
            ahead = DeviceTree(batch.roots, draft.on_device.trees)
            logits = self.runner.run(draft.tokens, parents=ahead)
            draft.on_device.clock.mark()
            return ForwardOutput(logits, self.runner.best, draft=draft)
        parents = None if draft.is_chain else draft.parents
        if self.fixed_shape:
            # Each text in a pass of its own, always of one shape over the same slots: so a
            # token's logits are the same bits as a root, as a guess, with mates or without.
            width = draft.tokens.shape[1]
            padded = F.pad(draft.tokens, (0, REPLAY_ROWS - width))
            lives = [self._live(sequence) for sequence in batch.sequences]
            alone = [
                self.runner.run(padded[r : r + 1], first=r, live=lives[r]).clone() for r in rows
            ]
            return ForwardOutput(torch.cat(alone)[:, :width], draft=draft)
        if len({self.runner.cache.far[row] for row in rows}) > 1:
            above = [None if parents is None else parents[r : r + 1] for r in rows]
            run = self.runner.run
            alone = [run(draft.tokens[r : r + 1], first=r, parents=above[r]).clone() for r in rows]
            return ForwardOutput(torch.cat(alone), draft=draft)
        logits = self.runner.run(draft.tokens, parents=parents)
        passes = self.runner
        return ForwardOutput(logits, passes.best, passes.top, draft=draft)

    def scores_device_drafts(self, draft: Draft, batch: Batch) -> bool:
        """Whether it can score trees that nobody has looked at."""
        if draft.on_device is None or self.fixed_shape or draft.on_device.roots != batch.roots:
            return False
        texts, nodes = draft.tokens.shape
        fits = texts == len(batch.sequences) and nodes <= self.max_nodes
        return fits and self.runner.scores_device_drafts(texts, nodes)

    def _rotate_crossed(self, batch: Batch) -> None:
        """A text that has just outgrown longrope's switch is rotated anew, as transformers does."""
        if self.runner.switch is not None:
            for row, sequence in enumerate(batch.sequences):
                if self.runner.cache.far[row] != self.runner.is_far(len(sequence.tokens)):
                    self.prefill(row, sequence)

    def keep(self, batch: Batch, draft: Draft, verdict: Verdict) -> None:
        tokens = draft.host_tokens
        kept = [[tokens[row][node] for node in path] for row, path in enumerate(verdict.paths)]
        self.runner.cache.keep(verdict.paths, kept)

    def timed_pass(self, rows: int, keys: int) -> float:
        """Seconds of a pass over so many rows behind so many keys, of no text. For idle caches."""
        held = self.runner.cache.tokens_in[0]
        held[:] = [0] * keys
        if keys > self._touched:  # else a CPU would read one and the same empty page all the time
            for stored in self.runner.cache.stored():
                stored[:, 0, :, :keys] = 0
            self._touched = keys
        nodes = torch.zeros(1, rows, dtype=torch.long)
        self.runner.synchronize()
        start = time.perf_counter() - CompileTime.seconds
        self.runner.run(nodes)
        self.runner.synchronize()
        held.clear()
        return time.perf_counter() - CompileTime.seconds - start

    # ---------------------------------------------------------------------------- replay

    def _live(self, sequence: SequenceState) -> int:
        """How many slots this request's passes read in replay: a power of two that the request
        alone decides, so that sums run over the same range from its first token to its last."""
        most = len(sequence.request.prompt) + (sequence.params.max_tokens or 0)
        live = 256
        while live < most + REPLAY_CHUNK:
            live *= 2
        return min(live, self.runner.cache.length)

    def _self_test(self, row: int, live: int) -> None:
        """A token must get the same bits as the root of a pass and as any node of a chain."""
        if live in self._proven:
            return
        generator = torch.Generator().manual_seed(live)
        start = max(0, min(live // 2, self.max_context - REPLAY_ROWS))
        shape = (start + REPLAY_ROWS,)
        tokens = torch.randint(0, self.vocabulary, shape, generator=generator).tolist()
        fixed = {"fixed": REPLAY_CHUNK, "live": live} if self.fixed_shape else {}
        self.runner.prefill(row, tokens[:start], **fixed)
        held, chain = self.runner.cache.tokens_in[row], tokens[start:]
        slots = live if self.fixed_shape else None
        together = self.runner.run(torch.tensor([chain]), first=row, live=slots)[0].clone()
        for index, token in enumerate(chain):
            others = torch.randint(0, self.vocabulary, (REPLAY_ROWS - 1,), generator=generator)
            nodes = [token, *others.tolist()] if self.fixed_shape else [token]
            alone = self.runner.run(torch.tensor([nodes]), first=row, live=slots)[0, 0]
            if not torch.equal(alone, together[index]):
                gap = float((alone - together[index]).abs().max())
                raise ReplayUnsupportedError(
                    f"exact='replay' does not hold on this machine: a token's logits change by "
                    f"{gap:.1e} with its row in a pass of {REPLAY_ROWS} over {live} slots; "
                    "use exact='law', or another dtype or device"
                )
            held.append(token)
        held.clear()
        self._proven.add(live)
