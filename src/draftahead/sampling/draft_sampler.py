"""Sampling of drafted tokens, with a record of the distributions for the acceptance rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.core.device import small_tensor
from draftahead.core.draft import DeviceDraft
from draftahead.core.types import RunningBatch
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    sample_gumbel,
    step_rng_key,
    target_rng_key,
    uniforms_at,
)
from draftahead.sampling.processors import column, probs_of, process_logits
from draftahead.sampling.sample import sample_target

# The target's noise is applied to so many of a drafter's likeliest tokens. More would also find
# unlikely tokens that the noise favours, at the cost of a longer sort.
NOISE_COUPLED_TOKENS = 64


class RecordedDraftSampler:
    """Samples for a drafter, one depth a call, and keeps the record. See DraftSampler.

    Drawn tokens cannot be dropped or changed: that would bias the output. Where tokens are accepted
    by equality (all sequences greedy, or replay), the draft is sampled with the target's noise
    (Gumbel coupling, for more agreement) and no distribution is kept.
    """

    # All private, and there can be no others: a drafter that holds this can replace nothing of it.
    __slots__ = (
        "_active",
        "_batch",
        "_drawn",
        "_keeps_probs",
        "_lengths",
        "_probs",
        "_sequences",
        "_vocab_size",
    )

    def __init__(self, batch: RunningBatch, vocab_size: int) -> None:
        self._batch, self._sequences, self._vocab_size = batch, batch.sequences, vocab_size
        self._keeps_probs = batch.exact == "distribution" and not batch.all_greedy
        self._probs: list[Tensor] = []  # [B, V] per depth
        self._drawn: list[Tensor] = []  # [B] per depth
        self._lengths = [0] * len(batch.sequences)  # of each chain
        self._active = [max_depth > 0 for max_depth in batch.max_depths]

    @property
    def chains(self) -> list[list[int]]:
        """The tokens drawn for each sequence. Waits for the device."""
        if not self._drawn:
            return [[] for _ in self._sequences]
        drawn = torch.stack(self._drawn, 1).tolist()
        return [chain[:n] for chain, n in zip(drawn, self._lengths, strict=True)]

    def draft(self) -> DeviceDraft | None:
        """The tokens drawn so far; None if there are none."""
        longest = max(self._lengths)
        if not longest:
            return None
        root_tensor = small_tensor(self._batch.roots, torch.int64, self._drawn[0].device)
        tokens = torch.stack([root_tensor, *self._drawn[:longest]], 1)
        probs = None
        if self._keeps_probs:  # a leaf has no children
            probs = torch.stack([*self._probs[:longest], torch.zeros_like(self._probs[0])], 1)
        return DeviceDraft(self._batch.roots, tokens, [1 + n for n in self._lengths], probs)

    # --------------------------------------------------------------------------- drawing

    def draw(
        self, logits: Tensor, active: Tensor | None = None, argmax: Tensor | None = None
    ) -> Tensor:
        # Everything that can fail comes before the draw: drawn tokens cannot be taken back.
        if self._keeps_probs and any(sequence.target_noise_used for sequence in self._sequences):
            raise ValueError("a drafter that has seen the target's noise must not draw")
        if logits.ndim != 2 or len(logits) != len(self._sequences):
            raise ValueError(f"draw takes logits [{len(self._sequences)}, V], not {logits.shape}")
        wanted = active.tolist() if active is not None else [True] * len(self._sequences)
        depth = len(self._drawn)
        tokens, has_token = self._sample(logits, depth, argmax)
        checks = zip(self._active, wanted, has_token, self._batch.max_depths, strict=True)
        self._active = [a and bool(w) and h and depth < limit for a, w, h, limit in checks]
        self._lengths = [n + a for n, a in zip(self._lengths, self._active, strict=True)]
        self._drawn.append(tokens)
        return tokens.clone()  # the drafter's own, which it may overwrite

    def _sample(
        self, logits: Tensor, depth: int, argmax: Tensor | None
    ) -> tuple[Tensor, list[bool]]:
        """Tokens [B], and which sequences had a distribution: without processors, all."""
        all_true = [True] * len(self._sequences)
        if all(sequence.takes_argmax for sequence in self._sequences):
            if argmax is not None and logits.shape[-1] <= self._vocab_size:
                return argmax.clamp(0, self._vocab_size - 1), all_true
            return logits[:, : self._vocab_size].argmax(-1), all_true
        paths = self.chains if self._batch.modifies_logits else [[0] * depth] * len(self._sequences)
        contexts = [
            NodeContext(sequence, tuple(path))
            for sequence, path in zip(self._sequences, paths, strict=True)
        ]
        logits = _fit_to_vocab(logits, self._vocab_size)
        if not self._keeps_probs:
            tokens, has_token = sample_target(logits, contexts)
        else:
            probs = probs_of(logits, contexts)
            has_token = probs[:, 0].isfinite()
            probs = probs.where(has_token[:, None], 1.0)  # the chain ends here: any would do
            rng_keys = [step_rng_key(RngStream.DRAFT, context) for context in contexts]
            tokens = sample_gumbel(probs, rng_keys)
            self._probs.append(probs)
        return tokens, has_token.tolist() if self._batch.modifies_logits else all_true

    # ----------------------------------------------------------- drafting with the target's noise

    def noise_coupled_topk(
        self,
        logits: Tensor,
        sequences: Sequence[int],
        paths: Sequence[tuple[int, ...]],
        k: int,
        draft_to_target: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See DraftSampler. A token's weight is its probability over the target's own exponential
        noise for it: the heaviest is what the target would sample from this distribution."""
        contexts = [
            NodeContext(self._sequences[b], path) for b, path in zip(sequences, paths, strict=True)
        ]
        for context in contexts:
            context.sequence.target_noise_used |= not context.sequence.is_greedy
        # Processors take the target's token ids.
        if self._batch.modifies_logits:
            logits = scatter_to_vocab(logits, draft_to_target, self._vocab_size)
            draft_to_target = None
        size = self._vocab_size if draft_to_target is None else len(draft_to_target)
        logits = process_logits(_fit_to_vocab(logits, size), contexts)
        params = [context.sequence.params for context in contexts]
        temperature = column([p.temperature or 1.0 for p in params], logits)
        num_candidates = k if self._batch.all_greedy else NOISE_COUPLED_TOKENS
        logits = logits - logits.amax(-1, keepdim=True)  # a low temperature takes none to infinity
        probs, ids = (logits / temperature).softmax(-1).topk(min(num_candidates, logits.shape[-1]))
        ids = ids if draft_to_target is None else draft_to_target[ids]
        if self._batch.all_greedy:  # no noise is involved
            return probs, ids
        noise = -uniforms_at([target_rng_key(context) for context in contexts], ids).log()
        sampled = small_tensor([[not p.is_greedy] for p in params], torch.bool, logits.device)
        weights = probs / noise.where(sampled, 1.0)
        weights = (weights / weights.sum(-1, keepdim=True)).where(sampled, probs.to(weights))
        best, index = weights.topk(min(k, weights.shape[-1]))
        return best, ids.gather(-1, index)

    def target_rng_keys(self, num_depths: int) -> list[list[int]]:
        """See DraftSampler."""
        for sequence in self._sequences:
            sequence.target_noise_used = True
        depths = [(0,) * depth for depth in range(num_depths)]
        return [[target_rng_key(NodeContext(s, path)) for path in depths] for s in self._sequences]


def scatter_to_vocab(logits: Tensor, draft_to_target: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [..., D] over a draft vocabulary -> [..., V], -inf for other tokens. `draft_to_target`
    [D]: its tokens; None: logits are over the whole vocabulary."""
    if draft_to_target is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    whole[..., draft_to_target] = logits
    return whole


def _fit_to_vocab(logits: Tensor, vocab_size: int) -> Tensor:
    """Cuts or pads logits to a vocabulary. Values that are not finite become very low: that can
    only make the draft worse."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    logits = logits[:, :vocab_size]
    lowest = torch.finfo(logits.dtype).min / 4
    logits = logits.nan_to_num(nan=lowest, posinf=-lowest, neginf=lowest)
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=lowest) if missing else logits
