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
            found += own_logprobs(row[None], [token], params.logprobs or 0)
            continue
        if params.is_greedy:
            logs = process_logits(row[None], [context]).log_softmax(-1)
        else:
            logs = probs_of(row[None], [context]).log()
        found += _with_top(logs, [token], params.logprobs or 0)
    return found


def own_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens under the model's own distributions [A, V], with those of the
    `count` most likely ones."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return _with_top(logits.log_softmax(-1), tokens, count)


def _with_top(logs: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    values, ids = logs.topk(min(count, logs.shape[-1]))
    chosen = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0]
    found = []
    rows = zip(tokens, chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
    for token, logprob, likely, likely_logprobs in rows:
        pairs = zip(likely, likely_logprobs, strict=True)
        top = {i: value for i, value in pairs if value > -torch.inf}
        found.append(TokenLogprob(token, logprob, top))
    return found
