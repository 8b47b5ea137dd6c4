"""Exit adapters as files: a folder with `config.json`, and the weights in `model.safetensors`."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from draftahead.drafters.early_exit.adapter import ExitAdapter, ExitConfig
from draftahead.drafters.head_files import (
    check_fits,
    check_tokens,
    config_beside,
    config_refused_clearly,
    fill,
    find_weights,
    tensors_in,
    write_head,
)
from draftahead.errors import ConfigError
from draftahead.models.support import text_config

KIND = "draftahead-exit"  # in config.json: distinguishes adapters from heads
WEIGHTS = "model.safetensors"


def load(source: str | Path, model: Any) -> ExitAdapter:
    """An adapter from a folder, a file or a hub id, for a target: in its dtype and on its
    device."""
    file = find_weights(source, [WEIGHTS])
    config = _read_config(file)
    _check_target(config, model, file.parent)
    tensors, words = tensors_in(file, list), {"what": "exit adapter", "by": "by its config"}
    # Nothing is allocated by a configuration that does not fit.
    with config_refused_clearly(file.parent, "exit adapter"), torch.device("meta"):
        check_fits(ExitAdapter(config).state_dict(), tensors, file, **words)
    adapter = ExitAdapter(config)
    fill(adapter.state_dict(), tensors, file, **words)
    if (draft_to_target := adapter.draft_to_target) is not None:
        check_tokens(draft_to_target, adapter.config.vocab_size, f"{file}: draft_to_target")
    return adapter.to(model.device, model.dtype).eval().requires_grad_(False)


def _read_config(weights: Path) -> ExitConfig:
    stated = config_beside(weights)
    try:
        if stated.pop("kind") != KIND:
            raise ValueError("another kind")
        config = ExitConfig(**stated)
        for field in fields(config):
            value = getattr(config, field.name)
            kind = float if field.name == "rms_norm_eps" else int
            if value != field.default and not (type(value) is kind and value > 0):
                raise ValueError(f"{field.name} is {value!r}")
    except (ValueError, KeyError, TypeError) as problem:
        raise ConfigError(f"{weights.parent} describes no exit adapter ({problem})") from problem
    return config


def _check_target(config: ExitConfig, model: Any, folder: Path) -> None:
    text = text_config(model)
    for name in ("hidden_size", "vocab_size"):
        stated, of_target = getattr(config, name), int(getattr(text, name))
        if stated != of_target:
            raise ConfigError(
                f"the exit adapter in {folder} is for a model with {name} {stated}, and this one "
                f"has {of_target}: it was trained for another model"
            )
    if not 1 <= config.num_layers <= int(text.num_hidden_layers):
        raise ConfigError(
            f"the exit adapter in {folder} leaves after {config.num_layers} layers, and this model "
            f"has {text.num_hidden_layers}: it was trained for another model"
        )


def save(adapter: ExitAdapter, folder: str | Path) -> None:
    config = {"kind": KIND, **asdict(adapter.config)}
    write_head(Path(folder), WEIGHTS, adapter.state_dict(), config)
