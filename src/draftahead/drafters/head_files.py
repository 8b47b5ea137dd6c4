"""Files of trained heads: found, read without running code, refused clearly, written atomically.

Each drafter's `io.py` has `load(source, model)`, which returns a head for this target, and
`save(head, folder)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from draftahead.backends.cpu.linear import Int8Linear
from draftahead.errors import ConfigError, DraftaheadError, ModelNotFoundError
from draftahead.loader import sources
from draftahead.loader.weight_files import some

CONFIG = "config.json"


# ----------------------------------------------------------------------------------- reading


def find_weights(source: str | Path, names: Sequence[str], extras: Sequence[str] = ()) -> Path:
    """The file of weights in a folder or of a hub id: the first of `names` that exists. `extras`:
    further files to fetch from a hub."""
    path = sources.files_of(source, [CONFIG, *names, *extras])
    if path.is_file():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ModelNotFoundError(f"{source} has none of {', '.join(names)}")


def config_beside(weights: Path) -> dict[str, Any]:
    """The contents of the folder's config.json; empty where there is none."""
    file = weights.parent / CONFIG
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"cannot read {file}: {problem}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return config


def tensors_in(weights: Path, select: Callable[[list[str]], list[str]]) -> dict[str, Tensor]:
    """The tensors of a file on the CPU. `select` maps all names to those wanted."""
    try:
        if weights.suffix == ".safetensors":
            with safe_open(weights, framework="pt") as file:
                return {name: file.get_tensor(name) for name in select(list(file.keys()))}
        tensors = torch.load(weights, map_location="cpu", weights_only=True)
    except (ConfigError, MemoryError):
        raise
    except Exception as problem:  # pickle, torch and safetensors each raise their own
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ModelNotFoundError(
            f"{weights} is damaged or holds more than tensors ({reason}); fetch or train it again"
        ) from problem
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ModelNotFoundError(f"{weights} holds no tensors by name")
    return {name: tensors[name] for name in select(list(tensors))}


def check_tokens(tokens: Tensor, vocab_size: int, name: str) -> None:
    """Refuses a draft vocabulary [D] that is no list of the target's tokens."""
    if tokens.is_floating_point() or tokens.ndim != 1 or not len(tokens):
        raise ConfigError(f"{name} is no list of tokens")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ConfigError(f"{name} points outside the target's vocabulary of {vocab_size}")


@contextmanager
def config_refused_clearly(folder: Path, what: str) -> Iterator[None]:
    """For reading a config.json, whose values may be anything."""
    try:
        yield
    except DraftaheadError:
        raise
    except Exception as problem:
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ConfigError(f"{folder}/config.json describes no {what} ({reason})") from problem


def check_fits(
    targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], file: Path, *, what: str, by: str
) -> None:
    """Refuses tensors of a file that are not those of a head, by name and shape. `what`, `by`: the
    kind of head, and the source of its shapes, for the errors."""
    if missing := sorted(targets.keys() - tensors.keys()):
        raise ConfigError(f"{file} is incomplete: it lacks {some(missing)}")
    if extra := sorted(tensors.keys() - targets.keys()):
        raise ConfigError(f"{file} holds {some(extra)}, which no supported {what} has")
    for name, target in targets.items():
        shapes = list(tensors[name].shape), list(target.shape)
        if shapes[0] != shapes[1]:
            raise ConfigError(f"{file}: {name} is {shapes[0]} and {by} should be {shapes[1]}")


def fill(
    targets: dict[str, Tensor], tensors: dict[str, Tensor], file: Path, *, what: str, by: str
) -> None:
    """Copies tensors of a file into those of a head, which must be the same ones."""
    check_fits(targets, tensors, file, what=what, by=by)
    for name, target in targets.items():
        target.copy_(tensors[name].detach())


# ----------------------------------------------------------------------------------- writing


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Atomic: an existing file is replaced once the new one is complete."""
    part = file.with_suffix(".part")
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, part, metadata={"format": "pt"})
    part.replace(file)


def write_head(folder: Path, name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Weights and configuration; each file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / name)
    part = folder / f"{CONFIG}.part"
    part.write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    part.replace(folder / CONFIG)


def dequantized_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a module, with plain weights in place of quantized ones."""
    state = dict(module.state_dict())
    for name, part in module.named_modules():
        if isinstance(part, Int8Linear):
            prefix = f"{name}." if name else ""
            del state[f"{prefix}scales"]
            state[f"{prefix}weight"] = part.dequantized()
    return state
