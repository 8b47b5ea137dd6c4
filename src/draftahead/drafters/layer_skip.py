"""The target drafts without some of its layers (Zhang et al., arXiv 2309.08168).

Which ones it can spare is searched for on the first text that is long enough, without training
(after SWIFT, Xia et al., arXiv 2410.06916): by how much of its law is left without each of them,
and without the most dispensable of them together. The search takes a bounded number of short passes
with a cache of its own, once for a model.

The layers that are kept read the target's own keys. Guesses are the likeliest tokens and never
drawn: what a text turns out to be must not depend on whether the search was before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftahead.drafters import Drafter, Setting, positive, register
from draftahead.errors import ConfigError
from draftahead.growth import DEEPEST, Grower
from draftahead.parts import Part
from draftahead.passes import CachedModel
from draftahead.selfdraft import SelfDraft
from draftahead.support import text_config
from draftahead.types import Batch, Draft

ENOUGH = 48  # tokens of a text that the search can go by
LONGEST = 256  # of which it reads no more than so many
PLACES, STRETCH = 4, 6  # where in it guesses are compared, and how many tokens from there on
BUDGET = 64  # passes

_FOUND: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()  # model -> layers to skip


@register("layer_skip")
class LayerSkip(Drafter):
    def __init__(
        self,
        setting: Setting,
        *,
        skip: Seq[int] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.guided = num_speculative_tokens is None
        self.count = positive("num_speculative_tokens", num_speculative_tokens, default=DEEPEST)
        self.grower = Grower(self.count)
        self.passes = setting.own_passes("layer_skip")
        self.layers = int(text_config(self.passes.model).num_hidden_layers)
        self.skip: tuple[int, ...] | None = None
        self.part: Part | None = None
        found = _FOUND.get(self.passes.model) if skip is None else self._checked(skip)
        if found is not None:
            self._take(found)

    def _checked(self, skip: Any) -> tuple[int, ...]:
        most = self.layers - 1
        numbers = isinstance(skip, list | tuple) and all(type(index) is int for index in skip)
        if not numbers or not all(1 <= index <= most for index in skip):
            raise ConfigError(
                f"skip must be a list of layers from 1 to {most} (layer 0 stays), not {skip!r}"
            )
        return tuple(sorted(set(skip)))

    def _take(self, skip: tuple[int, ...]) -> None:
        self.skip, self.part = skip, Part(self.passes.model, _without(self.layers, skip))

    def propose(self, batch: Batch) -> Draft | None:
        if self.part is None:
            text = max((sequence.tokens for sequence in batch.sequences), key=len)
            if len(text) < ENOUGH:
                return None
            model = self.passes.model
            _FOUND[model] = Search(model, text[:LONGEST]).skip()
            self._take(_FOUND[model])
        assert self.part is not None
        draft = SelfDraft(self.passes, self.part)
        if self.guided:
            return draft.grown(batch, self.grower)
        return draft.guessed(batch, self.count)

    def reasons(self) -> list[str]:
        """What it leaves out, for whoever asks."""
        said = "not known yet" if self.skip is None else ", ".join(map(str, self.skip)) or "none"
        return [f"layers that it drafts without: {said}"]


class Search:
    """How much of a model's law some of its layers can spare, on one text."""

    def __init__(self, model: Any, text: Seq[int]) -> None:
        self.model, self.layers = model, int(text_config(model).num_hidden_layers)
        self.passes = CachedModel(model, max_batch=PLACES, max_context=len(text), spare=STRETCH)
        last = len(text) - STRETCH
        starts = [last - place * last // (2 * PLACES) for place in range(PLACES)]
        self.passes.prefill(0, text[:last])
        for row, start in enumerate(starts):
            self.passes.cache.copy_row(0, row)
            del self.passes.cache.contents[row][start:]
        self.nodes = torch.tensor([list(text[start : start + STRETCH]) for start in starts])
        self.law = self._law(None)
        self.tried = 0

    def _law(self, part: Part | None) -> Tensor:
        return self.passes.run(self.nodes, part=part).float().softmax(-1)

    def agreement(self, skip: Seq[int]) -> float:
        """What the law without these layers has in common with the whole one, from 0 to 1."""
        self.tried += 1
        law = self._law(Part(self.model, _without(self.layers, skip)))
        return float(torch.minimum(law, self.law).sum(-1).mean().nan_to_num(0.0))

    def skip(self) -> tuple[int, ...]:
        """The layers without which drafting promises the most."""
        size = max(1, -(-2 * (self.layers - 1) // BUDGET))  # layers that are tried together
        rest = list(range(1, self.layers))
        groups = [tuple(rest[at : at + size]) for at in range(0, len(rest), size)]
        ranked = sorted(groups, key=self.agreement, reverse=True)
        best, most, skipped = tuple[int, ...](), 0.0, tuple[int, ...]()
        for group in ranked:
            skipped = tuple(sorted((*skipped, *group)))
            share = 1 - len(skipped) / self.layers
            promised = promise(self.agreement(skipped), share)
            if promised > most:
                best, most = skipped, promised
        return best


def promise(agreement: float, share: float) -> float:
    """Tokens in the time of a plain pass, by the best number of guesses. `share`: of a whole pass
    that one of a guess takes."""
    rates, tokens = [], 1.0
    for count in range(1, DEEPEST + 1):
        tokens += agreement**count
        rates.append(tokens / (1 + count * share))
    return max(rates)


def _without(layers: int, skip: Seq[int]) -> list[int]:
    return [index for index in range(layers) if index not in skip]
