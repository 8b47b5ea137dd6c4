"""Tiny models as files, and damaged copies of them: each is a function of a number."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Files = dict[str, bytes]
VOCABULARY = 40
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
QUANTIZED = {  # kinds of GGUF weights
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}


# ------------------------------------------------------------------------------ sound files


def folders(root: Path) -> dict[str, Files]:
    """A model in one file of weights, and one in shards, with a tokenizer of bytes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    found = {}
    for name, size in (("whole", "1GB"), ("sharded", "20KB")):
        model.save_pretrained(root / name, max_shard_size=size)
        _tokenizer().save_pretrained(root / name)
        found[name] = {file.name: file.read_bytes() for file in (root / name).iterdir()}
    return found


def _words() -> list[str]:
    return ["<s>", "</s>", "<unk>", *(chr(ord("a") + i) for i in range(26)), "Ġ", "ab", "abc"]


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(_words())}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_words()[:3])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def gguf_files(root: Path) -> dict[str, bytes]:
    """The same model as GGUF, by kind of weights."""
    found = {}
    for name, kind in QUANTIZED.items():
        path = root / f"{name}.gguf"
        _write_gguf(path, kind)
        found[name] = path.read_bytes()
    return found


def _write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    words = _words() + [f"x{i}" for i in range(VOCABULARY - len(_words()))]
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    for name, shape in _gguf_shapes().items():
        weights = rng.standard_normal(shape).astype(np.float32) * 0.1 + (len(shape) == 1)
        stored = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else kind
        writer.add_tensor(name, gguf.quantize(weights, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (VOCABULARY, hidden),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_q": (hidden, hidden),
        "attn_k": (hidden // 2, hidden),
        "attn_v": (hidden // 2, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


# ---------------------------------------------------------------------------------- damage

EXTREME_INTS = [
    0,
    1,
    2,
    7,
    255,
    2**16,
    10**5,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**60,
    2**63,
    2**64 - 1,
]
EXTREME: list[Any] = [
    *EXTREME_INTS,
    -1,
    -(2**31),
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "x",
    "é" * 5000,
    "\ud800",
    "../../model.safetensors",
    [],
    {},
    [[]],
    [None] * 1000,
    {"": {}},
    ["full_attention"] * 50,
]


def damaged_bytes(rng: random.Random, content: bytes, head: int) -> bytes:
    """With some bytes changed, mostly among the first `head`."""
    data = bytearray(content)
    span = min(len(data), head) if rng.random() < 0.7 else len(data)
    at = rng.randrange(max(1, span))
    match rng.randrange(7):
        case 0:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(span)] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
        case 3:
            del data[at : at + rng.choice([1, 8, 100])]
        case 4:
            count = rng.choice([1, 4, 8, 64])
            data[at : at + count] = rng.choice([b"\0", b"\xff"]) * count
        case 5:
            data[at : at + 8] = struct.pack("<Q", rng.choice(EXTREME_INTS))
        case 6:
            data += rng.randbytes(rng.choice([1, 1000]))
    return bytes(data)


def damaged_gguf(rng: random.Random, content: bytes, fields: list[tuple[int, int]]) -> bytes:
    """With one of its numbers (place, bytes) replaced, or with bytes changed anywhere."""
    if rng.random() < 0.4:
        return damaged_bytes(rng, content, max(at for at, _ in fields))
    at, count = rng.choice(fields)
    value = rng.choice(EXTREME_INTS) if rng.random() < 0.6 else rng.randrange(40)
    number = (value % 2 ** (8 * count)).to_bytes(count, "little")
    return content[:at] + number + content[at + count :]


def gguf_numbers(path: Path) -> list[tuple[int, int]]:
    """Place and size of each count, length, type, offset and value in a GGUF file's header."""
    reader = gguf.GGUFReader(path)
    found = [(8, 8), (16, 8)]
    for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
        at = field.offset
        for part in field.parts:
            if not field.name.startswith("GGUF.") and part.dtype.itemsize in (4, 8):
                found += [(at + i * part.itemsize, part.itemsize) for i in range(part.size)]
            at += part.nbytes
    return found


def damaged_json(rng: random.Random, content: bytes) -> bytes:
    """Another JSON text: values replaced, keys deleted or added; or no JSON at all."""
    if rng.random() < 0.15:
        return damaged_text(rng, content)
    tree = json.loads(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        tree = _changed(rng, tree)
    return json.dumps(tree).encode()


def damaged_text(rng: random.Random, content: bytes) -> bytes:
    deep = 100_000
    made: list[Callable[[], bytes]] = [
        lambda: damaged_bytes(rng, content, len(content)),
        lambda: b"[" * deep + b"]" * deep,
        lambda: b'{"a":' * deep + b"1" + b"}" * deep,
        lambda: b"\xff\xfe" + content,
        lambda: content.decode().encode("utf-16"),
        lambda: b"",
        lambda: b"null",
        lambda: content[: rng.randrange(len(content))],
    ]
    return rng.choice(made)()


def _changed(rng: random.Random, tree: Any) -> Any:
    """A copy with one change, anywhere."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    if isinstance(tree, dict | list):
        walk(tree)
    if not places:
        return copy.deepcopy(rng.choice(EXTREME))
    node, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(["", "x", "auto_map", "quantization_config"])] = copy.deepcopy(
                rng.choice(EXTREME)
            )
        case 2:  # another value of the same file
            other, place = rng.choice(places)
            node[key] = json.loads(json.dumps(other[place]))
        case 3 if isinstance(node[key], int):
            node[key] = node[key] + rng.choice([-1, 1, 2, 1000])
        case _:
            node[key] = copy.deepcopy(rng.choice(EXTREME))
    return tree


def damaged_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Its header as JSON changed, with its length as it should be; or bytes changed."""
    if rng.random() < 0.4:
        return damaged_bytes(rng, content, 2000)
    (length,) = struct.unpack("<Q", content[:8])
    header = damaged_json(rng, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


class Cases:
    """Case `i` of all: a folder or a GGUF file, damaged."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.folders = folders(root)
        self.gguf = gguf_files(root)
        self.numbers = {name: gguf_numbers(root / f"{name}.gguf") for name in self.gguf}

    def write(self, number: int, folder: Path) -> Path:
        """Writes it into an empty folder. Returns what to load."""
        rng = random.Random(number)
        if number % 3 == 0:
            name = rng.choice(list(self.gguf))
            path = folder / "model.gguf"
            path.write_bytes(damaged_gguf(rng, self.gguf[name], self.numbers[name]))
            return path
        files = dict(self.folders[rng.choice(list(self.folders))])
        targets = sorted(files) if rng.random() < 0.4 else ["config.json", "tokenizer.json"]
        name = rng.choice(targets)
        if rng.random() < 0.03:
            del files[name]
        elif name.endswith(".safetensors"):
            files[name] = damaged_safetensors(rng, files[name])
        else:
            damage = damaged_json if name.endswith(".json") else damaged_text
            files[name] = damage(rng, files[name])
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder
