"""Saves trained heads with their lm_head weights, which other servers need in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftahead.drafters.eagle import io as eagle_io
from draftahead.drafters.early_exit import io as exit_io
from draftahead.drafters.head_files import config_beside, find_weights
from draftahead.drafters.medusa import io as medusa_io
from draftahead.errors import ConfigError
from draftahead.models.support import text_config


def export_head(source: str | Path, model: Any, folder: Path, *, name: str = "") -> str:
    """Exports an EAGLE head or Medusa heads for a target; returns a description of them. `name`:
    the target's."""
    weights = find_weights(source, (*medusa_io.WEIGHTS, *eagle_io.WEIGHTS))
    if folder.resolve() == weights.parent.resolve():
        raise ConfigError(f"{folder} holds the head itself: write to another folder")
    config = config_beside(weights)
    if config.get("kind") == exit_io.KIND:
        raise ConfigError(f"{source} is an exit adapter, which no other server knows")
    if weights.name.startswith("medusa") or "medusa_num_heads" in config:
        return _export_medusa(source, model, folder, name)
    return _export_eagle(source, model, folder, name, config)


def _export_medusa(source: str | Path, model: Any, folder: Path, name: str) -> str:
    heads = medusa_io.load(source, model)
    if heads.lm_heads:
        raise ConfigError(f"{source} holds its lm_head weights already: use it as it is")
    lm_head = model.get_output_embeddings()
    if getattr(lm_head, "bias", None) is not None:
        raise ConfigError("the target's lm_head has a bias, and files of heads cannot store one")
    vocab_size = int(text_config(model).vocab_size)
    medusa_io.save(heads, folder, vocab_size=vocab_size, target=name, lm_head=lm_head)
    return f"{len(heads)} Medusa heads with the target's lm_head weights"


def _export_eagle(
    source: str | Path, model: Any, folder: Path, name: str, config: dict[str, Any]
) -> str:
    head = eagle_io.load(source, model)
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    count = int(methods[0].get("speculative_tokens", 5))
    eagle_io.save(head, folder, with_lm_head=True, target=name, num_speculative_tokens=count)
    return f"an EAGLE-3 head with lm_head weights of {len(head.draft_to_target)} tokens"
