"""The first layers of the target draft, with its own norm and LM head behind them (LayerSkip,
Elhoushi et al., arXiv 2404.16710; Kangaroo, Liu et al., arXiv 2404.18911).

Weights and KV entries are the target's. A trained adapter may stand between the last of these
layers and the norm; without one the drafts are as good as the model's early layers happen to be,
which is little unless it was trained for it.
"""

from __future__ import annotations

from pathlib import Path

from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.early_exit import io
from draftahead.drafters.registry import register
from draftahead.drafters.self_draft import SelfDraft
from draftahead.drafters.tree_builder import MAX_DEPTH, TreeBuilder
from draftahead.errors import ConfigError
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.support import text_config


@register("early_exit")
class EarlyExit(Drafter):
    """Drafts with the target's first layers."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        layers: int | None = None,
        adapter: str | Path | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        self.adaptive = num_speculative_tokens is None
        self.count = positive("num_speculative_tokens", num_speculative_tokens, default=MAX_DEPTH)
        self.builder = TreeBuilder(self.count)
        self.runner = context.target_runner("early_exit")
        model = self.runner.model
        most = int(text_config(model).num_hidden_layers)
        if adapter is not None and not isinstance(adapter, str | Path):
            raise ConfigError(f"drafter 'early_exit': {adapter!r} is no path of an adapter")
        loaded = None if adapter is None else io.load(adapter, model)
        usual = max(1, round(most / 3)) if loaded is None else loaded.config.layers
        count = positive("layers", layers, most, usual)
        if loaded is not None and count != usual:
            raise ConfigError(
                f"the exit adapter in {adapter} was trained after layer {usual}, not {count}: "
                "leave 'layers' out"
            )
        tokens = None if loaded is None else loaded.tokens
        self.layers = LayerSubset(model, range(count), exit=loaded, tokens=tokens)

    def propose(self, batch: Batch) -> Draft | None:
        draft = SelfDraft(self.runner, self.layers)
        if self.adaptive:
            return draft.trees(batch, self.builder)
        draft.sampled(batch, self.count)
        return None  # the draft sampler holds the draft
