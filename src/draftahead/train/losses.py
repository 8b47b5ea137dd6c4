"""What training goes by: the target's law as a soft label, and the length of what would be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.train.loop import Acceptance

AT_ONCE = 2048  # rows of logits in memory


def law_over(states: Tensor, rows: Tensor) -> Tensor:
    """The target's law over some of its vocabulary, from its last states: [n, H] -> [n, D]."""
    with torch.no_grad():
        return torch.cat(
            [
                (states[at : at + AT_ONCE] @ rows.T).float().softmax(-1).to(rows.dtype)
                for at in range(0, max(1, len(states)), AT_ONCE)
            ]
        )


class _SoftCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of `states @ weight.T` against laws. Logits over a vocabulary are the
    largest tensors of a training by far, so some rows are taken at a time, and their gradient at
    once."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, law: Tensor) -> Tensor:
        kind = states.dtype
        weight = weight.to(kind)
        total = states.new_zeros((), dtype=torch.float32)
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(states), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            logs = (states[part] @ weight.T).float().log_softmax(-1)
            total -= (law[part] * logs).sum()
            grad = ((logs.exp() - law[part]) / len(states)).to(kind)
            grad_states[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ states[part]
        ctx.save_for_backward(grad_states, grad_weight)
        return total / len(states)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        weight = None if grad_weight is None else outer[0] * grad_weight.float()
        return outer[0].to(grad_states.dtype) * grad_states, weight, None


def soft_cross_entropy(states: Tensor, weight: Tensor, law: Tensor) -> Tensor:
    """States [n, H], the vocabulary's rows [D, H], laws [n, D] that each sum to 1."""
    if not len(states):
        return (states.sum() * 0.0).float()
    found: Tensor = _SoftCrossEntropy.apply(states, weight, law)  # type: ignore[no-untyped-call]
    return found


def chained(hit: Tensor, depth: int) -> Tensor:
    """Whether each token was foretold from the ones before it, [B, tokens] -> [B, chains, depth]:
    for drafters whose guesses after a right prefix are the same in a text as in a draft."""
    return side_by_side([hit[:, at:] for at in range(depth)])


def side_by_side(hits: Sequence[Tensor]) -> Tensor:
    """Of all chains of a text by depth, [B, chains - depth] each -> [B, chains, depth]: where the
    text ends before a guess, there is no hit."""
    chains = hits[0].shape[1]
    return torch.stack([F.pad(hit, (0, chains - hit.shape[1])) for hit in hits], -1)


def walked(found: Sequence[tuple[Tensor, list[int]]]) -> Acceptance:
    """What drafting would have kept: hits [B, chains, depth] of texts that end together, and how
    many tokens of each are to be foretold. Chain -1 of a text starts two tokens before its last.

    At each pass, the guesses of the chain behind the last agreed token are walked until one is
    wrong; the target's own token follows.
    """
    passes = tokens = 0
    depth = found[0][0].shape[-1]
    tried, right = [0] * depth, [0] * depth
    for hits, answers in found:
        for row, answer in zip(hits.tolist(), answers, strict=True):
            place = len(row) - answer  # of the chain whose first guess is the first token
            while place < len(row):
                if place < 0:  # a text that begins with its answer
                    place += 1
                    continue
                passes += 1
                kept, left = 0, len(row) - place
                while kept < min(depth, left):
                    tried[kept] += 1
                    if not row[place][kept]:
                        break
                    right[kept] += 1
                    kept += 1
                tokens += min(kept + 1, left)
                place += kept + 1
    by_depth = [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)]
    return Acceptance(tokens / max(1, passes), by_depth)
