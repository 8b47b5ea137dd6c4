"""Models over the weights of a GGUF file as they lie in it: mapped, not read, not widened."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from draftahead.loader.gguf_config import GgufConfig
from draftahead.loader.gguf_header import GgufHeader, GgufTensor
from draftahead.loader.preflight import check_loaded, refuse_misshapen
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
from draftahead.loader.stored import STORED_KINDS, Origin
from draftahead.loader.weight_files import some

log = logging.getLogger(__name__)


class _Placed(NamedTuple):
    """A tensor of the file, and what it becomes."""

    tensor: GgufTensor
    name: str  # in the model
    order: np.ndarray | None  # of its rows, as the model has them; None: widened
    is_stored: bool  # in the rows of a layer; else in float32

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return self.tensor.num_bytes if self.order is not None else 4 * prod(self.tensor.shape)


class GgufWeights:
    """The tensors of a GGUF file, for a model without memory."""

    def __init__(self, path: Path, header: GgufHeader, settings: GgufConfig, model: Any) -> None:
        """Raises NotStorableError for an architecture that transformers reads in another way."""
        if not settings.is_legacy:
            raise NotStorableError(f"transformers converts {settings.architecture} in its own way")
        self._path, self._header, self._model = path, header, model
        self._processor = settings.processor()
        self._names = settings.names(model, self._processor)
        plain = storable(model)
        self._placed = [
            self._place(tensor, self._names[tensor.name], plain)
            for tensor in header.tensors
            if tensor.name in self._names
        ]

    def _place(self, tensor: GgufTensor, name: str, plain: dict[str, Tensor]) -> _Placed:
        is_stored = name in plain and tensor.kind in STORED_KINDS
        may_be_mapped = is_stored or (tensor.kind == "F32" and len(tensor.shape) == 2)
        order = _row_order(self._processor, tensor) if may_be_mapped else None
        return _Placed(tensor, name, order, is_stored and order is not None)

    @property
    def num_bytes(self) -> int:
        """Of memory that the model will take."""
        return sum(place.num_bytes for place in self._placed)

    def load(self, progress: ProgressCallback) -> Any:
        """The model, filled."""
        shapes = shapes_of(self._model)
        stated = {p.name: torch.Size(p.tensor.shape[::-1]) for p in self._placed if p.is_stored}
        refuse_misshapen(self._path, stated, shapes)
        file = MappedFile(self._path)
        parsed: dict[str, Any] = {"tensors": {}}
        stored, tensors, widened = dict[str, Rows](), dict[str, Tensor](), list[str]()
        for index, place in enumerate(self._placed):
            progress(f"loading {self._path.name}", index / len(self._placed))
            if place.order is None:
                tensors |= self._widened(place, file, parsed)
                if len(place.tensor.shape) > 1 and place.tensor.kind != "F32":
                    widened.append(f"{place.tensor.name} ({place.tensor.kind})")
            elif place.is_stored:
                rows = torch.from_numpy(self._rows(place, file))
                is_mapped = rows.data_ptr() == self._bytes(place.tensor, file).ctypes.data
                origin = Origin(self._path, place.tensor.name, is_mapped)
                stored[place.name] = Rows(rows, place.tensor.kind, origin)
            else:
                rows = self._rows(place, file)
                tensors[place.name] = torch.from_numpy(_aligned(rows).view(np.float32))
        tensors |= {name: tensor.float() for name, tensor in parsed["tensors"].items()}
        refuse_misshapen(self._path, {name: t.shape for name, t in tensors.items()}, shapes)
        missing = fill(self._model, tensors, stored)
        found = {"missing_keys": missing, "mismatched_keys": (), "unexpected_keys": ()}
        check_loaded(self._path, self._model, found)
        require_runs(self._model)
        if widened:
            log.warning("%s: widened to float32: %s", self._path.name, some(widened))
        return self._model

    def _bytes(self, tensor: GgufTensor, file: MappedFile) -> Any:
        """uint8 [..., bytes of a row]."""
        start = self._header.data_at + tensor.offset
        outer = tensor.shape[:0:-1]
        return file.bytes[start : start + tensor.num_bytes].reshape(*outer, -1)

    def _rows(self, place: _Placed, file: MappedFile) -> Any:
        rows, order = self._bytes(place.tensor, file), place.order
        if order is None or np.array_equal(order, np.arange(len(order))):
            return rows
        rows = rows[order]  # a copy, and what it was made from is not needed again
        self._release(place.tensor, file)
        return rows

    def _widened(
        self, place: _Placed, file: MappedFile, parsed: dict[str, Any]
    ) -> dict[str, Tensor]:
        """A tensor in float32, as transformers converts it. What becomes a part of another one is
        left in `parsed`."""
        kind = gguf.GGMLQuantizationType[place.tensor.kind]
        result = self._processor.process(
            weights=gguf.dequantize(self._bytes(place.tensor, file), kind),
            name=place.tensor.name,
            tensor_key_mapping=self._names,
            parsed_parameters=parsed,
        )
        self._release(place.tensor, file)
        if result.name not in self._names:
            return {}
        numbers = np.array(result.weights, dtype=np.float32)  # a copy
        return {self._names[result.name]: torch.from_numpy(numbers)}

    def _release(self, tensor: GgufTensor, file: MappedFile) -> None:
        file.release(self._header.data_at + tensor.offset, tensor.num_bytes)


def _row_order(processor: Any, tensor: GgufTensor) -> np.ndarray | None:
    """Which row of the file is which of the model's, if transformers changes nothing but their
    order. Found out with numbered rows."""
    if len(tensor.shape) != 2:
        return None
    count = tensor.shape[1]
    numbered = np.arange(2 * count).reshape(count, 2)
    try:
        result = processor.process(
            weights=numbered,
            name=tensor.name,
            tensor_key_mapping={},
            parsed_parameters={"tensors": {}},
        )
    except Exception:  # it needs the numbers
        return None
    found = np.asarray(result.weights)
    if result.name != tensor.name or found.shape != numbered.shape:
        return None
    order = found[:, 0] // 2
    is_permutation = np.array_equal(np.sort(order), np.arange(count))
    return order if is_permutation and np.array_equal(numbered[order], found) else None


def _aligned(rows: Any) -> Any:
    """Where float32 numbers may lie."""
    return rows if rows.ctypes.data % 4 == 0 else rows.copy()
