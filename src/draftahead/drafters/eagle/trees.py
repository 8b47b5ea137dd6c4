"""The draft trees of one step, while the head computes them level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.core.device import small_tensor
from draftahead.core.types import SequenceState
from draftahead.drafters.eagle.prefill import MAX_MISSING, HeadPrefill
from draftahead.drafters.eagle.runner import EagleRunner, HeadOutput, NodeRange


class HeadTrees:
    """A tree per sequence of the batch: its nodes so far, and the head's output for each. Node 0 is
    the root."""

    def __init__(self, runner: EagleRunner, root_entries: list[int], roots: HeadOutput) -> None:
        """`root_entries` [B]: where the inputs of the roots lie. `roots`: of one node each."""
        self._runner, self._root_entries = runner, root_entries
        self._tokens = self._parents = [[-1]] * len(root_entries)  # [B][N]
        self._output = roots

    @property
    def root_logits(self) -> Tensor:
        """[B, D] for the tokens after the roots."""
        return self._output.logits[:, 0]

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Nodes [B, N] of the trees, with those of earlier calls in front -> logits [B, N, D]. See
        tree_builder.Expand. Only nodes from the first that differs on are computed."""
        new_tokens, new_parents = tokens.tolist(), parents.tolist()
        known = _common_prefix(self._tokens, self._parents, new_tokens, new_parents)
        self._compute(tokens, new_parents, known)
        self._tokens, self._parents = new_tokens, new_parents
        return self._output.logits

    def append(self, tokens: Tensor) -> Tensor:
        """One more token [B] of a chain per sequence -> logits [B, D]. The host need not know the
        token."""
        old = self._output.logits.shape[1]
        nodes = torch.zeros(len(tokens), old + 1, dtype=torch.int64, device=tokens.device)
        nodes[:, -1] = tokens
        self._compute(nodes, [list(range(-1, old))] * len(tokens), old)
        return self._output.logits[:, -1]

    def _compute(self, tokens: Tensor, parents: list[list[int]], known: int) -> None:
        """Outputs of nodes [B, N], of which the first `known` have them."""
        num_nodes, runner = tokens.shape[1], self._runner
        slots = torch.arange(len(parents), device=runner.device)[:, None]
        hidden, logits = self._output.hidden[:, :known], self._output.logits[:, :known]
        start = known
        while start < num_nodes:
            stop = _end_of_level(parents, start)
            own = small_tensor([row[start:stop] for row in parents], torch.int64, runner.device)
            which = NodeRange(0, self._root_entries, parents, range(start, stop))
            new = runner.forward(tokens[:, start:stop], hidden[slots, own], which)
            hidden = torch.cat([hidden, new.hidden], 1)
            logits = torch.cat([logits, new.logits], 1)
            start = stop
        self._output = HeadOutput(hidden, logits)


def start_trees(
    runner: EagleRunner,
    prefill: HeadPrefill,
    sequences: Sequence[SequenceState],
    has_inputs: Sequence[bool],
) -> HeadTrees:
    """Computes the missing inputs of every sequence; the last ones are the roots of the trees."""
    missing = prefill.missing(sequences, has_inputs, MAX_MISSING)
    held = [len(tokens) for tokens in runner.cache.tokens_in[: len(missing)]]
    width = max(map(len, missing))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in missing])
    output = runner.forward_inputs(0, tokens, held)
    prefill.commit(missing)
    root_entries = [count + len(row) - 1 for count, row in zip(held, missing, strict=True)]
    if all(len(row) == width for row in missing):
        roots = HeadOutput(output.hidden[:, -1:], output.logits[:, -1:])
    else:
        last = small_tensor([[len(row) - 1] for row in missing], torch.int64, runner.device)
        slots = torch.arange(len(missing), device=runner.device)[:, None]
        roots = HeadOutput(output.hidden[slots, last], output.logits[slots, last])
    return HeadTrees(runner, root_entries, roots)


def _common_prefix(
    tokens: list[list[int]],
    parents: list[list[int]],
    new_tokens: list[list[int]],
    new_parents: list[list[int]],
) -> int:
    """How many first nodes are the same in all trees. The root always is."""
    old = len(tokens[0])
    return min(
        next((i for i in range(1, old) if (t[i], p[i]) != (u[i], q[i])), old)
        for t, p, u, q in zip(new_tokens, new_parents, tokens, parents, strict=True)
    )


def _end_of_level(parents: list[list[int]], start: int) -> int:
    """Where the nodes from `start` on end that can be computed at once. A tree that had fewer nodes
    than the others gets nodes whose parents are new themselves."""
    stop = start + 1
    while stop < len(parents[0]) and all(row[stop] < start for row in parents):
        stop += 1
    return stop
