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
from draftahead.drafters.eagle.cuda_head import CudaEagleHead, TreePlan
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.eagle.spec import head_spec, input_projection
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


class ForwardSpec(NamedTuple):
    """One forward of a target."""

    batch: int
    num_nodes: int  # of each sequence
    kv_len: int
    tree: str = "chain"  # or "tree", or "device": the host knows the roots only
    hidden: tuple[int, ...] = ()  # layers whose hidden states are stored


FORWARDS = {
    "one node": ForwardSpec(1, 1, 60),
    "three trees": ForwardSpec(3, 7, 300, "tree", hidden=(1, 2)),
    "device draft": ForwardSpec(2, 16, 130, "device"),
    "long": ForwardSpec(1, 8, 1600),
    "many nodes": ForwardSpec(2, 64, 1100),
}
LARGE_FORWARDS = {
    "one node": ForwardSpec(1, 1, 60),
    "tree": ForwardSpec(1, 32, 700, "tree"),
    "many nodes": ForwardSpec(2, 64, 1100, "device"),
}


class TreeSpec(NamedTuple):
    """One launch of a head: how hidden states are normed, and the trees that are built."""

    norm: str  # "each", "all" or "none"
    layers: int
    sampled: bool
    vocab_step: int  # every so many tokens of the target's vocabulary are the head's
    plan: TreePlan
    batch: int


TREES = {
    "greedy": TreeSpec("each", 1, False, 2, TreePlan(5, 3, 4, 16, False), 3),
    "greedy, full vocabulary": TreeSpec("none", 2, False, 1, TreePlan(3, 4, 4, 8, False), 1),
    "sampled": TreeSpec("all", 1, True, 2, TreePlan(4, 3, 4, 16, True), 2),
    "sampled, full vocabulary": TreeSpec("each", 1, True, 1, TreePlan(2, 4, 4, 9, True), 1),
    "chain": TreeSpec("each", 1, False, 2, TreePlan(4, 1, 1, 5, False), 2),
}


def run_at_once(
    graphs: GraphPool, key: Any, body: Any, make: Any, write: Any, timer: Any = None, **_: Any
) -> Any:
    """In place of `GraphPool.run`: the body once, where the real one replays a graph."""
    inputs = make()
    write(inputs)
    inputs.copy_to_device()
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


def forward(made: CudaDecoder, spec: ForwardSpec) -> None:
    if spec.hidden:
        made.cache.allocate_hidden(len(spec.hidden) * made.spec.hidden_size)
        made.set_aux_layers(spec.hidden)
    batch, num_nodes = spec.batch, spec.num_nodes
    tokens = (torch.arange(batch * num_nodes) % 97).view(batch, num_nodes)
    cache_slice = CacheSlice(1, spec.kv_len, ENTRIES - 1, 1)
    num_cached = [spec.kv_len - num_nodes - b for b in range(batch)]
    parents: Any = None
    if spec.tree == "tree":
        parents = [[-1, *(node // 2 for node in range(num_nodes - 1))] for _ in range(batch)]
    if spec.tree == "device":
        trees = torch.arange(batch * 3 * num_nodes).view(batch, 3, num_nodes) % 7
        parents = DeviceTree([5] * batch, trees)
    made.forward(tokens, num_cached, parents, cache_slice=cache_slice)


def head(target: Any, dtype: torch.dtype, spec: TreeSpec) -> tuple[EagleHead, CudaEagleHead]:
    draft_tokens = torch.arange(0, target.config.vocab_size, spec.vocab_step)
    if target.config.hidden_size == SIZES["hidden_size"]:
        made = new_head(target, draft_tokens, aux_layers=(1, 2, 2), num_layers=spec.layers)
        made = filled(_normed(made, spec, draft_tokens).to(dtype))
    else:
        with torch.device("meta"):
            made = new_head(target.to("meta"), draft_tokens.to("meta"), aux_layers=(1, 1, 1))
        made = made.to(dtype).to_empty(device=CPU)
    c = made.config.layer
    shapes = [LayerKVShape(c.num_key_value_heads, c.head_dim, c.num_key_value_heads, c.head_dim)]
    cache = KVCache(shapes * spec.layers, 4, ENTRIES, dtype, CPU)
    cos, sin = made.rotary(made.norm.weight[None], torch.arange(ENTRIES)[None])
    cos_sin = cos[0].contiguous(), sin[0].contiguous()
    embed = target.get_input_embeddings()
    if embed.weight.is_meta:
        embed = embed.to_empty(device=CPU)
    projection = input_projection(made, embed, None if spec.vocab_step == 1 else draft_tokens)
    assert projection is not None
    return made, CudaEagleHead(head_spec(made), cache, projection, cos_sin)


def _normed(made: EagleHead, spec: TreeSpec, draft_tokens: torch.Tensor) -> EagleHead:
    c = made.config
    if spec.norm != "each":
        c.fc_norm, c.norm_before_fc = False, spec.norm == "all"
        c.norm_before_residual, c.norm_output = False, True
        made = EagleHead(c)
        made.draft_to_target.copy_(draft_tokens)
    return made


def build_trees(made: EagleHead, kernels: CudaEagleHead, spec: TreeSpec) -> None:
    batch = range(spec.batch)
    tokens = [[(3 * b + i) % 50 for i in range(1 + 5 * b)] for b in batch]
    num_cached = [40 + 100 * b for b in batch]
    entries = [[num_cached[b] + i for i in range(len(tokens[b]))] for b in batch]
    hidden_size = made.config.target_hidden_size
    hidden_states = torch.zeros(4, 1, ENTRIES, 3 * hidden_size, dtype=kernels.layers.dtype)
    rng_keys = [[7 + b * i for i in range(spec.plan.max_depth)] for b in batch]
    kernels.build_trees(
        tokens,
        num_cached,
        entries,
        hidden_states,
        (0, 1, 2),
        spec.plan,
        timer=Untimed(),
        rng_keys=rng_keys if spec.sampled else (),
        temperatures=[0.5 + b for b in batch] if spec.sampled else (),
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
            for what, spec in FORWARDS.items():
                yield (
                    f"{kind} {name}, {what}",
                    True,
                    lambda made=made, dtype=dtype, spec=spec: forward(decoder(made, dtype), spec),
                )
    for name, dtype in DTYPES.items():
        made = model("llama", dtype, num_hidden_layers=2)
        for what, spec in TREES.items():
            yield (
                f"head {name}, {what}",
                True,
                lambda made=made, dtype=dtype, spec=spec: build_trees(
                    *head(made, dtype, spec), spec
                ),
            )
    yield from large_variants()


def large_variants() -> Iterator[Variant]:
    """Of real sizes, where tiles are large and shared memory is scarce."""
    dtype = torch.bfloat16
    make = partial(model, "llama", dtype, is_filled=False, **LARGE)
    made = make()
    for what, spec in LARGE_FORWARDS.items():
        yield (
            f"large llama, {what}",
            False,
            lambda spec=spec: forward(decoder(made, dtype), spec),
        )
    for sampled in (False, True):
        spec = TreeSpec("each", 1, sampled, 4, TreePlan(4, 4, 4, 16, sampled), 2)
        yield (
            f"large head, {'sampled' if sampled else 'greedy'}",
            False,
            lambda spec=spec: build_trees(*head(make(), dtype, spec), spec),
        )
