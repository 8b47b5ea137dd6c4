"""The target drafts without some of its layers (Zhang et al., arXiv 2309.08168).

Which ones it can spare is searched for once a model, without training, on the first text that is
long enough (after SWIFT, Xia et al., arXiv 2410.06916): by how much of the target's law is left
without each of them, and without the most dispensable of them together. Where no choice promises
to pay, it stays silent, unless it is asked for a number of guesses.

The layers that are kept read the target's own keys. Guesses are the likeliest tokens and never
drawn: what a text turns out to be must not depend on whether the search was before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftahead.core.types import Batch, Draft
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.registry import register
from draftahead.drafters.self_draft import SelfDraft
from draftahead.drafters.tree_builder import DEEPEST, TreeBuilder
from draftahead.errors import ConfigError
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from draftahead.models.support import text_config

ENOUGH = 48  # tokens of a text that a search can go by
STRETCH = 12  # tokens that the target says next, which parts of it are compared on
BUDGET = 40  # parts that are tried


class Found(NamedTuple):
    """What a search came to."""

    skip: tuple[int, ...]
    promise: float  # tokens in the time of a plain pass


_FOUND: WeakKeyDictionary[Any, Found] = WeakKeyDictionary()  # by model


@register("layer_skip")
class LayerSkip(Drafter):
    def __init__(
        self,
        setting: DrafterContext,
        *,
        skip: Sequence[int] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.adaptive = num_speculative_tokens is None
        self.count = positive("num_speculative_tokens", num_speculative_tokens, default=DEEPEST)
        self.grower = TreeBuilder(self.count)
        self.runner = setting.target_runner("layer_skip")
        self.layers = int(text_config(self.runner.model).num_hidden_layers)
        self.skip = None if skip is None else self._checked(skip)
        self.part = None if self.skip is None else _without(self.runner.model, self.skip)
        self.pays = True  # as far as is known

    def _checked(self, skip: Any) -> tuple[int, ...]:
        most = self.layers - 1
        numbers = isinstance(skip, list | tuple) and all(type(index) is int for index in skip)
        if not numbers or not all(1 <= index <= most for index in skip):
            raise ConfigError(
                f"skip must be a list of layers from 1 to {most} (layer 0 stays), not {skip!r}"
            )
        return tuple(sorted(set(skip)))

    def propose(self, batch: Batch) -> Draft | None:
        if self.part is None:
            self._search(batch)
        if self.part is None or not self.pays:
            return None
        draft = SelfDraft(self.runner, self.part)
        if self.adaptive:
            return draft.grown(batch, self.grower)
        return draft.guessed(batch, self.count)

    def _search(self, batch: Batch) -> None:
        model, lengths = self.runner.model, [len(sequence.tokens) for sequence in batch.sequences]
        row = lengths.index(max(lengths))
        if model not in _FOUND and lengths[row] >= ENOUGH:
            _FOUND[model] = Search(self.runner, row, batch.roots[row]).found()
        if found := _FOUND.get(model):
            self.skip, self.part = found.skip, _without(model, found.skip)
            self.pays = found.promise > 1 or not self.adaptive

    def reasons(self) -> list[str]:
        """What it leaves out, for whoever asks."""
        if self.skip is None:
            return [f"no text has had {ENOUGH} tokens yet to choose layers by"]
        which = f"layers to draft without: {', '.join(map(str, self.skip)) or 'none'}"
        return [which if self.pays else f"{which}; but that does not promise to pay"]


class Search:
    """How much of the target's law parts of it keep, over what it says next in one row. Like any
    draft this takes place behind the row's length, and leaves nothing there that counts."""

    def __init__(self, passes: ModelRunner, row: int, root: int) -> None:
        self.runner, self.row = passes, row
        self.layers = int(text_config(passes.model).num_hidden_layers)
        whole, said = _without(passes.model, ()), [root]
        for ahead in range(STRETCH - 1):
            last = torch.tensor([said[-1:]])
            logits = passes.run(last, first=row, part=whole, ahead=ahead)
            said.append(int(logits[0, 0].argmax()))
        self.nodes = torch.tensor([said])
        self.law = self._law(whole)
        self.tried = 0

    def _law(self, part: LayerSubset) -> Tensor:
        return self.runner.run(self.nodes, first=self.row, part=part).float().softmax(-1)

    def agreement(self, part: LayerSubset) -> float:
        """From 0 to 1: how often a part has the same best token, and how much of the law in common;
        the one is what counts, the other tells near misses apart."""
        self.tried += 1
        law = self._law(part)
        same = (law.argmax(-1) == self.law.argmax(-1)).float().mean()
        common = torch.minimum(law, self.law).sum(-1).mean()
        return float((same + common).nan_to_num(0.0)) / 2

    def found(self) -> Found:
        """The layers without which drafting promises the most."""
        model, rest = self.runner.model, list(range(1, self.layers))
        size = max(1, -(-2 * len(rest) // BUDGET))  # layers that are tried together
        groups = [tuple(rest[at : at + size]) for at in range(0, len(rest), size)]
        alone = {group: self.agreement(_without(model, group)) for group in groups}
        best, skipped = Found((), 0.0), tuple[int, ...]()
        least = _without(model, rest).share
        for group in sorted(groups, key=lambda group: -alone[group]):
            skipped = tuple(sorted((*skipped, *group)))
            part = _without(model, skipped)
            agreement = self.agreement(part)
            best = max(
                best, Found(skipped, promise(agreement, part.share)), key=lambda f: f.promise
            )
            if promise(agreement, least) <= best.promise:
                break  # without more layers it will hardly agree more
        return best


def promise(agreement: float, share: float) -> float:
    """Tokens in the time of a plain pass, by the best number of guesses. `share`: of a whole pass
    that one of a guess takes."""
    rates, tokens = [], 1.0
    for count in range(1, DEEPEST + 1):
        tokens += agreement**count
        rates.append(tokens / (1 + count * share))
    return max(rates)


def _without(model: Any, skip: Sequence[int]) -> LayerSubset:
    layers = range(int(text_config(model).num_hidden_layers))
    return LayerSubset(model, [index for index in layers if index not in skip])
