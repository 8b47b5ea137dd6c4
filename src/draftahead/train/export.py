"""Heads written whole: with the rows of the vocabulary, which ours take from the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftahead.drafters.eagle import io as eagle_io
from draftahead.drafters.early_exit import adapter
from draftahead.drafters.head_files import config_beside, located
from draftahead.drafters.medusa import io as medusa_io
from draftahead.errors import ConfigError
from draftahead.models.support import text_config


def export_head(source: str | Path, model: Any, folder: Path, *, name: str = "") -> str:
    """An EAGLE head or Medusa heads for this target; says what it was. `name`: the target's."""
    weights = located(source, (*medusa_io.FILES, *eagle_io.WEIGHTS))
    if folder.resolve() == weights.parent.resolve():
        raise ConfigError(f"{folder} holds the head itself: write to another folder")
    said = config_beside(weights)
    if said.get("kind") == adapter.KIND:
        raise ConfigError(f"{source} is an exit adapter, which no other server knows")
    if weights.name.startswith("medusa") or "medusa_num_heads" in said:
        heads = medusa_io.load_heads(source, model)
        if heads.lm_heads:
            raise ConfigError(f"{source} holds its output matrices already: use it as it is")
        output = model.get_output_embeddings()
        if getattr(output, "bias", None) is not None:
            raise ConfigError("the target's head has a bias, and no file of heads a place for it")
        vocabulary = int(text_config(model).vocab_size)
        medusa_io.save_heads(heads, folder, vocabulary=vocabulary, base=name or None, head=output)
        return f"{len(heads)} Medusa heads with the target's output matrix"
    head = eagle_io.load(source, model)
    methods = said.get("speculators_config", {}).get("proposal_methods") or [{}]
    guesses = int(methods[0].get("speculative_tokens", 5))
    eagle_io.save(head, folder, with_vocabulary=True, target=name, guesses=guesses)
    return f"an EAGLE-3 head with {len(head.tokens)} rows of the vocabulary"
