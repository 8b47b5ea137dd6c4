"""Forwards of a head over draft trees, one level per call, for TreeBuilder and for sampled
chains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.core import tree
from draftahead.core.device import last_of, padded, small_tensor
from draftahead.core.types import SequenceView
from draftahead.drafters.eagle.prefill import MAX_MISSING, HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner, HeadOutput, NodeRange


class TreeForward:
    """A tree per sequence of the batch: the head's output for each of its nodes so far. Node 0 is
    the root."""

    def __init__(
        self, runner: EagleRunner, prefill: HeadPrefill, sequences: Sequence[SequenceView]
    ) -> None:
        """Computes the missing inputs of every sequence; the last ones are those of the roots."""
        missing = prefill.prepare(sequences, MAX_MISSING)
        cached = runner.cache.tokens_in[: len(missing)]
        output = runner.forward_inputs(0, padded(missing), [len(tokens) for tokens in cached])
        prefill.commit(missing)
        self._runner, self._num_cached = runner, [len(tokens) - 1 for tokens in cached]
        self._output = HeadOutput(*(last_of(values, missing)[:, None] for values in output))

    @property
    def root_logits(self) -> Tensor:
        """[B, D] for the tokens after the roots."""
        return self._output.logits[:, 0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Nodes [B, N] of the trees: those of earlier calls, and behind them one more level, which
        is computed -> logits [B, N, D]. See tree_builder.ExpandFn."""
        return self._add(tokens[:, self._output.logits.shape[1] :], parents.tolist())

    def append(self, tokens: Tensor) -> Tensor:
        """One more token [B] of a chain per sequence -> logits [B, D]. The host need not know the
        token."""
        chain = tree.chain(self._output.logits.shape[1] + 1)
        return self._add(tokens[:, None], [chain] * len(tokens))[:, -1]

    def _add(self, tokens: Tensor, parents: list[list[int]]) -> Tensor:
        """`parents` [B][N] of the whole trees, `tokens` of their last nodes."""
        hidden, logits = self._output
        nodes = NodeRange(0, self._num_cached, parents, logits.shape[1])
        new_parents = [p[nodes.start :] for p in parents]
        index = small_tensor(new_parents, torch.int64, hidden.device)
        slots = torch.arange(len(parents), device=hidden.device)[:, None]
        new = self._runner.forward(tokens, hidden[slots, index], nodes)
        self._output = HeadOutput(
            torch.cat([hidden, new.hidden], 1), torch.cat([logits, new.logits], 1)
        )
        return self._output.logits
