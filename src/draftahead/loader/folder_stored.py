"""Models over the bfloat16 and float16 weights of safetensors files as they lie in them: mapped,
not read, not widened."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from draftahead.loader.preflight import may_be_left
from draftahead.loader.progress import ProgressCallback
from draftahead.loader.skeleton import (
    MappedFile,
    NotStorableError,
    Rows,
    fill,
    require_runs,
    shapes_of,
    storable,
)
from draftahead.loader.stored import Origin
from draftahead.loader.weight_files import Held, Place, some

log = logging.getLogger(__name__)

HALVES = ("BF16", "F16")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def has_halves(held: Held) -> bool:
    """Whether there is anything that float32 would widen."""
    return any(place.kind in HALVES for _, place in held.places)


class FolderWeights:
    """The tensors of a folder's files, for a model without memory."""

    def __init__(self, folder: Path, config: Mapping[str, Any], held: Held, model: Any) -> None:
        """Raises NotStorableError if transformers does more than to put tensors in their places."""
        if "auto_map" in config or "quantization_config" in config:
            raise NotStorableError("its configuration asks for code of its own or quantized layers")
        if (folder / "adapter_config.json").is_file():
            raise NotStorableError("it has an adapter")
        self._folder, self._model = folder, model
        self._places, self._shapes = dict(held.places), shapes_of(model)
        if len(self._places) < len(held.places):
            raise NotStorableError("several files hold the same tensors")
        self._require_same_names()
        self._plain = storable(model)

    def _require_same_names(self) -> None:
        """Other names and shapes are explained, or converted, by transformers."""
        if _are_converted(self._model):
            raise NotStorableError("transformers converts its tensors as they are loaded")
        names = {name for name in self._places if not may_be_left(name, self._model)}
        if unknown := sorted(names - self._shapes.keys()):
            raise NotStorableError(f"the model has no {some(unknown)}")
        for name in names:
            place, shape = self._places[name], tuple(self._shapes[name])
            if place.kind not in DTYPES or place.shape != shape:
                raise NotStorableError(f"{name} is {place.kind} {list(place.shape)} in its files")

    @property
    def num_bytes(self) -> int:
        """Of memory that the model will take."""
        stored = {n: place for n, place in self._places.items() if n in self._shapes}
        return sum(
            place.num_bytes if self._is_stored(name) else 4 * self._shapes[name].numel()
            for name, place in stored.items()
        )

    def _is_stored(self, name: str) -> bool:
        return name in self._plain and self._places[name].kind in HALVES

    def load(self, progress: ProgressCallback) -> Any:
        """The model, filled."""
        files = {place.file: MappedFile(place.file) for place in self._places.values()}
        stored, tensors, widened = dict[str, Rows](), dict[str, Tensor](), list[str]()
        for name, place in self._places.items():
            if name not in self._shapes:
                continue
            content = files[place.file].bytes[place.start : place.start + place.num_bytes]
            if self._is_stored(name):
                rows = torch.from_numpy(content.reshape(place.shape[0], -1))
                stored[name] = Rows(rows, place.kind, Origin(place.file.resolve(), name))
                continue
            tensors[name] = _tensor(content, place)
            if place.kind in HALVES:
                files[place.file].release(place.start, place.num_bytes)
                widened += [name] if len(place.shape) > 1 else []
        self._require_ties(stored)
        if missing := fill(self._model, tensors, stored):
            raise NotStorableError(f"its files have no {some(sorted(missing))}")
        require_runs(self._model)
        if widened:
            log.warning("%s: widened to float32: %s", self._folder, some(widened))
        self._model.generation_config = _generation_config(self._folder)
        return self._model

    def _require_ties(self, stored: Mapping[str, Rows]) -> None:
        """Of a tied weight that is stored twice, transformers compares both."""
        by_weight: dict[int, list[Rows]] = {}
        for name, rows in stored.items():
            by_weight.setdefault(id(self._plain[name]), []).append(rows)
        for first, *others in by_weight.values():
            if any(not torch.equal(first.rows, other.rows) for other in others):
                raise NotStorableError("its tied weights are stored twice, and differ")


def _are_converted(model: Any) -> bool:
    """Whether transformers computes tensors of the model from those of the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(one, WeightConverter) for one in found)


def _tensor(content: Any, place: Place) -> Tensor:
    """Numbers as the model computes with them: float32, mapped if they are that in the file."""
    dtype = DTYPES[place.kind]
    if place.num_bytes == 0:
        return torch.empty(place.shape, dtype=dtype)
    aligned = content if content.ctypes.data % dtype.itemsize == 0 else content.copy()
    tensor = torch.from_numpy(aligned).view(dtype).view(place.shape)
    return tensor.float() if tensor.is_floating_point() else tensor.clone()


def _generation_config(folder: Path) -> Any:
    """As from_pretrained loads it."""
    options: dict[str, Any] = {"local_files_only": True}
    if not (folder / "generation_config.json").is_file():
        options |= {"config_file_name": "config.json", "_from_model_config": True}
    return transformers.GenerationConfig.from_pretrained(folder, **options)
