"""Writes heads with their lm_head weights, which our own files leave to the target."""

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
    """Exports an EAGLE head or Medusa heads of this target and describes them. `name`: of the
    target, for the configuration file."""
    weights = located(source, (*medusa_io.FILES, *eagle_io.WEIGHTS))
    if folder.resolve() == weights.parent.resolve():
        raise ConfigError(f"{folder} holds the head itself: write to another folder")
    config = config_beside(weights)
    if config.get("kind") == adapter.KIND:
        raise ConfigError(f"{source} is an early-exit adapter, which other servers do not support")
    if weights.name.startswith("medusa") or "medusa_num_heads" in config:
        heads = medusa_io.load_heads(source, model)
        if heads.lm_heads:
            raise ConfigError(f"{source} holds its lm_head weights already: use it as it is")
        output = model.get_output_embeddings()
        if getattr(output, "bias", None) is not None:
            raise ConfigError("the target's LM head has a bias, which Medusa files cannot hold")
        vocabulary = int(text_config(model).vocab_size)
        medusa_io.save_heads(heads, folder, vocabulary=vocabulary, base=name or None, head=output)
        return f"{len(heads)} Medusa heads with the target's lm_head weights"
    head = eagle_io.load(source, model)
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    guesses = int(methods[0].get("speculative_tokens", 5))
    eagle_io.save(head, folder, with_vocabulary=True, target=name, guesses=guesses)
    return f"an EAGLE-3 head with lm_head weights of {len(head.tokens)} tokens"
