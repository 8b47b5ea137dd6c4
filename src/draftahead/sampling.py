"""Logits to law to token: the sampling contract, at a node and along that node's own path.

Noise is counter-based: a hash of (sequence, purpose, position, token id), the same on every
device and whatever else is in the batch. A token is drawn as the winner of an exponential race,
argmin E/p, which is the Gumbel-max draw argmax(log p + g) with one logarithm less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.errors import ProcessorError
from draftahead.types import Draft, Exact, Sequence, TokenLogprob

# splitmix64 (Steele, Lea, Flood 2014), written as the signed integers that torch has.
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
WEIGHED = 64  # tokens of a drafter's law that are looked at for the target's next


class Stream(IntEnum):
    """What a piece of noise is for. Streams are independent of each other."""

    TARGET = 0  # the target's own token at a position: used once, when it is emitted
    DRAFT = 1
    COIN = 2


class Context(NamedTuple):
    """Where a law is asked for: after the sequence so far and a drafted path below its root."""

    sequence: Sequence
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Index of the token that comes next."""
        return len(self.sequence.tokens) + len(self.path)


# ------------------------------------------------------------------------------ keyed noise


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
        x = (x ^ ((x >> shift) & (_MASK >> shift))) * _signed(factor)
    return x ^ ((x >> 31) & (_MASK >> 31))


def hash_key(*parts: int) -> int:
    """One 64-bit key from several integers; the order matters."""
    key = 0
    for part in parts:
        x = (key + part * _GOLDEN + _GOLDEN) & _MASK
        for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
            x = ((x ^ (x >> shift)) * factor) & _MASK
        key = x ^ (x >> 31)
    return _signed(key)


def target_key(context: Context) -> int:
    return hash_key(context.sequence.key, Stream.TARGET, context.position)


def step_key(stream: Stream, context: Context) -> int:
    """For drafting and coins: a position may be drafted again in a later step, and what an
    earlier step learnt of its noise must not tell. So the root is part of the key."""
    root = len(context.sequence.tokens)
    return hash_key(context.sequence.key, stream, root, len(context.path))


