"""Medusa heads as files: published layouts in, a layout that servers read out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from draftahead.drafters.head_files import (
    config_beside,
    located,
    plain_state,
    tensors_in,
    write_config,
    write_tensors,
)
from draftahead.drafters.medusa.heads import MedusaHeads, checked_tree
from draftahead.errors import ConfigError
from draftahead.models.support import text_config

FILE = "medusa_lm_head.safetensors"


FILES = (FILE, "medusa_lm_head.pt", "model.safetensors")


PADDING = 128  # rows by which vocabularies may differ and still hold the same tokens


PREFIX = re.compile(r"medusa_heads?\.")


# Published names, and vLLM's -> those of `MedusaHeads.parts`.
NAMES = {
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"): r"\1.\2.linear.\3",
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"): r"\1.\2.linear.\3",
    re.compile(r"(\d+)\.\d+\.weight"): r"lm_heads.\1.weight",
    re.compile(r"lm_heads\.(\d+)\.weight"): r"lm_heads.\1.weight",
    re.compile(r"lm_head\.weight"): r"lm_heads.0.weight",
    re.compile(r"token_map"): "token_map",
}


def load_heads(source: str | Path, model: Any) -> MedusaHeads:
    """Heads from a folder, a file or a hub id, for a target, on its device and in its dtype."""
    file = located(source, FILES)
    tensors = {_name(name): held for name, held in tensors_in(file, _of_heads).items()}
    numbers = [name.split(".") for name in tensors if ".linear." in name]
    if not numbers:
        raise ConfigError(f"{file} holds no Medusa heads")
    # The file is what counts: published configurations name fewer heads than there are.
    heads = 1 + max(int(part[0]) for part in numbers)
    layers = 1 + max(int(part[1]) for part in numbers)
    rows = [held.shape[0] for name, held in tensors.items() if name.startswith("lm_heads.")]
    if len(rows) not in (0, 1, heads):
        raise ConfigError(f"{file} has {heads} heads and {len(rows)} output matrices")
    text = text_config(model)
    hidden, vocabulary = int(text.hidden_size), int(text.vocab_size)
    tokens = tensors.get("token_map")
    if tokens is not None and (tokens.is_floating_point() or tokens.ndim != 1 or not len(tokens)):
        raise ConfigError(f"{file}: token_map is no list of tokens")
    _shorten(tensors, rows)
    found = MedusaHeads(hidden, heads, layers=layers, outputs=rows, tokens=tokens).to(model.dtype)
    parts = found.parts()
    for name, expected in parts.items():
        if name.endswith(".bias"):
            tensors.setdefault(name, expected)  # of blocks without one
        if name not in tensors:
            raise ConfigError(f"{file} is incomplete: {heads} heads, but nothing for {name}")
        if tensors[name].shape != expected.shape:
            raise ConfigError(
                f"{file} holds heads for another model: {name} is {list(tensors[name].shape)} and "
                f"would be {list(expected.shape)} for this target, whose hidden size is {hidden}"
            )
    size = len(tokens) if tokens is not None else vocabulary
    slack = PADDING if tokens is None else 1
    if any(abs(count - size) >= slack for count in rows):
        raise ConfigError(f"{file} holds heads for {rows[0]} tokens, and the target has {size}")
    if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ConfigError(f"{file} maps to tokens outside the target's vocabulary of {vocabulary}")
    for name, part in parts.items():
        part.copy_(tensors[name])
    choices = config_beside(file).get("medusa_choices")
    if choices is not None:
        found.choices = tuple(checked_tree("medusa_choices", choices, heads))
    return found.to(model.device).eval().requires_grad_(False)


def _of_heads(names: list[str]) -> list[str]:
    """Beside prefixed names lie those of a whole model (Medusa-2); else all must be known."""
    prefixed = [name for name in names if PREFIX.match(name)]
    unknown = [name for name in prefixed or names if _name(name) == ""]
    if unknown:
        raise ConfigError(f"these are no Medusa heads: unknown tensors {', '.join(unknown[:3])}")
    return prefixed or names


def _name(name: str) -> str:
    """Ours for a name in a file; empty if it is none that heads have."""
    name = PREFIX.sub("", name, count=1)
    for pattern, ours in NAMES.items():
        if match := pattern.fullmatch(name):
            return match.expand(ours)
    return ""


def _shorten(tensors: dict[str, Tensor], rows: list[int]) -> None:
    """One matrix of all tokens beside a map: its rows for the draft vocabulary, as vLLM does."""
    tokens = tensors.get("token_map")
    if tokens is not None and len(rows) == 1 and rows[0] > len(tokens):
        tensors["lm_heads.0.weight"] = tensors["lm_heads.0.weight"][tokens]
        rows[0] = len(tokens)


def save_heads(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    vocabulary: int,
    base: str | None = None,
    head: nn.Module | None = None,
) -> None:
    """Published names and a configuration that text-generation-inference and vLLM understand.
    `vocabulary`, `base`: the target's size and name. `head`: the output matrix that the heads share
    with it, for servers that want it in the file (vLLM); it is then read back as the heads' own."""
    tensors = heads.parts()
    is_shared = len(heads.lm_heads) < len(heads)
    for index in range(len(heads.lm_heads)):
        name = "lm_head.weight" if is_shared else f"{index}.{heads.layers}.weight"
        tensors[name] = tensors.pop(f"lm_heads.{index}.weight")
    if head is not None:
        tensors["lm_head.weight"] = plain_state(head)["weight"]
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": base,
        "hidden_size": heads.hidden,
        "vocab_size": vocabulary,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "medusa_fc_bias": True,
        "original_lm_head": is_shared,
    }
    if is_shared:
        config["version"] = "2"
    if heads.tokens is not None:
        config["truncated_vocab_size"] = len(heads.tokens)
    if heads.choices:
        config["medusa_choices"] = [list(path) for path in heads.choices]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / FILE)
    write_config(config, folder)
