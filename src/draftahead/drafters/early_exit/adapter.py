"""The exit adapter: what makes the states after a few layers fit for the target's own head.

It stands on the exit branch alone, between a layer and the target's last norm: a norm and a
residual of low rank. The head is the target's; a draft vocabulary names the rows of it that are
asked, and nothing of them is stored.

A folder of two files: `config.json`, and the weights in `model.safetensors`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.drafters.eagle.head import RMSNorm
from draftahead.drafters.head_files import write_config, write_tensors
from draftahead.errors import ConfigError

KIND = "draftahead-exit"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class ExitConfig:
    layers: int  # of the target, below the exit
    hidden_size: int
    rank: int
    vocab_size: int  # of the target
    draft_vocab_size: int | None = None  # None: all of it
    rms_norm_eps: float = 1e-5


class ExitAdapter(nn.Module):
    """States [..., H] after the exit's last layer -> states for the target's last norm."""

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.down = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)  # at first it changes nothing
        # The draft vocabulary, as the target's ids.
        self.tokens: Tensor | None
        size = config.draft_vocab_size
        self.register_buffer("tokens", None if size is None else torch.arange(size))

    def forward(self, states: Tensor) -> Tensor:
        return states + self.up(F.silu(self.down(self.norm(states))))  # type: ignore[no-any-return]

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        said = {"kind": KIND, **asdict(self.config)}
        write_config(said, folder)
        write_tensors(self.state_dict(), folder / WEIGHTS)


def new_adapter(model: Any, layers: int, *, rank: int, tokens: Tensor | None = None) -> ExitAdapter:
    """An untrained adapter for a target, in float32 on its device: it changes nothing yet."""
    text = model.config.get_text_config(decoder=True)
    config = ExitConfig(
        layers=layers,
        hidden_size=int(text.hidden_size),
        rank=rank,
        vocab_size=int(text.vocab_size),
        draft_vocab_size=None if tokens is None else len(tokens),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-5)),
    )
    adapter = ExitAdapter(config).to(model.device)
    if adapter.tokens is not None and tokens is not None:
        adapter.tokens.copy_(tokens)
    return adapter


def load_adapter(place: str | Path, model: Any) -> ExitAdapter:
    """From a folder, or the weights' file in it; for this target, on its device, in its dtype."""
    folder = Path(place)
    folder = folder.parent if folder.name == WEIGHTS else folder
    config = _config(folder / CONFIG)
    text = model.config.get_text_config(decoder=True)
    for name, own in (
        ("hidden_size", int(text.hidden_size)),
        ("vocab_size", int(text.vocab_size)),
    ):
        if getattr(config, name) != own:
            raise ConfigError(
                f"the exit adapter in {folder} is for a model with {name} "
                f"{getattr(config, name)}, and this one has {own}: it was trained for another model"
            )
    if not 1 <= config.layers <= int(text.num_hidden_layers):
        raise ConfigError(
            f"the exit adapter in {folder} leaves after {config.layers} layers, and this model has "
            f"{text.num_hidden_layers}: it was trained for another model"
        )
    adapter = ExitAdapter(config)
    _fill(adapter, folder / WEIGHTS)
    return adapter.to(model.device, model.dtype).eval().requires_grad_(False)


def _config(file: Path) -> ExitConfig:
    if not file.is_file():
        raise ConfigError(f"no exit adapter in {file.parent}: there is no {file.name}")
    try:
        said = json.loads(file.read_text("utf-8"))
        if said.pop("kind") != KIND:
            raise ValueError("another kind")
        config = ExitConfig(**said)
        for field in fields(config):
            value = getattr(config, field.name)
            kind = float if field.name == "rms_norm_eps" else int
            if value != field.default and not (type(value) is kind and value > 0):
                raise ValueError(f"{field.name} is {value!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"{file} describes no exit adapter ({problem})") from problem
    return config


def _fill(adapter: ExitAdapter, file: Path) -> None:
    try:
        tensors = load_file(file)
        adapter.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError) as problem:
        raise ConfigError(
            f"{file} is missing, damaged or not what its {CONFIG} says ({problem})"
        ) from problem
    tokens, vocabulary = adapter.tokens, adapter.config.vocab_size
    if tokens is not None and not bool(((tokens >= 0) & (tokens < vocabulary)).all()):
        raise ConfigError(f"{file} names draft tokens outside a vocabulary of {vocabulary}")
