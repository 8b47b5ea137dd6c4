"""What the weight files of a model hold, by their headers alone, which are compared with the files'
sizes; and JSON files, read with bounds."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from draftahead.errors import DamagedModelError, ModelNotFoundError
from draftahead.loader.gguf_header import GgufHeader, read_gguf_header

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes: as the safetensors library
MAX_JSON = 50_000_000  # bytes of a configuration or an index
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
T = TypeVar("T")


class Place(NamedTuple):
    """Where a tensor of a safetensors file lies."""

    file: Path
    kind: str  # BF16, F32, ...
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    num_bytes: int


@dataclass
class Held:
    """What a model's weight files hold."""

    num_bytes: int = 0
    num_weights: int = 0
    largest_dimension: int = 0
    names: set[str] = field(default_factory=set)
    places: list[tuple[str, Place]] = field(default_factory=list)  # of safetensors files

    def add(self, name: str, shape: tuple[int, ...], num_bytes: int) -> None:
        self.names.add(name)
        self.num_bytes += num_bytes
        self.num_weights += prod(shape)
        self.largest_dimension = max(self.largest_dimension, *shape, 0)


# ---------------------------------------------------------------------------------------- JSON


def read_json(file: Path, kind: type[T]) -> T:
    """The contents of a JSON file, which must be an object or a list of items."""
    content = _read(file)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else problem
        raise DamagedModelError(f"{file} is no JSON: {reason}; download it again") from None
    if not isinstance(found, kind):
        raise DamagedModelError(
            f"{file} must hold a JSON {'object' if kind is dict else 'list'}, and holds "
            f"{type(found).__name__}"
        )
    return found


def _read(file: Path) -> str:
    if file.stat().st_size > MAX_JSON:
        raise DamagedModelError(f"{file} is too large for a configuration")
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as problem:
        raise DamagedModelError(
            f"{file} is not UTF-8 (at byte {problem.start}): download it again"
        ) from None


# ----------------------------------------------------------------------------------- safetensors


def weight_names(config: dict[str, Any]) -> list[str]:
    """The names under which transformers looks for weights: the first that is there is loaded."""
    stated = config.get("transformers_weights")
    if stated is None:
        return [WEIGHTS, INDEX]
    return [_file_name(stated, "config.json", (".safetensors", ".safetensors.index.json"))]


def weights_in(folder: Path, config: dict[str, Any]) -> Held:
    """What the files hold that transformers will load."""
    names = weight_names(config)
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise ModelNotFoundError(f"{folder} has no weights: it has no {' and no '.join(names)}")
    held = Held()
    for shard in _shards_in(file) if file.suffix == ".json" else [file]:
        _add_safetensors(held, shard)
    return held


def _file_name(stated: Any, where: str, suffixes: tuple[str, ...]) -> str:
    """The name of a file that another one states, which must lie beside it."""
    is_name = isinstance(stated, str) and Path(stated).name == stated
    if not is_name or not stated.endswith(suffixes):
        raise DamagedModelError(f"{where} names {stated!r}, which is no safetensors file beside it")
    return str(stated)


def shards_of(index: Path) -> list[str]:
    """The names of the files that an index names, which lie beside it."""
    places = read_json(index, dict).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise DamagedModelError(f"{index} names no files: it has no weight_map")
    names = [_file_name(stated, str(index), (".safetensors",)) for stated in places.values()]
    return list(dict.fromkeys(names))


def _shards_in(index: Path) -> list[Path]:
    names = shards_of(index)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise DamagedModelError(
            f"{index.parent} is incomplete: {some(missing)} of its {len(names)} files are missing; "
            "download them again"
        )
    return [index.parent / name for name in names]


def some(names: list[str]) -> str:
    """The first few names, and how many there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _add_safetensors(held: Held, file: Path) -> None:
    try:
        _read_safetensors(held, file)
    except _DamageError as damage:
        raise DamagedModelError(
            f"the weights of {file} are damaged: {damage}; download them again"
        ) from None


class _DamageError(ValueError):
    """What is wrong, in words."""


def _read_safetensors(held: Held, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise _DamageError(f"the file has {size} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER, size - 8):
            raise _DamageError(f"its header claims {length} bytes, and the file has {size}")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _DamageError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise _DamageError("its header is no JSON object")
    header.pop("__metadata__", None)
    spans = [(*_add_tensor(held, name, stated), name) for name, stated in header.items()]
    data = 8 + length
    held.places += [
        (name, Place(file, stated["dtype"], tuple(stated["shape"]), data + first, last - first))
        for (first, last, name), stated in zip(spans, header.values(), strict=True)
    ]
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            wrong = "overlaps another" if first < end else "does not follow the one before"
            raise _DamageError(f"tensor {name!r} {wrong}")
        end = last
    if end != size - 8 - length:
        raise _DamageError(f"its tensors have {end} bytes, and {size - 8 - length} are in the file")


def _add_tensor(held: Held, name: str, stated: Any) -> tuple[int, int]:
    """From where to where in the data a tensor lies."""
    try:
        shape, (begin, end), bits = stated["shape"], stated["data_offsets"], BITS[stated["dtype"]]
    except (TypeError, KeyError, ValueError):
        raise _DamageError(f"tensor {name!r} is of an unknown kind") from None
    numbers = [begin, end, *shape] if isinstance(shape, list) else [None]
    is_number = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    if not is_number or len(numbers) > 64:
        raise _DamageError(f"tensor {name!r} has no valid shape or place")
    if prod(shape) * bits != (end - begin) * 8:
        raise _DamageError(f"tensor {name!r} of shape {shape} does not fit its place")
    held.add(name, tuple(shape), end - begin)
    return begin, end


# -------------------------------------------------------------------------------------- GGUF


def weights_in_gguf(file: Path) -> tuple[Held, GgufHeader]:
    """What a GGUF file holds, and its header."""
    header, held = read_gguf_header(file), Held()
    for tensor in header.tensors:
        held.add(tensor.name, tensor.shape, tensor.num_bytes)
    return held, header
