"""Models of transformers that are built without memory for their weights, and filled afterwards
with tensors and with rows as a file stores them."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from draftahead.loader.stored import Origin, StoredEmbedding, StoredLinear, stored_layers


class NotStorableError(Exception):
    """Why a model cannot keep its weights as a file stores them: it is widened instead."""


class Rows(NamedTuple):
    """A matrix as it is stored."""

    rows: Tensor  # uint8 [rows, row_bytes]
    kind: str
    origin: Origin


class MappedFile:
    """A file in memory, page by page as it is read. Writes would go to copies of the pages, never
    to the file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes: Any = np.frombuffer(self._map, np.uint8)

    def release(self, start: int, count: int) -> None:
        """Pages within these bytes are no longer needed: the system may have them back."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (start + count) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0 and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, first, size)


def without_memory(config: Any, trust_remote_code: bool = False) -> Any:
    """The model that transformers builds from a configuration, on the meta device."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # the dtype is written into it
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
        )


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Of all parameters, by all of their names, and of the buffers that files hold."""
    found = {name: p.shape for p, places in _places(model) for _, _, name in places}
    return found | {name: buffer.shape for name, buffer in _held_buffers(model)}


def _held_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, buffer


def storable(model: nn.Module) -> dict[str, Tensor]:
    """The weights that stored rows can replace, by all of their names: those of plain linear layers
    and embeddings alone."""
    return {
        name: parameter
        for parameter, places in _places(model)
        if all(_is_plain(module) and leaf == "weight" for module, leaf, _ in places)
        for _, _, name in places
    }


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse
    return type(module) is nn.Linear


Place = tuple[nn.Module, str, str]  # module, name of the parameter in it, its name in the model


def _places(model: nn.Module) -> list[tuple[Tensor, list[Place]]]:
    """Each parameter with all its places: tied ones have several."""
    found: dict[int, tuple[Tensor, list[Place]]] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{path}.{leaf}" if path else leaf
                found.setdefault(id(parameter), (parameter, []))[1].append((module, leaf, name))
    return list(found.values())


# --------------------------------------------------------------------------------------- filling


def fill(model: Any, tensors: Mapping[str, Tensor], stored: Mapping[str, Rows]) -> list[str]:
    """Puts float32 tensors and stored rows in the places of a model without memory, by the names of
    its parameters and buffers; computes the buffers that no file holds. Returns the names of those
    that are missing."""
    _compute_buffers(model)
    missing: list[str] = []
    replaced: dict[int, nn.Module] = {}
    kept: list[tuple[nn.Module, Rows]] = []
    for _, places in _places(model):
        names = [name for _, _, name in places]
        given = next((name for name in names if name in stored or name in tensors), None)
        if given is None:
            missing.append(names[0])
        elif given in stored:
            kept += [(module, stored[given]) for module, _, _ in places]
        else:
            parameter = nn.Parameter(tensors[given], requires_grad=False)
            for module, leaf, _ in places:
                module._parameters[leaf] = parameter
    for module, rows in kept:
        replaced[id(module)] = _stored_layer(module, rows)
    for parent in list(model.modules()):
        for leaf, child in parent._modules.items():
            parent._modules[leaf] = replaced.get(id(child), child)
    return missing + _fill_buffers(model, tensors)


def _stored_layer(module: Any, stored: Rows) -> nn.Module:
    rows, kind, origin = stored
    if type(module) is nn.Embedding:
        size, padding = module.embedding_dim, module.padding_idx
        return StoredEmbedding(rows, kind, size, padding_idx=padding, origin=origin)
    return StoredLinear(rows, kind, module.in_features, bias=module.bias, origin=origin)


def _fill_buffers(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    missing = []
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            name = f"{path}.{leaf}" if path else leaf
            if name in tensors:
                module._buffers[leaf] = tensors[name].to(buffer.dtype)
            else:
                missing.append(name)
    return missing


def _compute_buffers(model: Any) -> None:
    """Rotary frequencies and the like, by the model's own initialization of each module, which
    transformers runs too where it has built a model without memory."""
    for module, owner in _with_owners(model, model):
        names = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        ]
        if not names:
            continue
        computed = [_initialized(module, owner, names, start) for start in (0, 1)]
        for name, first, second in zip(names, *computed, strict=True):
            if not torch.equal(first, second):  # it is what we started from
                raise NotStorableError(f"{type(module).__name__} does not compute its {name} again")
    for module in model.modules():
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            raise NotStorableError(f"{type(module).__name__} keeps a tensor that is no buffer")


def _with_owners(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Modules, each with the innermost model of transformers that it belongs to."""
    if isinstance(module, transformers.PreTrainedModel):
        owner = module
    yield module, owner
    for child in module.children():
        yield from _with_owners(child, owner)


@torch.no_grad()
def _initialized(module: nn.Module, owner: Any, names: list[str], start: int) -> list[Tensor]:
    for name in names:
        module._buffers[name] = torch.full_like(module._buffers[name], start, device="cpu")
    owner._init_weights(module)  # parameters have no memory yet: nothing happens to them
    return [module._buffers[name].clone() for name in names]


# ---------------------------------------------------------------------------------------- a trial


@contextmanager
def without_products(model: nn.Module) -> Iterator[None]:
    """While entered, stored linear layers return zeros: for forwards of which only shapes count."""
    layers = [layer for layer in stored_layers(model) if isinstance(layer, StoredLinear)]
    for layer in layers:
        vars(layer)["forward"] = layer.zeros
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def require_runs(model: Any) -> None:
    """Raises NotStorableError if the model's code needs float weights of its layers."""
    problem: Exception | None = None
    with without_products(model), torch.no_grad():
        try:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
        except Exception as found:
            problem = found
    if problem is not None:
        raise NotStorableError(f"{type(model).__name__} does not run with them: {problem}")
