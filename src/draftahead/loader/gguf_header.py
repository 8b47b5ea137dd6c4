"""The header of a GGUF file, read with bounds: what it says is compared with the file's size before
the gguf package or transformers count, allocate or map anything by it."""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from draftahead.errors import DamagedModelError

VERSIONS = (2, 3)
# struct's letters of the value types that have a fixed size.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
MAX_ITEMS = 4_000_000  # of an array: readers keep a Python object for each; vocabularies have fewer
MAX_ALIGNMENT = 1 << 20
FEWEST_BYTES = {"keys": 13, "tensors": 24, "strings": 8}  # of one of them, in the file


class GgufTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # the fastest dimension first: [in_features, out_features]
    offset: int  # from the start of the data
    num_bytes: int
    kind: str  # Q4_K, F32, ...


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]  # scalars and text; of an array, its number of items
    tensors: list[GgufTensor]
    data_at: int  # byte of the file where the data start
    entries: dict[str, slice]  # bytes of the file that hold a key with its value


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises DamagedModelError if the file cannot be what its header says."""
    if not path.stat().st_size:
        raise DamagedModelError(f"{path} is empty: download it again")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        try:
            return _Reader(content).header()
        except (_DamageError, UnicodeDecodeError) as damage:
            raise DamagedModelError(
                f"{path} is damaged or no GGUF file: {damage}; download it again"
            ) from None


class _DamageError(ValueError):
    """What is wrong, in words."""


class _Reader:
    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at, self.size = content, 0, len(content)

    def header(self) -> GgufHeader:
        magic, version, num_tensors, num_keys = self._unpack("4sIQQ")
        if magic != b"GGUF":
            raise _DamageError("it does not begin with GGUF")
        if version not in VERSIONS:
            raise _DamageError(f"its version is {version}, and those that can be read are 2 and 3")
        self._require_room("keys", num_keys)
        self._require_room("tensors", num_tensors)
        metadata, entries = dict[str, Any](), dict[str, slice]()
        for _ in range(num_keys):
            start, key = self.at, self._text()
            if key in metadata:
                raise _DamageError(f"it has {key!r} twice")
            metadata[key] = self._value(*self._unpack("I"))
            entries[key] = slice(start, self.at)
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT:
            raise _DamageError(f"its alignment is {alignment!r}")
        data_at = -(-self.at // alignment) * alignment
        _check_places(tensors, alignment, self.size - data_at)
        return GgufHeader(metadata, tensors, data_at, entries)

    def _require_room(self, things: str, count: int) -> None:
        if count > (self.size - self.at) // FEWEST_BYTES[things]:
            raise _DamageError(f"it claims to hold {count} {things} in {self.size} bytes")

    def _unpack(self, letters: str) -> tuple[Any, ...]:
        parts = struct.Struct("<" + letters)
        start = self._take(parts.size)
        return parts.unpack_from(self.content, start)

    def _take(self, count: int) -> int:
        """Where the next `count` bytes begin, which the file must have."""
        start = self.at
        if count > self.size - start:
            raise self._too_short()
        self.at += count
        return start

    def _too_short(self) -> _DamageError:
        return _DamageError(f"it ends within its header, at byte {self.size}")

    def _text(self) -> str:
        (length,) = self._unpack("Q")
        start = self._take(length)
        return self.content[start : self.at].decode()

    def _skip_texts(self, count: int) -> None:
        """As _text, many times and twice as fast: vocabularies have 300,000 of them."""
        content, at, size = self.content, self.at, self.size
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + (length_at(content, at)[0] if start <= size else 0)
            if at > size:
                raise self._too_short()
            str(content[start:at], "utf-8")
        self.at = at

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._unpack(SCALARS[kind])[0]
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            raise _DamageError(f"it holds a value of the unknown type {kind}")
        return self._array()

    def _array(self) -> int:
        kind, count = self._unpack("IQ")
        if count > MAX_ITEMS:
            raise _DamageError(f"it claims an array of {count} items")
        if kind in SCALARS:
            self._take(count * struct.calcsize("<" + SCALARS[kind]))
        elif kind == STRING:
            self._require_room("strings", count)
            self._skip_texts(count)
        else:
            raise _DamageError(f"it holds an array of the unknown type {kind}")
        return int(count)

    def _tensor(self) -> GgufTensor:
        name = self._text()
        (num_dimensions,) = self._unpack("I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise _DamageError(f"tensor {name!r} has {num_dimensions} dimensions")
        *shape, kind, offset = self._unpack(f"{num_dimensions}QIQ")
        try:
            stored = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[stored]
        except (KeyError, ValueError):
            raise _DamageError(f"tensor {name!r} has the unknown type {kind}") from None
        if 0 in shape or shape[0] % block:
            raise _DamageError(f"tensor {name!r} cannot have the shape {shape}")
        num_bytes = prod(shape) // block * block_bytes
        return GgufTensor(name, tuple(shape), offset, num_bytes, stored.name)


def _check_places(tensors: list[GgufTensor], alignment: int, num_bytes: int) -> None:
    """Whether tensors lie within the data, one behind the other, as every writer puts them."""
    end, before = 0, None
    names: set[str] = set()
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset != -(-end // alignment) * alignment:
            wrong = "overlaps" if tensor.offset < end else "does not follow"
            raise _DamageError(f"its tensor {tensor.name!r} {wrong} {before!r}")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
        if end > num_bytes:
            raise _DamageError(f"tensor {tensor.name!r} lies behind the end of the file")
        if tensor.name in names:
            raise _DamageError(f"it has tensor {tensor.name!r} twice")
        names.add(tensor.name)
