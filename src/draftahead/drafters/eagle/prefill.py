"""Brings the head's KV cache up to date with the sequences.

At every step the tokens in the cache are compared with the sequence, so that steps without the head
do no harm. Accepted tokens are computed again, with the target's hidden states in place of the
head's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.backends.cpu.kernels import NODES_PER_CALL
from draftahead.backends.cuda.hf_graph import GraphedPrefill
from draftahead.core.device import device_of
from draftahead.core.types import SequenceView
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.kv.cache import CacheView, SlotOwners, slots_from
from draftahead.models.runner import PREFILL_CHUNK

# Missing inputs of a sequence that are computed in one forward with those of the batch, padded to
# the longest. A larger limit pads more; a smaller one needs separate forwards more often.
MAX_MISSING = 16


def has_inputs(sequence: SequenceView) -> bool:
    """An input needs the hidden states of a token before the root."""
    return len(sequence.tokens) > 1


class HeadPrefill:
    """Compares the head's cache with the sequences of a batch, and computes long gaps at once."""

    def __init__(self, runner: EagleRunner) -> None:
        self._runner, self._owners = runner, SlotOwners(runner.cache)
        self._graphs: GraphedPrefill | None = None
        if device_of(runner.device).is_gpu:
            self._graphs = GraphedPrefill("the head", self._graphed_forward, runner.cache)
        # Graphs read the target's hidden states at the address at which they were captured.
        self._graphs_hidden = runner.target.cache.hidden

    def prepare(self, sequences: Sequence[SequenceView], max_missing: int) -> list[list[int]]:
        """Returns the tokens of each slot's missing inputs, the last of which is the root. If there
        are more than `max_missing`, all but the last are computed here. For a sequence of one
        token, which has no input, a dummy is returned."""
        cached, missing = self._runner.cache.tokens_in, []
        for slot, sequence in enumerate(sequences):
            is_owner = self._owners.claim(sequence.id, slot)
            tokens = sequence.tokens if has_inputs(sequence) else [0, 0]
            if is_owner and has_inputs(sequence):
                num_matching = len(cached[slot])  # tokens are only appended
            else:
                num_matching = self._runner.cache.matching_prefix(slot, tokens[1:])
            num_cached = min(num_matching, len(tokens) - 2)
            del cached[slot][num_cached:]
            if len(tokens) - 1 - num_cached > max_missing:
                self.fill(slot, tokens)
            missing.append(tokens[1 + len(cached[slot]) :])
        return missing

    def commit(self, missing: Sequence[Sequence[int]]) -> None:
        """Records that these inputs were computed."""
        for slot, tokens in enumerate(missing):
            self._runner.cache.tokens_in[slot].extend(tokens)

    # --------------------------------------------------------------------------- long gaps

    def fill(self, slot: int, tokens: Sequence[int]) -> None:
        """Computes the KV entries of all missing inputs of a sequence but the last."""
        runner = self._runner
        cached, end = runner.cache.tokens_in[slot], len(tokens) - 2
        chunk = PREFILL_CHUNK if runner.cpu is None else NODES_PER_CALL
        runner.target.cache.compact()
        while (start := len(cached)) < end:
            part = list(tokens[1 + start : 1 + min(end, start + chunk)])
            if not self._fill_by_graph(slot, part, start):
                runner.forward_inputs(slot, torch.tensor([part]), [start], kv_only=True)
            cached.extend(part)

    def _fill_by_graph(self, slot: int, tokens: list[int], num_cached: int) -> bool:
        """A chunk as a CUDA graph, where one was captured."""
        if self._graphs is None:
            return False
        hidden = self._runner.target.cache.hidden
        if self._graphs_hidden is not hidden:
            self._graphs.graphs.forget()
            self._graphs_hidden = hidden
        return self._graphs.run(slot, tokens, num_cached, self._runner.cache.num_entries - 1)

    def _graphed_forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, view: CacheView, _: bool
    ) -> Tensor:
        """The forward of a chunk in slots and entries that only the device knows."""
        runner = self._runner
        slots = slots_from(view.first_slot, view.entries)
        # The head's cache may be longer than the target's: entries behind it are padding.
        entries = view.entries.clamp(max=runner.target.cache.num_entries - 1)
        features = runner.features(slots, entries)
        embedded = runner.embed(tokens).to(features.dtype)
        return runner.head_forward(embedded, features, positions, mask, view, num_outputs=1)
