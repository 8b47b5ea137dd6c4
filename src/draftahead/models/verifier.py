"""The target as a verifier: one forward over whole drafts, and the KV cache after a verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.base import DeviceTree
from draftahead.backends.select import CPU_KERNELS
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.stats import CompileTime
from draftahead.core.tree import MAX_NODES
from draftahead.core.types import (
    Batch,
    Exact,
    ForwardOutput,
    RunningBatch,
    SequenceState,
    TokenLogprob,
    Verdict,
)
from draftahead.errors import ReplayUnsupportedError
from draftahead.models.row_probe import refuse_dependent_rows
from draftahead.models.runner import ModelRunner
from draftahead.sampling.sample import own_logprobs

# Nodes of every forward in replay mode, drafted or not. More allow longer drafts there, and make
# every forward dearer.
REPLAY_NODES = 8
REPLAY_CHUNK = 128  # prompt tokens of every prefill forward in replay mode
# KV entries that a forward reads in replay mode: at least so many, then powers of two. Larger:
# fewer sizes, each of which needs a self-test, and more padding to read.
REPLAY_KV_LEN = 256


class Verifier:
    """A model whose drafts are verified. Sequence b of a batch lives in slot b of its cache."""

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        max_context: int | None,
        exact: Exact,
        compiled: bool,
        kv_cache_dtype: str | None = None,
    ) -> None:
        self.replay = exact == "replay"
        self.runner = ModelRunner(
            model,
            max_batch=max_batch,
            max_context=max_context,
            scratch_entries=REPLAY_CHUNK if self.replay else MAX_NODES,
            compiled=compiled,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.cache = self.runner.cache
        self.max_context, self.vocab_size = self.runner.max_context, self.runner.vocab_size
        self._owners = [-1] * max_batch  # id of the sequence that a slot was last compared with
        # By number of the runner's binding: the model may be changed.
        self._tested_kv_lens: set[tuple[int, int]] = set()
        self._probed_binding: int | None = None  # of the runner; None: rows may be dependent
        if self.replay:
            self._self_test(0, min(REPLAY_KV_LEN, self.cache.num_entries))

    def require_independent_rows(self) -> None:
        """Refuses the model, now and after each change of it, if drafting cannot be lossless."""
        if self._probed_binding != self.runner.num_bindings:
            refuse_dependent_rows(self.runner)
            self._probed_binding = self.runner.num_bindings

    @property
    def fixed_shape(self) -> bool:
        """Whether all forwards have one shape: for replay with kernels whose bits depend on it."""
        return self.replay and not self.runner.batch_invariant

    @property
    def first_forwards_compile(self) -> bool:
        """Whether the first forward over a number of nodes may take far longer than later ones."""
        return self.runner.backend_choice.name != CPU_KERNELS

    @property
    def max_nodes(self) -> int:
        return REPLAY_NODES if self.fixed_shape else MAX_NODES

    def max_depth(self, sequence: SequenceState) -> int:
        """How deep a draft may be before it leaves the context, or crosses longrope's threshold."""
        length, threshold = len(sequence.tokens), self.runner.long_rope_threshold
        depth = min(self.max_context - length, self.max_nodes - 1)
        if threshold is not None and length <= threshold:
            depth = min(depth, threshold - length)
        return depth

    # ------------------------------------------------------------------------------- a prompt

    def prefill(self, slot: int, sequence: SequenceState) -> int:
        """Computes the KV entries of all tokens but the last, which is the root of the next step,
        reusing those that the slot holds; returns how many it reused."""
        self._enter([slot])
        return self._fill(slot, sequence)

    def _fill(self, slot: int, sequence: SequenceState) -> int:
        prefill = partial(self.runner.prefill, slot, sequence.tokens[:-1])
        if self.replay:
            self._self_test(slot, self._kv_len(sequence))
        if self.fixed_shape:
            prefill = partial(prefill, chunk=REPLAY_CHUNK, kv_len=self._kv_len(sequence))
        if not sequence.lacks_prompt_logprobs:
            return prefill()
        found: list[TokenLogprob] = []
        count, prompt = sequence.params.prompt_logprobs or 0, sequence.request.prompt

        def take(start: int, logits: Tensor) -> None:
            following = prompt[start + 1 : start + 1 + len(logits)]
            found.extend(own_logprobs(logits[: len(following)], following, count))

        prefill(take_logits=take)
        sequence.prompt_logprobs = found  # at the end: an interrupted prefill is done again
        return 0

    def prefill_slots(self, first_slot: int, sequences: Sequence[SequenceState]) -> None:
        """The same for several sequences in slots from `first_slot` on, reusing nothing."""
        if self.replay or any(sequence.lacks_prompt_logprobs for sequence in sequences):
            for slot, sequence in enumerate(sequences, start=first_slot):
                self.cache.tokens_in[slot].clear()
                self.prefill(slot, sequence)
        else:
            self._enter(range(first_slot, first_slot + len(sequences)))
            self.runner.prefill_slots(first_slot, [s.tokens[:-1] for s in sequences])

    def _enter(self, slots: Sequence[int]) -> None:
        """Before prompts. The model may have changed. And a slot is zeroed if the sequence before
        was given up before its first verdict, which would have shown NaN in its entries."""
        self.runner.refresh(slots[0])
        if self._probed_binding is not None:
            self.require_independent_rows()
        for slot in slots:
            if self.cache.is_unverified[slot]:
                self.cache.clear_slot(slot)
            self.cache.is_unverified[slot] = True

    # --------------------------------------------------------------------------------- a step

    def forward(self, batch: RunningBatch, draft: Draft | DeviceDraft) -> ForwardOutput:
        """One forward over all nodes of all sequences; one per sequence in fixed-shape replay, and
        where sequences use different frequencies of longrope."""
        self._repair(batch)
        slots = range(len(batch.sequences))
        if isinstance(draft, DeviceDraft) and draft.trees is not None:
            trees = DeviceTree(draft.roots, draft.trees)
            output = self.runner.forward(draft.token_tensor, parents=trees)
            if draft.timer is not None:
                draft.timer.mark()
            return output
        parents = None if draft.is_chain else draft.parent_tensor
        if self.fixed_shape:
            # One forward per sequence, always of the same shape and number of KV entries: a token's
            # logits are the same bits as a root or a drafted node, and in any batch.
            padded = F.pad(draft.token_tensor, (0, REPLAY_NODES - draft.width))
            kv_lens = [self._kv_len(sequence) for sequence in batch.sequences]
            alone = [self._forward_one(padded, slot, None, kv_lens[slot]) for slot in slots]
            return ForwardOutput(torch.cat(alone)[:, : draft.width])
        if len({self.cache.long_rope[slot] for slot in slots}) > 1:
            alone = [self._forward_one(draft.token_tensor, slot, parents, None) for slot in slots]
            return ForwardOutput(torch.cat(alone))
        return self.runner.forward(draft.token_tensor, parents=parents)

    def _forward_one(
        self, tokens: Tensor, slot: int, parents: Tensor | None, kv_len: int | None
    ) -> Tensor:
        parents = None if parents is None else parents[slot : slot + 1]
        output = self.runner.forward(
            tokens[slot : slot + 1], first_slot=slot, parents=parents, kv_len=kv_len
        )
        return output.logits.clone()

    def _repair(self, batch: RunningBatch) -> None:
        """Prefills what slots lack of their sequences' tokens. An interrupted step may have kept KV
        entries of tokens that were never emitted, or lost some; an interrupted move of slots leaves
        another sequence's. A sequence that has outgrown longrope's threshold is computed anew with
        the other frequencies, as in transformers."""
        long_rope = self.runner.long_rope_threshold is not None
        for slot, sequence in enumerate(batch.sequences):
            held, needed = self.cache.tokens_in[slot], len(sequence.tokens) - 1
            del held[needed:]
            if self._owners[slot] != sequence.id:
                if held != sequence.tokens[: len(held)]:
                    held.clear()
                self._owners[slot] = sequence.id
            if len(held) < needed or (
                long_rope and self.cache.long_rope[slot] != self.runner.is_long_rope(needed + 1)
            ):
                self._fill(slot, sequence)

    def supports_device_draft(self, draft: DeviceDraft, batch: Batch) -> bool:
        """Whether a device draft can be verified without a copy on the host."""
        if self.fixed_shape or draft.roots != batch.roots:
            return False
        size, width = draft.token_tensor.shape
        if size != len(batch.sequences) or width > self.max_nodes:
            return False
        return self.runner.supports_device_drafts(size, width)

    def commit(self, draft: Draft, verdict: Verdict) -> None:
        """Keeps the KV entries of the accepted paths."""
        paths = verdict.paths
        kept = [[draft.tokens[b][node] for node in path] for b, path in enumerate(paths)]
        self.cache.commit(paths, kept)
        for slot in range(len(paths)):
            self.cache.is_unverified[slot] &= slot in verdict.errors

    def timed_forward(self, num_nodes: int, kv_len: int) -> float:
        """Seconds of a forward over so many nodes behind so many KV entries, for an idle cache."""
        held = self.cache.tokens_in[0]
        held[:] = [0] * kv_len
        if kv_len > self.cache.written[0]:  # other pages are one page of zeros: too fast to read
            for stored in self.cache.tensors():
                stored[:, 0, :, :kv_len] = 0
        nodes = torch.zeros(1, num_nodes, dtype=torch.long)
        self.runner.synchronize()
        start = time.perf_counter() - CompileTime.seconds
        self.runner.forward(nodes)
        self.runner.synchronize()
        self.cache.erase(0, kv_len, kv_len + num_nodes + MAX_NODES)  # and what pads them
        held.clear()
        return time.perf_counter() - CompileTime.seconds - start

    # --------------------------------------------------------------------------------- replay

    def _kv_len(self, sequence: SequenceState) -> int:
        """How many KV entries this request's forwards read in replay mode: a power of two that
        depends on the request alone, so that all its forwards sum over the same range."""
        longest = sequence.prompt_length + (sequence.params.max_tokens or 0)
        kv_len = REPLAY_KV_LEN
        while kv_len < longest + REPLAY_CHUNK:
            kv_len *= 2
        return min(kv_len, self.cache.num_entries)

    def _self_test(self, slot: int, kv_len: int) -> None:
        """A token must get the same bits as the root of a forward and as any node of a chain."""
        if (self.runner.num_bindings, kv_len) in self._tested_kv_lens:
            return
        generator = torch.Generator().manual_seed(kv_len)
        start = max(0, min(kv_len // 2, self.max_context - REPLAY_NODES))
        shape = (start + REPLAY_NODES,)
        tokens = torch.randint(0, self.vocab_size, shape, generator=generator).tolist()
        read = kv_len if self.fixed_shape else None
        chunk = REPLAY_CHUNK if self.fixed_shape else None
        self.runner.prefill(slot, tokens[:start], chunk=chunk, kv_len=read)
        held, chain = self.cache.tokens_in[slot], tokens[start:]
        forward = self.runner.forward
        output = forward(torch.tensor([chain]), first_slot=slot, kv_len=read)
        together = output.logits[0].clone()
        for index, token in enumerate(chain):
            others = torch.randint(0, self.vocab_size, (REPLAY_NODES - 1,), generator=generator)
            nodes = torch.tensor([[token, *others.tolist()] if self.fixed_shape else [token]])
            alone = forward(nodes, first_slot=slot, kv_len=read).logits[0, 0]
            if not torch.equal(alone, together[index]):
                gap = float((alone - together[index]).abs().max())
                raise ReplayUnsupportedError(
                    f"exact='replay' does not hold on this machine: a token's logits change by "
                    f"{gap:.1e} with its place in a forward of {REPLAY_NODES} nodes over {kv_len} "
                    "KV entries; use exact='distribution', or another dtype or device"
                )
            held.append(token)
        self.cache.erase(slot, 0, kv_len)
        self._tested_kv_lens.add((self.runner.num_bindings, kv_len))
