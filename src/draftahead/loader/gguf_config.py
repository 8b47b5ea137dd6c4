"""The configuration of a GGUF file, and names of its tensors, as transformers gives them.

transformers reads files by a class that makes several objects for each entry of the vocabulary: six
seconds for 150,000 tokens, every time. So it is given a small file that says the same about the
model, without vocabulary and weights."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from transformers import modeling_gguf_pytorch_utils as legacy
from transformers.integrations import gguf as newer

from draftahead.loader.gguf_header import GgufHeader

LARGE = 10_000  # bytes of a value from which it is the vocabulary's, which no configuration needs
UINT32, FLOAT32 = 4, 0  # as GGUF files state a value's and a tensor's type
SIZE_OF_VOCABULARY, TOKENS = "vocab_size", "tokenizer.ggml.tokens"


class GgufConfig:
    """What transformers makes of a file's metadata."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.architecture = str(header.metadata.get("general.architecture"))
        # Architectures of transformers' newer code, which is quick and wants all of the file.
        self.is_legacy = self.architecture not in getattr(newer, "GGUF_CONFIG_ARCHS", ())
        self.parsed: dict[str, Any] = {}
        if self.is_legacy:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                small = Path(folder) / "model.gguf"
                small.write_bytes(_without_vocabulary(path, header, self.architecture))
                self.parsed = legacy.load_gguf_checkpoint(str(small))["config"]
                if SIZE_OF_VOCABULARY in self.parsed:
                    self.config = _config_of(small)
                    return
            self.parsed = legacy.load_gguf_checkpoint(str(path))["config"]  # it counts the tokens
        self.config = _config_of(path)

    def processor(self) -> Any:
        """What transformers does to the numbers of each tensor."""
        kind = legacy.TENSOR_PROCESSORS.get(self.architecture, legacy.TensorProcessor)
        return kind(config=self.parsed)

    @staticmethod
    def names(model: Any, processor: Any) -> dict[str, str]:
        """The name in the model of each tensor of the file."""
        # Names of submodules are only asked for where those of the model are not enough: each asks
        # for all of them again.
        state = model.state_dict()
        top = SimpleNamespace(
            config=model.config, state_dict=lambda: state, named_children=lambda: ()
        )
        found = legacy.get_gguf_hf_weights_map(top, processor)
        if set(state) <= set(found.values()):
            return dict(found)
        return dict(legacy.get_gguf_hf_weights_map(model, processor))


def _config_of(path: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )


def _without_vocabulary(path: Path, header: GgufHeader, architecture: str) -> bytes:
    """A GGUF file with the same keys but large ones, and with the same names of tensors."""
    with path.open("rb") as file:
        keys = [
            _read(file, place)
            for place in header.entries.values()
            if place.stop - place.start < LARGE
        ]
    size = f"{architecture}.{SIZE_OF_VOCABULARY}"
    num_tokens = header.metadata.get(TOKENS)
    if size not in header.metadata and isinstance(num_tokens, int):
        keys.append(_text(size) + struct.pack("<II", UINT32, num_tokens))
    alignment = header.metadata.get("general.alignment", 32)
    tensors = [
        _text(tensor.name) + struct.pack("<IQIQ", 1, 1, FLOAT32, i * -(-4 // alignment) * alignment)
        for i, tensor in enumerate(header.tensors)
    ]
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    whole = b"".join([start, *keys, *tensors])
    padding = -len(whole) % alignment + len(tensors) * -(-4 // alignment) * alignment
    return whole + bytes(padding)


def _read(file: Any, place: slice) -> bytes:
    file.seek(place.start)
    return bytes(file.read(place.stop - place.start))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
