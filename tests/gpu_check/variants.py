"""The launches of the real code for many shapes: forwards of a target, and trees of a head.

Everything between the public entry points and the launch is the project's own code, run on CPU
tensors; see `compiled_launches` for what a launch does here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from cuda_models import SIZES, untrained
from draftahead.backends.base import CacheSlice, DeviceTree
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.backends.cuda.graphs import GraphPool
from draftahead.backends.llama_spec import llama_spec_of
from draftahead.drafters.eagle.cuda import CudaEagleHead, Plan, gpu_kernels
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.eagle.spec import head_spec
from draftahead.kv.cache import KVCache, LayerKVShape
from emulated_gpu import emulated_gpu

CPU = torch.device("cpu")
LARGE = {  # a layer of Llama 3.1 8B
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
ENTRIES = 2048  # KV entries of a slot of the caches here


class Pass(NamedTuple):
    """One forward of a target."""

    texts: int
    nodes: int
    kv_len: int
    tree: str = "chain"  # or "tree", or "on_device": the host knows the roots only
    hidden: tuple[int, ...] = ()  # layers whose hidden states are captured


PASSES = {
    "one node": Pass(1, 1, 60),
    "three trees": Pass(3, 7, 300, "tree", hidden=(1, 2)),
    "on the device": Pass(2, 16, 130, "on_device"),
    "long": Pass(1, 8, 1600),
    "many rows": Pass(2, 64, 1100),
}
LARGE_PASSES = {
    "one node": Pass(1, 1, 60),
    "tree": Pass(1, 32, 700, "tree"),
    "many rows": Pass(2, 64, 1100, "on_device"),
}


class Growth(NamedTuple):
    """One tree of a head: how states are normed, and what is grown."""

    norm: str  # "each", "all" or "none"
    layers: int
    sampled: bool
    every: int  # every so many tokens of the target's vocabulary are the head's
    plan: Plan
    texts: int


GROWTHS = {
    "greedy": Growth("each", 1, False, 2, Plan(5, 3, 4, 16, False), 3),
    "greedy, whole vocabulary": Growth("none", 2, False, 1, Plan(3, 4, 4, 8, False), 1),
    "sampled": Growth("all", 1, True, 2, Plan(4, 3, 4, 16, True), 2),
    "sampled, whole vocabulary": Growth("each", 1, True, 1, Plan(2, 4, 4, 9, True), 1),
    "chain": Growth("each", 1, False, 2, Plan(4, 1, 1, 5, False), 2),
}


def run_at_once(
    graphs: GraphPool, key: Any, body: Any, make: Any, write: Any, clock: Any = None, **_: Any
) -> Any:
    """In place of `Graphs.run`: the body once, where the real one replays a graph."""
    inputs = make()
    write(inputs)
    inputs.fetch()
    return body(inputs)


@contextmanager
def uncaptured() -> Iterator[None]:
    with (
        emulated_gpu(),
        mock.patch.object(GraphPool, "run", run_at_once),
        torch.inference_mode(),
    ):
        yield


@contextmanager
def filled_memory() -> Iterator[None]:
    """New tensors hold NaN in place of what happened to lie there, so that checksums repeat."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def model(kind: str, dtype: torch.dtype, *, is_filled: bool = True, **sizes: int) -> Any:
    """Weights that depend on their names and places alone. Those of a large model are not filled:
    their memory is never touched."""
    if not is_filled:
        with torch.device("meta"):
            return untrained(kind, **sizes).to(dtype).to_empty(device=CPU)
    return filled(untrained(kind, **sizes).to(dtype))


def filled(module: Any) -> Any:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            factor, start = divmod(zlib.crc32(name.encode()) % (126 * 127), 127)
            steps = torch.arange(parameter.numel()) * (1 + factor) + start
            values = (steps % 127 - 63) / 256 + float("norm" in name)  # exact in half precision
            parameter.copy_(values.view(parameter.shape))
    return module


def decoder(target: Any, dtype: torch.dtype) -> CudaDecoder:
    c = target.config
    shapes = [LayerKVShape(c.num_key_value_heads, c.head_dim, c.num_key_value_heads, c.head_dim)]
    cache = KVCache(shapes * c.num_hidden_layers, 4, ENTRIES, dtype, CPU)
    window = getattr(c, "sliding_window", None)
    calls = {i: {"sliding_window": window} for i in range(c.num_hidden_layers)}
    return CudaDecoder(llama_spec_of(target, cache, calls), cache)


