"""From logits to the distribution that tokens are sampled from, along a node's own path.

Order: bias, penalties, forbidden tokens and the user's processors; then temperature, top-k, top-p
and min-p. Processors of the model's generation_config stand among them where transformers has them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from draftahead.core.device import small_tensor
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Processor
from draftahead.errors import ProcessorError
from draftahead.sampling.noise import NodeContext

# Top-p sorts so many tokens, and the whole vocabulary only if they do not contain the nucleus: a
# full sort costs more than a layer of the model.
NUCLEUS_CANDIDATES = 1024


def probs_of(logits: Tensor, contexts: Sequence[NodeContext]) -> Tensor:
    """The distribution that tokens are sampled from: [A, V] probabilities; one-hot where greedy,
    NaN where the logits are not finite."""
    logits = process_logits(logits, contexts)
    largest, argmax = logits.max(-1)
    params = [context.sequence.params for context in contexts]
    greedy = [p.is_greedy for p in params]
    temperature = column([p.temperature or 1.0 for p in params], logits)
    probs = ((logits - largest[:, None]) / temperature).softmax(-1)
    warped = any(context.sequence.modifies_logits for context in contexts)
    probs = _warp(probs, contexts, "before_top_k") if warped else probs
    probs = _truncate(probs, params)
    probs = _warp(probs, contexts, "after_min_p") if warped else probs
    if any(greedy):
        one_hot = torch.zeros_like(probs).scatter_(-1, argmax[:, None], 1.0)
        probs = torch.where(small_tensor(greedy, torch.bool, probs.device)[:, None], one_hot, probs)
    return torch.where(largest.isfinite()[:, None], probs, torch.nan)


def process_logits(logits: Tensor, contexts: Sequence[NodeContext]) -> Tensor:
    """Logits [A, V] after bias, penalties, forbidden tokens and the user's processors, at
    temperature 1."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not any(context.sequence.modifies_logits for context in contexts):
        return logits
    rows = zip(logits, contexts, strict=True)
    return torch.stack([_process_node(row, context, _apply_processors) for row, context in rows])


def _warp(
    probs: Tensor,
    contexts: Sequence[NodeContext],
    stage: Literal["before_top_k", "after_min_p"],
) -> Tensor:
    """Probabilities [A, V] after the model's processors of a stage, which take log-probabilities;
    the others keep their bits."""
    rows = list(probs)
    for index, context in enumerate(contexts):
        processors = getattr(context.sequence.request.model_processors, stage)
        if processors and not rows[index][0].isnan():  # NaN has its own error
            apply = functools.partial(_through, processors)
            rows[index] = _process_node(rows[index].log(), context, apply).softmax(-1)
    return torch.stack(rows)


def _process_node(
    logits: Tensor, context: NodeContext, apply: Callable[[Tensor, NodeContext], Tensor]
) -> Tensor:
    """One node's logits [V]; NaN if a processor fails: that ends its own request if the node is
    reached, and no other request of the batch."""
    try:
        found = apply(logits, context)
        if found.shape != logits.shape:
            raise ValueError(f"it made {list(found.shape)} out of {list(logits.shape)} logits")
        return found
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
        error = ProcessorError(f"a logits processor failed: {reason}")
        context.sequence.processor_errors[context.path] = error
        return torch.full_like(logits, torch.nan)


def _apply_processors(logits: Tensor, context: NodeContext) -> Tensor:
    """In transformers' order."""
    sequence, path = context
    params, prompt_length = sequence.params, sequence.prompt_length
    logits = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    logits = _through(sequence.request.model_processors.before_penalties, logits, context)
    tokens = [*sequence.tokens, *path]
    if params.repetition_penalty not in (None, 1.0):
        seen = torch.tensor(sorted(set(tokens)), device=logits.device)
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if params.presence_penalty or params.frequency_penalty:
        for token, count in Counter(tokens[prompt_length:]).items():
            logits[token] -= params.presence_penalty + params.frequency_penalty * count
    for *before, last in sequence.request.bad_word_ids:
        if not before or tokens[-len(before) :] == before:
            logits[last] = -torch.inf
    if len(tokens) - prompt_length < (params.min_tokens or 0):
        logits[list(sequence.end_ids)] = -torch.inf
    return _through(params.processors, logits, context)


def _through(processors: Sequence[Processor], scores: Tensor, context: NodeContext) -> Tensor:
    """Scores [V] after one processor after the other, with the tokens up to the node."""
    for processor in processors:
        ids = torch.tensor([[*context.sequence.tokens, *context.path]], device=scores.device)
        scores = processor(ids, scores[None])[0].to(scores.dtype)
    return scores


# -------------------------------------------------------------------------------- truncation


def _truncate(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Top-k, then top-p, then min-p, each as a lowest probability that stays.

    Equal probabilities at the cut stay together: the distribution never depends on their order.
    """
    if any(p.top_k and not p.is_greedy for p in params):
        ks = [min(p.top_k or probs.shape[-1], probs.shape[-1]) for p in params]
        largest = probs.topk(max(k for k, p in zip(ks, params, strict=True) if p.top_k)).values
        index = [[min(k, largest.shape[-1]) - 1] for k in ks]
        lowest = largest.gather(-1, small_tensor(index, torch.int64, probs.device))
        enabled = small_tensor([[bool(p.top_k)] for p in params], torch.bool, probs.device)
        probs = _drop_below(probs, lowest, enabled)
    if any(p.top_p not in (None, 1.0) and not p.is_greedy for p in params):
        top_p = column([2.0 if p.top_p in (None, 1.0) else p.top_p or 0.0 for p in params], probs)
        probs = _drop_below(probs, _nucleus_threshold(probs, top_p), top_p <= 1)
    if any(p.min_p and not p.is_greedy for p in params):
        min_p = column([p.min_p or 0.0 for p in params], probs)
        probs = _drop_below(probs, min_p * probs.amax(-1, keepdim=True), min_p > 0)
    return probs


def _drop_below(probs: Tensor, lowest: Tensor, enabled: Tensor) -> Tensor:
    """Drops what is below `lowest` [A, 1] where `enabled` [A, 1]; the others keep their bits."""
    left = probs.where(probs >= lowest, 0.0)
    return torch.where(enabled, left / left.sum(-1, keepdim=True), probs)


def _nucleus_threshold(probs: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability in the nucleus, [A, 1]; 0 where top_p is off (above 1)."""
    count = min(NUCLEUS_CANDIDATES, probs.shape[-1])
    while True:
        largest = probs.topk(count).values
        mass_before = largest.cumsum(-1) - largest
        in_nucleus = mass_before < top_p
        if count == probs.shape[-1] or not (in_nucleus.all(-1) & (top_p[:, 0] <= 1)).any():
            lowest = largest.where(in_nucleus, torch.inf).amin(-1, keepdim=True)
            return lowest.where(top_p <= 1, 0.0)
        count = probs.shape[-1]


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """[A, 1] of the dtype and on the device of another tensor."""
    return small_tensor(values, like.dtype, like.device)[:, None]
