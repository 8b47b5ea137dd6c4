"""The target's own next tokens, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.core.types import TokenLogprob
from draftahead.sampling.noise import NodeContext, sample_gumbel, target_rng_key
from draftahead.sampling.processors import probs_of, process_logits


def sample_target(
    logits: Tensor, contexts: Sequence[NodeContext], *, one_by_one: bool = False
) -> tuple[Tensor, Tensor]:
    """The target's own next tokens: a function of its distribution and the keyed noise alone.

    [A, V] -> tokens [A], and [A] whether the logits allowed any token. `one_by_one` computes each
    distribution by itself: rounding of its sums may depend on the number of rows.
    """
    if one_by_one and len(contexts) > 1:
        each = [sample_target(logits[i : i + 1], [c]) for i, c in enumerate(contexts)]
        return torch.cat([token for token, _ in each]), torch.cat([has for _, has in each])
    if all(context.sequence.is_greedy for context in contexts):
        largest, argmax = process_logits(logits, contexts).max(-1)
        return argmax, largest.isfinite()
    probs = probs_of(logits, contexts)
    has_token = probs[:, 0].isfinite()
    return sample_gumbel(probs, [target_rng_key(context) for context in contexts]), has_token


def token_logprobs(
    logits: Tensor, contexts: Sequence[NodeContext], tokens: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities of emitted tokens, under the distribution they were sampled from.

    A greedy token has probability 1 there, which is no information: for it, and only for it, the
    distribution before the argmax is taken (temperature 1, all processors). Raw: the model's own.
    """
    found = []
    for row, context, token in zip(logits, contexts, tokens, strict=True):
        params = context.sequence.params
        if params.raw_logprobs:
            logs = row.float().log_softmax(-1)
        elif params.is_greedy:
            logs = process_logits(row[None], [context])[0].log_softmax(-1)
        else:
            logs = probs_of(row[None], [context])[0].log()
        values, ids = logs.topk(min(params.logprobs or 0, logs.shape[-1]))
        likely = zip(ids.tolist(), values.tolist(), strict=True)
        top = {i: value for i, value in likely if value > -torch.inf}
        found.append(TokenLogprob(token, float(logs[token]), top))
    return found
