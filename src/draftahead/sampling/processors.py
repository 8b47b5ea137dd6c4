"""Logits to law to token: the sampling contract, at a node and along that node's own path.

Noise is counter-based: a hash of (sequence, purpose, position, token id), the same on every
device and whatever else is in the batch. A token is drawn as the winner of an exponential race,
argmin E/p, which is the Gumbel-max draw argmax(log p + g) with one logarithm less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftahead.errors import ProcessorError
from draftahead.sampling.noise import (
    NodeContext,
    small_tensor,
)

# ------------------------------------------------------------------------------ keyed noise


# --------------------------------------------------------------------------- logits to law


def processed(logits: Tensor, contexts: Sequence[NodeContext]) -> Tensor:
    """Logits [A, V] after bias, penalties, bans and the user's processors, at temperature 1."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not any(context.sequence.has_processors for context in contexts):
        return logits
    return torch.stack([_guarded_row(row, at) for row, at in zip(logits, contexts, strict=True)])


def _guarded_row(logits: Tensor, context: NodeContext) -> Tensor:
    """A processor of the user's that fails ends its own request, not those of its mates."""
    try:
        found = _processed_row(logits, context)
        if found.shape != logits.shape:
            raise ValueError(f"it made {list(found.shape)} out of {list(logits.shape)} logits")
        return found
    except Exception as failure:
        said = f"{type(failure).__name__}: {failure}"
        context.sequence.fault = ProcessorError(f"a logits processor failed: {said}")
        return torch.full_like(logits, torch.nan)


def _processed_row(logits: Tensor, context: NodeContext) -> Tensor:
    """In the order of transformers, so that the two agree on the law."""
    sequence, path = context
    s, request = sequence.params, sequence.request
    logits = logits.clone()
    for token, bias in (s.logit_bias or {}).items():
        logits[token] += bias
    text = [*sequence.tokens, *path]
    if s.repetition_penalty not in (None, 1.0):
        seen = torch.tensor(sorted(set(text)), device=logits.device)
        values, penalty = logits[seen], s.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if s.presence_penalty or s.frequency_penalty:
        for token, count in Counter(text[len(request.prompt) :]).items():
            logits[token] -= s.presence_penalty + s.frequency_penalty * count
    for *before, last in request.bad_word_ids:
        if not before or text[-len(before) :] == before:
            logits[last] = -torch.inf
    if len(text) - len(request.prompt) < (s.min_tokens or 0):
        logits[list(request.end_ids)] = -torch.inf
    for processor in s.processors:
        ids = torch.tensor([text], device=logits.device)
        logits = processor(ids, logits[None])[0].to(logits.dtype)
    return logits


def probs_of(logits: Tensor, contexts: Sequence[NodeContext]) -> Tensor:
    """The law that tokens are drawn from: [A, V] probabilities. NaN where logits are not finite."""
    logits = processed(logits, contexts)
    best, argmax = logits.max(-1)
    settings = [context.sequence.params for context in contexts]
    greedy = [s.greedy for s in settings]
    temperature = _column([s.temperature or 1.0 for s in settings], logits)
    law = _truncated(((logits - best[:, None]) / temperature).softmax(-1), settings)
    if any(greedy):
        point = torch.zeros_like(law).scatter_(-1, argmax[:, None], 1.0)
        law = torch.where(small_tensor(greedy, torch.bool, law.device)[:, None], point, law)
    return torch.where(best.isfinite()[:, None], law, torch.nan)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return small_tensor(values, like.dtype, like.device)[:, None]


def _truncated(law: Tensor, settings: Sequence[Any]) -> Tensor:
    """Top-k, then top-p, then min-p, each as a lowest probability that stays.

    Equals at the cut stay together, so that the law never depends on how equals are ordered.
    """
    if any(s.top_k and not s.greedy for s in settings):
        ks = [min(s.top_k or law.shape[-1], law.shape[-1]) for s in settings]
        largest = law.topk(max(k for k, s in zip(ks, settings, strict=True) if s.top_k)).values
        most = largest.shape[-1]
        at = small_tensor([[min(k, most) - 1] for k in ks], torch.int64, law.device)
        on = small_tensor([[bool(s.top_k)] for s in settings], torch.bool, law.device)
        law = _cut(law, largest.gather(-1, at), on)
    if any(s.top_p not in (None, 1.0) and not s.greedy for s in settings):
        top_p = _column([2.0 if s.top_p in (None, 1.0) else s.top_p for s in settings], law)
        law = _cut(law, _nucleus_edge(law, top_p), top_p <= 1)
    if any(s.min_p and not s.greedy for s in settings):
        min_p = _column([s.min_p or 0.0 for s in settings], law)
        law = _cut(law, min_p * law.amax(-1, keepdim=True), min_p > 0)
    return law


def _cut(law: Tensor, lowest: Tensor, on: Tensor) -> Tensor:
    """Keeps what is as likely as `lowest`, in rows that ask for it; others keep their bits."""
    left = law.where(law >= lowest, 0.0)
    return torch.where(on, left / left.sum(-1, keepdim=True), law)


def _nucleus_edge(law: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability inside the nucleus, [A, 1]; 0 where top_p is off (above 1)."""
    width = min(1024, law.shape[-1])  # sorting all of a vocabulary costs more than a layer
    while True:
        largest = law.topk(width).values
        mass_before = largest.cumsum(-1) - largest
        inside = mass_before < top_p
        if width == law.shape[-1] or not (inside.all(-1) & (top_p[:, 0] <= 1)).any():
            edge = largest.where(inside, torch.inf).amin(-1, keepdim=True)
            return edge.where(top_p <= 1, 0.0)
        width = law.shape[-1]


# -------------------------------------------------------------------------------- choosing


# ---------------------------------------------------------------------------- drafted draws