def forward(made: CudaDecoder, spec: Pass) -> None:
    if spec.hidden:
        made.cache.capture_hidden(len(spec.hidden) * made.shape.hidden_size)
        made.capture_hidden(spec.hidden)
    texts, nodes = spec.texts, spec.nodes
    tokens = (torch.arange(texts * nodes) % 97).view(texts, nodes)
    place = CacheSlice(1, spec.kv_len, ENTRIES - 1, 1)
    lengths = [spec.kv_len - nodes - text for text in range(texts)]
    parents: Any = None
    if spec.tree == "tree":
        parents = [[-1, *(node // 2 for node in range(nodes - 1))] for _ in range(texts)]
    if spec.tree == "on_device":
        trees = torch.arange(texts * 3 * nodes).view(texts, 3, nodes) % 7
        parents = DeviceTree([5] * texts, trees)
    made.forward(tokens, lengths, parents, cache_slice=place)


def head(target: Any, dtype: torch.dtype, spec: Growth) -> tuple[EagleHead, CudaEagleHead]:
    vocabulary = target.config.vocab_size
    draft_tokens = torch.arange(0, vocabulary, spec.every)
    if target.config.hidden_size == SIZES["hidden_size"]:
        made = _normed(
            new_head(target, draft_tokens, depths=(1, 2, 2), layers=spec.layers), spec, draft_tokens
        )
        made = filled(made.to(dtype))
    else:
        with torch.device("meta"):
            made = new_head(target.to("meta"), draft_tokens.to("meta"), depths=(1, 1, 1))
        made = made.to(dtype).to_empty(device=CPU)
    c = made.config.layer
    shapes = [LayerKVShape(c.num_key_value_heads, c.head_dim, c.num_key_value_heads, c.head_dim)]
    cache = KVCache(shapes * spec.layers, 4, ENTRIES, dtype, CPU)
    turns = made.rotary(made.norm.weight[None], torch.arange(ENTRIES)[None])
    turns = [turn[0].contiguous() for turn in turns]
    embed = target.get_input_embeddings().to_empty(device=CPU) if _is_meta(target) else None
    embed = target.get_input_embeddings() if embed is None else embed
    found = gpu_kernels(made, head_spec(made), cache, embed, turns, spec.every == 1)
    assert found is not None
    return made, found


def _is_meta(module: Any) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _normed(made: EagleHead, spec: Growth, draft_tokens: torch.Tensor) -> EagleHead:
    c = made.config
    if spec.norm != "each":
        c.norm_each, c.norm_before_fuse = False, spec.norm == "all"
        c.norm_before_residual, c.norm_output = False, True
        made = EagleHead(c)
        made.tokens.copy_(draft_tokens)
    return made


def grow(made: EagleHead, kernels: CudaEagleHead, spec: Growth) -> None:
    texts = spec.texts
    pairs = [[(3 * text + i) % 50 for i in range(1 + 5 * text)] for text in range(texts)]
    held = [40 + 100 * text for text in range(texts)]
    slots = [[h + i for i in range(len(row))] for h, row in zip(held, pairs, strict=True)]
    hidden = made.config.target_hidden
    states = torch.zeros(4, 1, ENTRIES, 3 * hidden, dtype=kernels.layers.dtype)
    noise = [[7 + text * i for i in range(spec.plan.deepest)] for text in range(texts)]
    kernels.grow(
        pairs,
        held,
        slots,
        states,
        (0, 1, 2),
        spec.plan,
        clock=Untimed(),
        keys=noise if spec.sampled else (),
        warmth=[0.5 + text for text in range(texts)] if spec.sampled else (),
    )


class Untimed:
    def mark(self) -> None: ...

    def laps(self) -> list[float]:
        return [0.0, 0.0]


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Variant = tuple[str, bool, Callable[[], None]]  # name, whether its weights are filled, what runs


def variants() -> Iterator[Variant]:
    for kind in ("llama", "qwen2", "qwen3", "mistral"):
        for name, dtype in DTYPES.items():
            if kind == "mistral" and name == "float16":
                continue
            made = model(kind, dtype, num_hidden_layers=2)
            for what, spec in PASSES.items():
                yield (
                    f"{kind} {name}, {what}",
                    True,
                    lambda made=made, dtype=dtype, spec=spec: forward(decoder(made, dtype), spec),
                )
    for name, dtype in DTYPES.items():
        made = model("llama", dtype, num_hidden_layers=2)
        for what, spec in GROWTHS.items():
            yield (
                f"head {name}, {what}",
                True,
                lambda made=made, dtype=dtype, spec=spec: grow(*head(made, dtype, spec), spec),
            )
    yield from large_variants()


def large_variants() -> Iterator[Variant]:
    """Of real sizes, where tiles are large and shared memory is scarce."""
    dtype = torch.bfloat16
    make = partial(model, "llama", dtype, is_filled=False, **LARGE)
    made = make()
    for what, spec in LARGE_PASSES.items():
        yield (
            f"large llama, {what}",
            False,
            lambda spec=spec: forward(decoder(made, dtype), spec),
        )
    for sampled in (False, True):
        growth = Growth("each", 1, sampled, 4, Plan(4, 4, 4, 16, sampled), 2)
        yield (
            f"large head, {'sampled' if sampled else 'greedy'}",
            False,
            lambda growth=growth: grow(
                *head(model("llama", dtype, is_filled=False, **LARGE), dtype, growth), growth
            ),
        )
