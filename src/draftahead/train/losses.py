"""Soft cross entropy against the target's distribution, a slice of the logits at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 2048  # positions per block of logits, which are the largest tensors of a training


def target_probs(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """The target's distribution over `lm_head`'s tokens: [n, H], [V, H] -> [n, V]."""
    with torch.no_grad():
        return torch.cat(
            [
                (hidden[start : start + CHUNK] @ lm_head.T).float().softmax(-1).to(lm_head.dtype)
                for start in range(0, max(1, len(hidden)), CHUNK)
            ]
        )


class _SoftCrossEntropy(torch.autograd.Function):
    """The mean cross entropy of `hidden @ weight.T`; the gradient is computed along with it, so
    that logits are never kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
        weight = weight.to(hidden.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            log_probs = (hidden[part] @ weight.T).float().log_softmax(-1)
            total -= (probs[part] * log_probs).sum()
            grad = ((log_probs.exp() - probs[part]) / len(hidden)).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        weight = None if grad_weight is None else outer[0] * grad_weight.float()
        return outer[0].to(grad_hidden.dtype) * grad_hidden, weight, None


def soft_cross_entropy(hidden: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
    """Hidden states [n, H], lm_head weights [V, H], distributions [n, V] -> a mean over n."""
    if not len(hidden):
        return (hidden.sum() * 0.0).float()
    loss: Tensor = _SoftCrossEntropy.apply(hidden, weight, probs)  # type: ignore[no-untyped-call]
    return loss
