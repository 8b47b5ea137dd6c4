"""Tiny GGUF models of each shape and kind of weights, with random valid blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from draftahead.loader.stored import STORED_KINDS

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 40, 256, 512, 2, 4, 2
EXPERTS, EXPERT_INNER = 4, 768  # transformers does not read the latter from a file
EXPERT_SHAPES = {
    "gate": (EXPERT_INNER, HIDDEN),
    "up": (EXPERT_INNER, HIDDEN),
    "down": (HIDDEN, EXPERT_INNER),
}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def random_rows(kind: str, count: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Bytes of valid blocks, [count, bytes of a row], with scales that give moderate weights."""
    rng = np.random.default_rng(seed)
    if kind in ("BF16", "F16"):
        numbers = rng.standard_normal((count, blocks)).astype(np.float32)
        found = gguf.quantize(numbers * 0.06, GGMLQuantizationType[kind])
        return np.ascontiguousarray(found).view(np.uint8)
    data = rng.integers(0, 256, (count, blocks, STORED_KINDS[kind][1]), dtype=np.uint8)
    size = 1e-4 if kind.endswith("K") else 1e-3 if kind == "Q8_0" else 1e-2
    for at in HALVES.get(kind, (0,)):
        scales = (rng.standard_normal((count, blocks, 1)) * size).astype(np.float16)
        data[..., at : at + 2] = scales.view(np.uint8)
    return data.reshape(count, -1)


def shapes(architecture: str, *, tied: bool) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    layer: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
    }
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (HIDDEN,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if architecture == "gemma2":
        norms = {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        layer |= norms
    if architecture == "qwen3moe":
        layer |= {
            "attn_q_norm.weight": (HIDDEN // HEADS,),
            "attn_k_norm.weight": (HIDDEN // HEADS,),
        }
        for name, shape in EXPERT_SHAPES.items():
            del layer[f"ffn_{name}.weight"]
            layer[f"ffn_{name}_exps.weight"] = (EXPERTS, *shape)
        layer["ffn_gate_inp.weight"] = (EXPERTS, HIDDEN)
    found = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    found |= {} if tied else {"output.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def write(
    path: Path,
    kind: str | Callable[[str], str] = "Q4_K",
    architecture: str = "llama",
    *,
    tied: bool = False,
    keys: Mapping[str, int] | None = None,
) -> Path:
    """`kind`: of the matrices, or a function of a tensor's name. `keys`: further metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (keys or {}).items():
        writer.add_uint32(key, value)
    _write_tokenizer(writer)
    rng = np.random.default_rng(0)
    for index, (name, shape) in enumerate(shapes(architecture, tied=tied).items()):
        stored = "F32" if len(shape) == 1 else kind(name) if callable(kind) else kind
        if stored in STORED_KINDS:
            count, blocks = prod(shape[:-1]), shape[-1] // STORED_KINDS[stored][0]
            rows = random_rows(stored, count, blocks, index).reshape(*shape[:-1], -1)
            writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[stored])
            continue
        numbers = rng.standard_normal(shape).astype(np.float32) * 0.06
        numbers += len(shape) == 1 and name.endswith("norm.weight")
        given = GGMLQuantizationType[stored]
        writer.add_tensor(name, gguf.quantize(numbers, given), raw_dtype=given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    words = ["<s>", "</s>", "<unk>", *(chr(ord("a") + i) for i in range(26)), "Ġ", "ab", "abc"]
    words += [f"x{i}" for i in range(VOCABULARY - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
