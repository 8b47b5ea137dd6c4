"""The draft trees of one step, while the head computes them level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.core import tree
from draftahead.core.device import last_of, padded, small_tensor
from draftahead.core.types import SequenceState
from draftahead.drafters.eagle.prefill import MAX_MISSING, HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner, HeadOutput, NodeRange


class HeadTrees:
    """A tree per sequence of the batch: the head's output for each of its nodes so far. Node 0 is
    the root."""

    def __init__(self, runner: EagleRunner, root_entries: list[int], roots: HeadOutput) -> None:
        """`root_entries` [B]: where the inputs of the roots lie. `roots`: of one node each."""
        self._runner, self._root_entries, self._output = runner, root_entries, roots

    @property
    def root_logits(self) -> Tensor:
        """[B, D] for the tokens after the roots."""
        return self._output.logits[:, 0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Nodes [B, N] of the trees: those of earlier calls, and behind them one more level, which
        is computed -> logits [B, N, D]. See tree_builder.Expand."""
        return self._add(tokens[:, self._output.logits.shape[1] :], parents.tolist())

    def append(self, tokens: Tensor) -> Tensor:
        """One more token [B] of a chain per sequence -> logits [B, D]. The host need not know the
        token."""
        chain = tree.chain(self._output.logits.shape[1] + 1)
        return self._add(tokens[:, None], [chain] * len(tokens))[:, -1]

    def _add(self, tokens: Tensor, parents: list[list[int]]) -> Tensor:
        """`parents` [B][N] of the whole trees, `tokens` of their last nodes."""
        hidden, logits = self._output
        nodes = NodeRange(0, self._root_entries, parents, logits.shape[1])
        above = [own[nodes.start :] for own in parents]
        index = small_tensor(above, torch.int64, hidden.device)
        slots = torch.arange(len(parents), device=hidden.device)[:, None]
        new = self._runner.forward(tokens, hidden[slots, index], nodes)
        self._output = HeadOutput(
            torch.cat([hidden, new.hidden], 1), torch.cat([logits, new.logits], 1)
        )
        return self._output.logits


def start_trees(
    runner: EagleRunner,
    prefill: HeadPrefill,
    sequences: Sequence[SequenceState],
    has_inputs: Sequence[bool],
) -> HeadTrees:
    """Computes the missing inputs of every sequence; the last ones are the roots of the trees."""
    missing = prefill.missing(sequences, has_inputs, MAX_MISSING)
    num_cached = [len(tokens) for tokens in runner.cache.tokens_in[: len(missing)]]
    output = runner.forward_inputs(0, padded(missing), num_cached)
    prefill.commit(missing)
    root_entries = [count + len(own) - 1 for count, own in zip(num_cached, missing, strict=True)]
    roots = [last_of(values, missing)[:, None] for values in output]
    return HeadTrees(runner, root_entries, HeadOutput(*roots))