def placed(values: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A small tensor on a device, without waiting for it."""
    found = torch.tensor(values, dtype=dtype)
    return found if str(device) == "cpu" else found.pin_memory().to(device, non_blocking=True)


def uniforms(keys: Seq[int] | Tensor, count: int, device: torch.device | str = "cpu") -> Tensor:
    """[A] keys -> [A, count] float64 in the open interval (0, 1)."""
    return uniforms_at(keys, torch.arange(count, dtype=torch.int64, device=device))


def uniforms_at(keys: Seq[int] | Tensor, ids: Tensor) -> Tensor:
    """The same, of some ids only: [A] keys, ids [K] or [A, K] -> [A, K]."""
    keys = keys if isinstance(keys, Tensor) else placed(keys, torch.int64, ids.device)
    # 52 bits: with one more, the half that is added could round up to 1 itself.
    bits = (_mix(keys[:, None] + ids * _signed(_GOLDEN)) >> 12) & (_MASK >> 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def race(law: Tensor, keys: Seq[int] | Tensor) -> Tensor:
    """Draws one token from each law: [A, V] -> [A]. An id of probability 0 never wins."""
    arrival = -uniforms(keys, law.shape[-1], law.device).log() / law.to(torch.float64)
    return arrival.argmin(-1)


# --------------------------------------------------------------------------- logits to law


def processed(logits: Tensor, contexts: Seq[Context]) -> Tensor:
    """Logits [A, V] after bias, penalties, bans and the user's processors, at temperature 1."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not any(context.sequence.has_processors for context in contexts):
        return logits
    return torch.stack([_guarded_row(row, at) for row, at in zip(logits, contexts, strict=True)])


def _guarded_row(logits: Tensor, context: Context) -> Tensor:
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


def _processed_row(logits: Tensor, context: Context) -> Tensor:
    """In the order of transformers, so that the two agree on the law."""
    sequence, path = context
    s, request = sequence.sampling, sequence.request
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


def law_of(logits: Tensor, contexts: Seq[Context]) -> Tensor:
    """The law that tokens are drawn from: [A, V] probabilities. NaN where logits are not finite."""
    logits = processed(logits, contexts)
    best, argmax = logits.max(-1)
    settings = [context.sequence.sampling for context in contexts]
    greedy = [s.greedy for s in settings]
    temperature = _column([s.temperature or 1.0 for s in settings], logits)
    law = _truncated(((logits - best[:, None]) / temperature).softmax(-1), settings)
    if any(greedy):
        point = torch.zeros_like(law).scatter_(-1, argmax[:, None], 1.0)
        law = torch.where(placed(greedy, torch.bool, law.device)[:, None], point, law)
    return torch.where(best.isfinite()[:, None], law, torch.nan)


def _column(values: Seq[float], like: Tensor) -> Tensor:
    return placed(values, like.dtype, like.device)[:, None]


def _truncated(law: Tensor, settings: Seq[Any]) -> Tensor:
    """Top-k, then top-p, then min-p, each as a lowest probability that stays.

    Equals at the cut stay together, so that the law never depends on how equals are ordered.
    """
    if any(s.top_k and not s.greedy for s in settings):
        ks = [min(s.top_k or law.shape[-1], law.shape[-1]) for s in settings]
        largest = law.topk(max(k for k, s in zip(ks, settings, strict=True) if s.top_k)).values
        most = largest.shape[-1]
        at = placed([[min(k, most) - 1] for k in ks], torch.int64, law.device)
        on = placed([[bool(s.top_k)] for s in settings], torch.bool, law.device)
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


def draw(logits: Tensor, contexts: Seq[Context], *, apart: bool = False) -> tuple[Tensor, Tensor]:
    """The target's own next tokens, a function of its law and the keyed noise alone.

    [A, V] -> tokens [A], and [A] whether the logits allowed a choice at all. `apart` computes
    every row's law for itself: a sum over one row need not round as over one of several.
    """
    if apart and len(contexts) > 1:
        each = [draw(logits[i : i + 1], [context]) for i, context in enumerate(contexts)]
        return torch.cat([token for token, _ in each]), torch.cat([finite for _, finite in each])
    if all(context.sequence.sampling.greedy for context in contexts):
        best, argmax = processed(logits, contexts).max(-1)
        return argmax, best.isfinite()
    law = law_of(logits, contexts)
    finite = law[:, 0].isfinite()
    return race(law, [target_key(context) for context in contexts]), finite


def logprobs_of(logits: Tensor, contexts: Seq[Context], tokens: Seq[int]) -> list[TokenLogprob]:
    """Log-probabilities of chosen tokens, under the law they were drawn from.

    A greedy choice has probability 1 by that law, which tells nothing: there, and only there,
    the law before the argmax is shown (temperature 1, all processors). Raw: the model's own.
    """
    found = []
    for row, context, token in zip(logits, contexts, tokens, strict=True):
        sampling = context.sequence.sampling
        if sampling.raw_logprobs:
            logs = row.float().log_softmax(-1)
        elif sampling.greedy:
            logs = processed(row[None], [context])[0].log_softmax(-1)
        else:
            logs = law_of(row[None], [context])[0].log()
        values, ids = logs.topk(min(sampling.logprobs or 0, logs.shape[-1]))
        likely = zip(ids.tolist(), values.tolist(), strict=True)
        top = {i: value for i, value in likely if value > -torch.inf}
        found.append(TokenLogprob(token, float(logs[token]), top))
    return found


# ---------------------------------------------------------------------------- drafted draws


def spread(logits: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Logits [..., D] for `tokens` [D], over a whole vocabulary: the others are never said."""
    whole = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    whole[..., tokens] = logits
    return whole


def _fitted(logits: Tensor, vocabulary: int) -> Tensor:
    """To a vocabulary; what is not finite can only make the guess worse."""
    extra = vocabulary - logits.shape[-1]
    logits = logits.float() if logits.dtype != torch.float64 else logits
    logits = logits[:, :vocabulary] if extra <= 0 else logits
    floor = torch.finfo(logits.dtype).min / 4
    logits = logits.nan_to_num(nan=floor, posinf=-floor, neginf=floor)
    if extra > 0:
        logits = torch.nn.functional.pad(logits, (0, extra), value=floor)
    return logits


class DraftDice:
    """Draws for a sampling drafter, one depth a call, and keeps the record.

    What was drawn becomes the draft, whatever the drafter does afterwards: dropping or changing
    a token once it is known would bend the output. Where a token can be checked by equality (all
    rows greedy, or replay), the draft shares the target's noise and needs no law: then the two
    agree as often as one race over both laws lets them.
    """

    def __init__(
        self, sequences: Seq[Sequence], rooms: Seq[int], vocabulary: int, exact: Exact
    ) -> None:
        self.sequences, self.rooms, self.vocabulary = sequences, rooms, vocabulary
        self._all_greedy = all(s.sampling.greedy for s in sequences)
        self.by_law = exact == "law" and not self._all_greedy
        self.laws: list[Tensor] = []
        # Without processors nothing here depends on which tokens were drawn, so the device can go
        # on drawing while the host has not seen any.
        self._needs_paths = any(s.has_processors for s in sequences)
        self._drawn: list[Tensor] = []  # [B] a depth
        self._counts = [0] * len(sequences)  # tokens of each chain
        self._open = [room > 0 for room in rooms]
        self._draft: Draft | None = None

    @property
    def chains(self) -> list[list[int]]:
        """What was drawn, by row. Waits for the device, unless the draft was read back already."""
        if self._draft is not None:
            rows = self._draft.rows
            return [row[1 : 1 + n] for row, n in zip(rows, self._counts, strict=True)]
        if not self._drawn:
            return [[] for _ in self.sequences]
        drawn = torch.stack(self._drawn, 1).tolist()
        return [row[:n] for row, n in zip(drawn, self._counts, strict=True)]

    def draw(
        self, logits: Tensor, rows: Tensor | None = None, best: Tensor | None = None
    ) -> Tensor:
        # Everything that can fail comes before the draw: what is drawn stands.
        if self.by_law and any(sequence.foreseen for sequence in self.sequences):
            raise ValueError("a drafter that asked for the outlook knows too much to draw")
        if logits.ndim != 2 or len(logits) != len(self.sequences):
            raise ValueError(f"dice want logits [{len(self.sequences)}, V], not {logits.shape}")
        wanted = rows.tolist() if rows is not None else [True] * len(self.sequences)
        depth = len(self._drawn)
        tokens, finite = self._draw(logits, depth, best)
        checks = zip(self._open, wanted, finite, self.rooms, strict=True)
        self._open = [o and bool(w) and f and depth < room for o, w, f, room in checks]
        self._counts = [n + o for n, o in zip(self._counts, self._open, strict=True)]
        self._drawn.append(tokens)
        self._draft = None
        return tokens

    def _draw(self, logits: Tensor, depth: int, best: Tensor | None) -> tuple[Tensor, list[bool]]:
        """Tokens [B], and which rows had a law to draw from: without processors, all."""
        if self._all_greedy and not self._needs_paths:
            if best is not None and logits.shape[-1] <= self.vocabulary:
                return best.clamp(min=0), [True] * len(self.sequences)
            return logits[:, : self.vocabulary].argmax(-1), [True] * len(self.sequences)
        paths = self.chains if self._needs_paths else [[0] * depth] * len(self.sequences)
        contexts = [Context(s, tuple(path)) for s, path in zip(self.sequences, paths, strict=True)]
        logits = _fitted(logits, self.vocabulary)
        if not self.by_law:
            tokens, finite = draw(logits, contexts)
        else:
            law = law_of(logits, contexts)
            finite = law[:, 0].isfinite()
            law = law.where(finite[:, None], 1.0)  # a row without a law ends here; any would do
            tokens = race(law, [step_key(Stream.DRAFT, context) for context in contexts])
            self.laws.append(law)
        return tokens, finite.tolist() if self._needs_paths else [True] * len(contexts)

    def outlook(
        self,
        logits: Tensor,
        rows: Seq[int],
        paths: Seq[tuple[int, ...]],
        count: int,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Dice. A token's weight is its probability over its arrival time in the target's own
        race, so the heaviest is what the target would draw from this very law."""
        contexts = [Context(self.sequences[b], path) for b, path in zip(rows, paths, strict=True)]
        for context in contexts:
            context.sequence.foreseen = True
        if tokens is not None and self._needs_paths:  # processors go by the target's ids
            logits, tokens = spread(logits, tokens, self.vocabulary), None
        size = self.vocabulary if tokens is None else len(tokens)
        logits = processed(_fitted(logits, size), contexts)
        settings = [context.sequence.sampling for context in contexts]
        warm = _column([s.temperature or 1.0 for s in settings], logits)
        seen = count if self._all_greedy else WEIGHED
        likely, ids = (logits / warm).softmax(-1).topk(min(seen, logits.shape[-1]))
        ids = ids if tokens is None else tokens[ids]
        if self._all_greedy:  # noise decides nothing
            return likely, ids
        keys = [target_key(context) for context in contexts]
        arrival = -uniforms_at(keys, ids).log()
        sampled = placed([[not s.greedy] for s in settings], torch.bool, logits.device)
        weight = likely / arrival.where(sampled, 1.0)
        weight = (weight / weight.sum(-1, keepdim=True)).where(sampled, likely.to(weight))
        best, at = weight.topk(min(count, weight.shape[-1]))
        return best, ids.gather(-1, at)

    def draft(self) -> Draft | None:
        """What has been drawn so far, or None if nothing was."""
        width = max(self._counts)
        if not width:
            return None
        if self._draft is None:
            roots = [s.tokens[-1] for s in self.sequences]
            device = self._drawn[0].device
            tokens = torch.stack([placed(roots, torch.int64, device), *self._drawn[:width]], 1)
            laws = None
            if self.by_law:  # a leaf has no children
                laws = torch.stack([*self.laws[:width], torch.zeros_like(self.laws[0])], 1)
            parents = torch.arange(-1, width).expand(len(roots), width + 1)
            self._draft = Draft(tokens, parents, [1 + n for n in self._counts], laws)
        return self._draft
