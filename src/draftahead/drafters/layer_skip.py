"""The target drafts without some of its layers (Zhang et al., arXiv 2309.08168).

Which layers to skip is searched once per model, without training, on the first sequence that is
long enough (after SWIFT, Xia et al., arXiv 2410.06916): layers are removed one after the other, the
one whose removal changes the target's distribution least first. If no subset is expected to speed
up decoding, nothing is proposed, unless `num_speculative_tokens` is given.

The layers that are kept read the target's own KV entries. Drafted tokens are the most likely ones
and never sampled, so that the text does not depend on when the search was done.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftahead.core.checks import list_of, whole
from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import DrafterContext
from draftahead.drafters.registry import register
from draftahead.drafters.self_draft import SelfDrafter
from draftahead.drafters.tree_builder import MAX_DEPTH
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from draftahead.models.support import text_config

MIN_TOKENS = 48  # of the sequence that a search is based on; fewer are not typical of the model
COMPARED_TOKENS = 12  # of the target's own continuation, on which subsets are compared
MAX_SUBSETS = 40  # that are tried; more find better ones, for a forward each


class SearchResult(NamedTuple):
    """The layers to skip, and what that is expected to bring."""

    skip: tuple[int, ...]
    speed_up: float  # tokens in the time of a plain forward


_RESULTS: WeakKeyDictionary[Any, SearchResult] = WeakKeyDictionary()  # by model


@register("layer_skip")
class LayerSkip(SelfDrafter):
    """Drafts with the target, without some of its layers."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        skip: Sequence[int] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        super().__init__(context, "layer_skip", num_speculative_tokens)
        self.pays = True  # until the search has a result
        self.layers: LayerSubset | None = None
        if skip is None:
            return
        last = self.num_layers - 1
        layers = list_of(whole(1, last), f"a list of layers from 1 to {last} (layer 0 stays)")
        self.layers = layers_without(self.runner.model, layers.of("skip", skip))

    def propose(self, batch: Batch) -> Draft | None:
        if self.layers is None:
            self._search(batch)
        if self.layers is None or not self.pays:
            return None
        return self.draft_with(self.layers, batch, sampled=False)

    def _search(self, batch: Batch) -> None:
        model, lengths = self.runner.model, [len(s.tokens) for s in batch.sequences]
        slot = lengths.index(max(lengths))
        if model not in _RESULTS and lengths[slot] >= MIN_TOKENS:
            _RESULTS[model] = Search(self.runner, slot, batch.roots[slot]).result()
        if result := _RESULTS.get(model):
            self.layers = layers_without(model, result.skip)
            self.pays = result.speed_up > 1 or not self.adaptive

    def explain(self) -> list[str]:
        if self.layers is None:
            return [f"no sequence has had {MIN_TOKENS} tokens yet to choose layers by"]
        skipped = [str(i) for i in range(self.num_layers) if i not in self.layers.layers]
        which = f"layers skipped for drafts: {', '.join(skipped) or 'none'}"
        return [which if self.pays else f"{which}; but that is not expected to pay"]


class Search:
    """Compares subsets of the layers on the target's own continuation of one sequence, computed
    behind the slot's length like a draft."""

    def __init__(self, runner: ModelRunner, slot: int, root: int) -> None:
        self.runner, self.slot = runner, slot
        whole, tokens = layers_without(runner.model, ()), [root]
        for offset in range(COMPARED_TOKENS - 1):
            last = torch.tensor([tokens[-1:]])
            output = runner.forward(last, first_slot=slot, layers=whole, offset=offset)
            tokens.append(int(output.logits[0, 0].argmax()))
        self.nodes = torch.tensor([tokens])
        self.probs = self._probs(whole)

    def _probs(self, layers: LayerSubset) -> Tensor:
        output = self.runner.forward(self.nodes, first_slot=self.slot, layers=layers)
        return output.logits.float().softmax(-1)

    def agreement(self, layers: LayerSubset) -> float:
        """From 0 to 1: the mean of the share of equal argmax tokens and of the overlap of the
        distributions, which ranks subsets of equal argmax agreement."""
        probs = self._probs(layers)
        same = (probs.argmax(-1) == self.probs.argmax(-1)).float().mean()
        shared = torch.minimum(probs, self.probs).sum(-1).mean()
        return float((same + shared).nan_to_num(0.0)) / 2

    def result(self) -> SearchResult:
        """The layers without which drafting is expected to pay the most."""
        model = self.runner.model
        rest = list(range(1, int(text_config(model).num_hidden_layers)))
        size = max(1, -(-2 * len(rest) // MAX_SUBSETS))  # layers that are tried together
        groups = [tuple(rest[at : at + size]) for at in range(0, len(rest), size)]
        alone = {group: self.agreement(layers_without(model, group)) for group in groups}
        best, skipped = SearchResult((), 0.0), tuple[int, ...]()
        smallest_share = layers_without(model, rest).weight_share
        for group in sorted(groups, key=lambda group: -alone[group]):
            skipped = tuple(sorted((*skipped, *group)))
            layers = layers_without(model, skipped)
            agreement = self.agreement(layers)
            result = SearchResult(skipped, expected_speed_up(agreement, layers.weight_share))
            best = max(best, result, key=lambda result: result.speed_up)
            if expected_speed_up(agreement, smallest_share) <= best.speed_up:
                break  # fewer layers rarely agree more
        return best


def expected_speed_up(agreement: float, share: float) -> float:
    """Tokens in the time of a plain forward, with the best number of drafted tokens. `share`: the
    time of a drafting forward as a share of a plain one."""
    tokens = itertools.accumulate(agreement**count for count in range(MAX_DEPTH + 1))
    return max(total / (1 + count * share) for count, total in enumerate(tokens) if count)


def layers_without(model: Any, skip: Sequence[int]) -> LayerSubset:
    layers = range(int(text_config(model).num_hidden_layers))
    return LayerSubset(model, [index for index in layers if index not in skip])
