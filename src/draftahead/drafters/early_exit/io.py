"""Exit adapters as files: a folder with `config.json`, and the weights in `model.safetensors`."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from draftahead.drafters.early_exit.adapter import ExitAdapter, ExitConfig
from draftahead.drafters.head_files import CONFIG, check_tokens, write_head
from draftahead.errors import ConfigError
from draftahead.models.support import text_config

KIND = "draftahead-exit"  # in config.json, by which an adapter is told from other heads
WEIGHTS = "model.safetensors"


def load(source: str | Path, model: Any) -> ExitAdapter:
    """An adapter from a folder, or the file of weights in it, for a target: in its dtype and on its
    device."""
    folder = Path(source)
    folder = folder.parent if folder.name == WEIGHTS else folder
    config = _read_config(folder / CONFIG)
    _check_target(config, model, folder)
    adapter = ExitAdapter(config)
    _fill(adapter, folder / WEIGHTS)
    return adapter.to(model.device, model.dtype).eval().requires_grad_(False)


def _read_config(file: Path) -> ExitConfig:
    if not file.is_file():
        raise ConfigError(f"no exit adapter in {file.parent}: there is no {file.name}")
    try:
        stated = json.loads(file.read_text("utf-8"))
        if stated.pop("kind") != KIND:
            raise ValueError("another kind")
        config = ExitConfig(**stated)
        for field in fields(config):
            value = getattr(config, field.name)
            kind = float if field.name == "rms_norm_eps" else int
            if value != field.default and not (type(value) is kind and value > 0):
                raise ValueError(f"{field.name} is {value!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"{file} describes no exit adapter ({problem})") from problem
    return config


def _check_target(config: ExitConfig, model: Any, folder: Path) -> None:
    text = text_config(model)
    for name, stated, own in (
        ("hidden_size", config.hidden_size, int(text.hidden_size)),
        ("vocab_size", config.vocab_size, int(text.vocab_size)),
    ):
        if stated != own:
            raise ConfigError(
                f"the exit adapter in {folder} is for a model with {name} {stated}, and this one "
                f"has {own}: it was trained for another model"
            )
    if not 1 <= config.num_layers <= int(text.num_hidden_layers):
        raise ConfigError(
            f"the exit adapter in {folder} leaves after {config.num_layers} layers, and this model "
            f"has {text.num_hidden_layers}: it was trained for another model"
        )


def _fill(adapter: ExitAdapter, file: Path) -> None:
    try:
        adapter.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as problem:
        raise ConfigError(
            f"{file} is missing, damaged or not what its {CONFIG} says ({problem})"
        ) from problem
    if (tokens := adapter.draft_to_target) is not None:
        check_tokens(tokens, adapter.config.vocab_size, f"{file}: draft_to_target")


def save(adapter: ExitAdapter, folder: str | Path) -> None:
    config = {"kind": KIND, **asdict(adapter.config)}
    write_head(Path(folder), WEIGHTS, adapter.state_dict(), config)
