"""The first layers of the target draft, with its own norm and LM head behind them (LayerSkip,
Elhoushi et al., arXiv 2404.16710; Kangaroo, Liu et al., arXiv 2404.18911).

Weights and KV entries are the target's. A trained adapter may stand between the last of these
layers and the norm; without one the drafts are as good as the model's early layers happen to be,
which is little unless it was trained for it.
"""

from __future__ import annotations

from pathlib import Path

from draftahead.core.checks import NAME
from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import DrafterContext, positive_int
from draftahead.drafters.early_exit import io
from draftahead.drafters.registry import register
from draftahead.drafters.self_draft import SelfDrafter
from draftahead.errors import ConfigError
from draftahead.models.layer_subset import LayerSubset


@register("early_exit")
class EarlyExit(SelfDrafter):
    """Drafts with the target's first layers."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        layers: int | None = None,
        adapter: str | Path | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        super().__init__(context, "early_exit", num_speculative_tokens)
        model = self.runner.model
        loaded = None if adapter is None else io.load(NAME.of("adapter", adapter), model)
        default = max(1, round(self.num_layers / 3)) if loaded is None else loaded.config.num_layers
        count = positive_int("layers", layers, self.num_layers, default)
        if loaded is not None and count != default:
            raise ConfigError(
                f"the exit adapter in {adapter} was trained after layer {default}, not {count}: "
                "leave 'layers' out"
            )
        draft_to_target = None if loaded is None else loaded.draft_to_target
        self.layers = LayerSubset(
            model, range(count), exit_transform=loaded, draft_to_target=draft_to_target
        )

    def propose(self, batch: Batch) -> Draft | None:
        return self.draft_with(self.layers, batch, sampled=True)
