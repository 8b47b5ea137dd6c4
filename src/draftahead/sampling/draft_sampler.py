"""Sampling of drafted tokens, recorded for the acceptance rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftahead.core.types import Draft, Exact, SequenceState
from draftahead.sampling.noise import (
    NodeContext,
    RngStream,
    sample_gumbel,
    small_tensor,
    step_rng_key,
    target_rng_key,
    uniforms_at,
)
from draftahead.sampling.processors import _column, probs_of, processed
from draftahead.sampling.sample import draw

WEIGHED = 64  # tokens of a drafter's law that are looked at for the target's next


def scatter_to_vocab(logits: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
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


class RecordedDraftSampler:
    """Draws for a sampling drafter, one depth a call, and keeps the record.

    What was drawn becomes the draft, whatever the drafter does afterwards: dropping or changing
    a token once it is known would bend the output. Where a token can be checked by equality (all
    rows greedy, or replay), the draft shares the target's noise and needs no law: then the two
    agree as often as one race over both laws lets them.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        max_depths: Sequence[int],
        vocabulary: int,
        exact: Exact,
    ) -> None:
        self.sequences, self.max_depths, self.vocabulary = sequences, max_depths, vocabulary
        self._all_greedy = all(s.params.greedy for s in sequences)
        self.keeps_probs = exact == "law" and not self._all_greedy
        self.probs: list[Tensor] = []
        # Without processors nothing here depends on which tokens were drawn, so the device can go
        # on drawing while the host has not seen any.
        self._needs_paths = any(s.has_processors for s in sequences)
        self._drawn: list[Tensor] = []  # [B] a depth
        self._counts = [0] * len(sequences)  # tokens of each chain
        self._open = [room > 0 for room in max_depths]
        self._draft: Draft | None = None

    @property
    def chains(self) -> list[list[int]]:
        """What was drawn, by row. Waits for the device, unless the draft was read back already."""
        if self._draft is not None:
            rows = self._draft.host_tokens
            return [row[1 : 1 + n] for row, n in zip(rows, self._counts, strict=True)]
        if not self._drawn:
            return [[] for _ in self.sequences]
        drawn = torch.stack(self._drawn, 1).tolist()
        return [row[:n] for row, n in zip(drawn, self._counts, strict=True)]

    def draw(
        self, logits: Tensor, rows: Tensor | None = None, best: Tensor | None = None
    ) -> Tensor:
        # Everything that can fail comes before the draw: what is drawn stands.
        if self.keeps_probs and any(sequence.target_noise_used for sequence in self.sequences):
            raise ValueError("a drafter that asked for the outlook knows too much to draw")
        if logits.ndim != 2 or len(logits) != len(self.sequences):
            raise ValueError(f"dice want logits [{len(self.sequences)}, V], not {logits.shape}")
        wanted = rows.tolist() if rows is not None else [True] * len(self.sequences)
        depth = len(self._drawn)
        tokens, finite = self._draw(logits, depth, best)
        checks = zip(self._open, wanted, finite, self.max_depths, strict=True)
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
        contexts = [
            NodeContext(s, tuple(path)) for s, path in zip(self.sequences, paths, strict=True)
        ]
        logits = _fitted(logits, self.vocabulary)
        if not self.keeps_probs:
            tokens, finite = draw(logits, contexts)
        else:
            law = probs_of(logits, contexts)
            finite = law[:, 0].isfinite()
            law = law.where(finite[:, None], 1.0)  # a row without a law ends here; any would do
            tokens = sample_gumbel(
                law, [step_rng_key(RngStream.DRAFT, context) for context in contexts]
            )
            self.probs.append(law)
        return tokens, finite.tolist() if self._needs_paths else [True] * len(contexts)

    def noise_coupled_topk(
        self,
        logits: Tensor,
        rows: Sequence[int],
        paths: Sequence[tuple[int, ...]],
        count: int,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Dice. A token's weight is its probability over its arrival time in the target's own
        race, so the heaviest is what the target would draw from this very law."""
        contexts = [
            NodeContext(self.sequences[b], path) for b, path in zip(rows, paths, strict=True)
        ]
        for context in contexts:
            context.sequence.target_noise_used = True
        if tokens is not None and self._needs_paths:  # processors go by the target's ids
            logits, tokens = scatter_to_vocab(logits, tokens, self.vocabulary), None
        size = self.vocabulary if tokens is None else len(tokens)
        logits = processed(_fitted(logits, size), contexts)
        settings = [context.sequence.params for context in contexts]
        warm = _column([s.temperature or 1.0 for s in settings], logits)
        seen = count if self._all_greedy else WEIGHED
        likely, ids = (logits / warm).softmax(-1).topk(min(seen, logits.shape[-1]))
        ids = ids if tokens is None else tokens[ids]
        if self._all_greedy:  # noise decides nothing
            return likely, ids
        keys = [target_rng_key(context) for context in contexts]
        arrival = -uniforms_at(keys, ids).log()
        sampled = small_tensor([[not s.greedy] for s in settings], torch.bool, logits.device)
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
            tokens = torch.stack(
                [small_tensor(roots, torch.int64, device), *self._drawn[:width]], 1
            )
            probs = None
            if self.keeps_probs:  # a leaf has no children
                probs = torch.stack([*self.probs[:width], torch.zeros_like(self.probs[0])], 1)
            parents = torch.arange(-1, width).expand(len(roots), width + 1)
            self._draft = Draft(tokens, parents, [1 + n for n in self._counts], probs)
        return self._draft
