"""The target's own next tokens, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.core.types import TokenLogprob
from draftahead.sampling.noise import (
    NodeContext,
    sample_gumbel,
    target_rng_key,
)
from draftahead.sampling.processors import probs_of, processed


def draw(
    logits: Tensor, contexts: Sequence[NodeContext], *, apart: bool = False
) -> tuple[Tensor, Tensor]:
    """The target's own next tokens, a function of its law and the keyed noise alone.

    [A, V] -> tokens [A], and [A] whether the logits allowed a choice at all. `apart` computes
    every row's law for itself: a sum over one row need not round as over one of several.
    """
    if apart and len(contexts) > 1:
        each = [draw(logits[i : i + 1], [context]) for i, context in enumerate(contexts)]
        return torch.cat([token for token, _ in each]), torch.cat([finite for _, finite in each])
    if all(context.sequence.params.greedy for context in contexts):
        best, argmax = processed(logits, contexts).max(-1)
        return argmax, best.isfinite()
    law = probs_of(logits, contexts)
    finite = law[:, 0].isfinite()
    return sample_gumbel(law, [target_rng_key(context) for context in contexts]), finite


def token_logprobs(
    logits: Tensor, contexts: Sequence[NodeContext], tokens: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities of chosen tokens, under the law they were drawn from.

    A greedy choice has probability 1 by that law, which tells nothing: there, and only there,
    the law before the argmax is shown (temperature 1, all processors). Raw: the model's own.
    """
    found = []
    for row, context, token in zip(logits, contexts, tokens, strict=True):
        sampling = context.sequence.params
        if sampling.raw_logprobs:
            logs = row.float().log_softmax(-1)
        elif sampling.greedy:
            logs = processed(row[None], [context])[0].log_softmax(-1)
        else:
            logs = probs_of(row[None], [context])[0].log()
        values, ids = logs.topk(min(sampling.logprobs or 0, logs.shape[-1]))
        likely = zip(ids.tolist(), values.tolist(), strict=True)
        top = {i: value for i, value in likely if value > -torch.inf}
        found.append(TokenLogprob(token, float(logs[token]), top))
    return found
