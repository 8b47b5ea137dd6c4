"""Files of trained heads: found, read without running code, refused clearly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from draftahead.backends.cpu.linear import Int8Linear
from draftahead.errors import ConfigError, ModelNotFoundError
from draftahead.loader import hub

CONFIG = "config.json"


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """At once or not at all: what was there before is good until then."""
    part = file.with_suffix(".part")
    kept = {name: held.detach().cpu().contiguous().clone() for name, held in tensors.items()}
    save_file(kept, part, metadata={"format": "pt"})
    part.replace(file)


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Likewise."""
    part = folder / f"{CONFIG}.part"
    part.write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    part.replace(folder / CONFIG)


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module by name, as files hold them: what was rounded is a matrix again."""
    found = dict(module.state_dict())
    for name, part in module.named_modules():
        if isinstance(part, Int8Linear):
            within = f"{name}." if name else ""
            del found[f"{within}scales"]
            found[f"{within}weight"] = part.dequantized()
    return found


def located(source: str | Path, names: Sequence[str], beside: Sequence[str] = ()) -> Path:
    """The weights that a file, a folder or a hub id stands for: the first of `names` there. From a
    hub come those `beside` them as well."""
    found = hub.files_of(source, [CONFIG, *names, *beside])
    if found.is_file():
        return found
    for name in names:
        if (found / name).is_file():
            return found / name
    raise ModelNotFoundError(f"{source} has none of {', '.join(names)}")


def config_beside(weights: Path) -> dict[str, Any]:
    """What the folder's config.json says; nothing where there is none."""
    file = weights.parent / CONFIG
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read {file}: {problem}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return config


def tensors_in(weights: Path, wanted: Callable[[list[str]], list[str]]) -> dict[str, Tensor]:
    """Of all the names in a file those that are `wanted`, on the CPU."""
    try:
        if weights.suffix == ".safetensors":
            with safe_open(weights, framework="pt") as file:
                return {name: file.get_tensor(name) for name in wanted(list(file.keys()))}
        held = torch.load(weights, map_location="cpu", weights_only=True)
    except (ConfigError, MemoryError):
        raise
    except Exception as problem:  # of any kind: pickle, torch and safetensors have their own
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ModelNotFoundError(
            f"{weights} is damaged or holds more than tensors ({reason}); fetch or train it again"
        ) from problem
    if not isinstance(held, dict) or not all(isinstance(v, Tensor) for v in held.values()):
        raise ModelNotFoundError(f"{weights} holds no tensors by name")
    return {name: held[name] for name in wanted(list(held))}
