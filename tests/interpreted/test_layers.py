"""Kernels of a forward: backends/cuda/kernels.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.cuda.layers import Block, CudaLayers, KVSplits, power_of_two
from interpreted.plain import (
    DTYPES,
    ancestor_bits,
    assert_exact,
    assert_near,
    depths_of,
    layers,
    noise,
    rms,
)

TREE = [-1, 0, 0, 1, 3, 2, 3]  # four levels, with nodes that do not follow their parents
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])


def normed_input(made: CudaLayers, x: Tensor, weight: Tensor, place: int) -> None:
    """Leaves x as a kernel before would: with a norm's factors applied by column, and squares."""
    count, wide = len(x), x.float()
    made.scaled[:count] = (wide * weight.float() * made.shift).to(made.dtype)
    made.squares[place, :count] = 0
    parts = torch.arange(x.shape[1]) % made.parts
    made.squares[place, :count].index_add_(1, parts, wide**2)


def test_plant(dtype: torch.dtype) -> None:
    """Whatever the device holds becomes a tree: tokens in range, parents before children."""
    made, nodes = layers("llama", dtype), len(TREE)
    trees = torch.tensor([[[3, 4, 5, 6, 7, 8, 9], TREE]] * 3)
    trees[1, 0, 2], trees[1, 0, 4], trees[1, 1, 3], trees[1, 1, 1] = 10**9, -5, 50, -1
    trees[2, 1] = torch.tensor([-1, 0, 1, 2, 3, 4, 5])
    roots = torch.tensor([70, 71, 299])
    tokens, depths, ancestors = (torch.full((3, nodes), -7) for _ in range(3))
    made.launch(
        made.kernels.plant, 3, roots, trees, tokens, depths, ancestors, 300,
        NODES=nodes, BLOCK=power_of_two(nodes),
    )  # fmt: skip
    for text in range(3):
        said, above = trees[text].tolist()
        parents = [-1] + [min(max(p, 0), node) for node, p in enumerate(above[1:])]
        expected = [int(roots[text]), *(min(max(t, 0), 299) for t in said[1:])]
        assert tokens[text].tolist() == expected
        assert depths[text].tolist() == depths_of(parents)
        assert ancestors[text].tolist() == ancestor_bits(parents)


def test_embed(dtype: torch.dtype) -> None:
    made = layers("llama", dtype)
    table, norm, tokens = made.shape.embed.weight, made.shape.layers[0].input_norm, [7, 299, 0]
    made.launch(
        made.kernels.embed, 3, torch.tensor(tokens), table, norm, made.x, made.scaled,
        made.squares[0], HIDDEN=192, PARTS=made.parts, SHIFT=made.shift, BLOCK=256,
    )  # fmt: skip
    assert torch.equal(made.x[:3], table[tokens])
    assert_near(made.scaled[:3], made.x[:3].float() * norm.float() * made.shift, dtype)
    assert_exact(made.squares[0, :3].sum(1), (made.x[:3].float() ** 2).sum(1))


@pytest.mark.parametrize(("kind", "count"), [("llama", 1), ("qwen2", 3), ("llama", 20)])
def test_linear_with_a_norm_before_it(kind: str, count: int, dtype: torch.dtype) -> None:
    """Three weights side by side, with and without biases."""
    made, x = layers(kind, dtype), noise(count, 192).to(dtype)
    layer = made.shape.layers[0]
    parts = [layer.linears[name] for name in "qkv"]
    normed_input(made, x, layer.input_norm, 0)
    made.qkv.fill_(7)
    made.linear("qkv", parts, made.scaled, made.qkv, count, normed=True)
    read = rms(x, layer.input_norm, made.shape.norm_eps)
    biases = [0 if part.bias is None else part.bias.float() for part in parts]
    pairs = zip(parts, biases, strict=True)
    truth = torch.cat([read @ part.weight.float().T + bias for part, bias in pairs], 1)
    assert_near(made.qkv[:count], truth, dtype)
    assert bool((made.qkv[count:] == 7).all())  # rows of no use are not written


@pytest.mark.parametrize("count", [1, 20])
def test_linear_with_a_residual(count: int, dtype: torch.dtype) -> None:
    """Leaves what the next norm needs."""
    made, x = layers("llama", dtype), noise(count, 128).to(dtype)
    layer, add = made.shape.layers[0], made.x
    made.mixed[:count], add[:count] = x, noise(count, 192, seed=2).to(dtype)
    made.linear(
        "o", [layer.linears["o"]], made.mixed, made.middle, count,
        squares=1, add=add, norm=layer.post_attention_norm,
    )  # fmt: skip
    found = made.middle[:count].float()
    assert_near(found, x.float() @ layer.linears["o"].weight.float().T + add[:count].float(), dtype)
    assert_exact(made.squares[1, :count].sum(1), (found**2).sum(1))
    assert_near(made.scaled[:count], found * layer.post_attention_norm.float() * made.shift, dtype)


def vocabulary(made: CudaLayers, x: Tensor) -> tuple[Tensor, int]:
    """Logits, and the number of tiles."""
    normed_input(made, x, made.shape.final_norm, 0)
    tiles, size = made.vocabulary(len(x), sums=True)
    assert size == 16 and tiles == 19
    return made.logits[: len(x)], tiles


def test_logits_and_the_best_of_each_tile(dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype), noise(3, 192).to(dtype)
    logits, tiles = vocabulary(made, x)
    weight = made.shape.lm_head.weight.float()
    assert_near(logits, rms(x, made.shape.final_norm, made.shape.norm_eps) @ weight.T, dtype)
    tops, places, sums = (
        flat.view(-1)[: 3 * tiles].view(3, tiles) for flat in (made.tops, made.places, made.sums)
    )
    wide = F.pad(logits.float(), (0, 4), value=-torch.inf).view(3, tiles, 16)
    assert torch.equal(tops, wide.max(-1).values)
    assert torch.equal(places, wide.argmax(-1) + 16 * torch.arange(tiles))
    assert_exact(sums, (wide - tops[..., None]).exp().sum(-1))
    best = torch.empty(3, dtype=torch.int64)
    made.launch(
        made.kernels.pick, 3, made.tops, made.places, best, tiles, BLOCK=power_of_two(tiles)
    )
    assert best.tolist() == logits.float().argmax(-1).tolist()


def test_pick_takes_the_first_of_equals_and_nothing_that_is_not_finite(dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype), noise(4, 192).to(dtype)
    with torch.no_grad():
        made.shape.lm_head.weight[170:] = made.shape.lm_head.weight[40:170]  # every logit twice
    x[1, 5] = torch.nan
    x[2] = torch.inf
    logits, tiles = vocabulary(made, x)
    assert bool(logits[1].isnan().all())
    made.tops.view(-1)[3 * tiles : 4 * tiles] = -torch.inf
    best = torch.empty(4, dtype=torch.int64)
    made.launch(
        made.kernels.pick, 4, made.tops, made.places, best, tiles, BLOCK=power_of_two(tiles)
    )
    assert best.tolist() == [int(logits[0].float().argmax()), -1, -1, -1]


def test_a_nan_does_not_hide_behind_a_number(dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype), noise(1, 192).to(dtype)
    with torch.no_grad():
        made.shape.lm_head.weight[77, 3] = torch.nan  # one logit of a tile
    _, tiles = vocabulary(made, x)
    best = torch.empty(1, dtype=torch.int64)
    made.launch(
        made.kernels.pick, 1, made.tops, made.places, best, tiles, BLOCK=power_of_two(tiles)
    )
    assert best.item() == -1


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated(activation: str, dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype, hidden_act=activation), noise(3, 192).to(dtype)
    layer = made.shape.layers[0]
    normed_input(made, x, layer.post_attention_norm, 1)
    made._gated(layer, 3)
    read = rms(x, layer.post_attention_norm, made.shape.norm_eps)
    gate, up = (read @ layer.linears[name].weight.float().T for name in ("gate", "up"))
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_near(made.inner[:3], act * up, dtype)


# ------------------------------------------------------------------------------- attention


def rotated(x: Tensor, made: CudaLayers, position: int) -> Tensor:
    cos, sin = made.cos[position].float(), made.sin[position].float()
    low, high = x.float().chunk(2, -1)
    return x.float() * cos + torch.cat([-high, low], -1) * sin


def truth_of(
    made: CudaLayers, qkv: Tensor, before: list[tuple[Tensor, Tensor]], parents: list[int], old: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of the nodes from `old` on of one text, of which `before` holds keys and values by
    position, then by node of the block: mixed values, and the new keys and values."""
    s, layer = made.shape, made.shape.layers[0]
    nodes, length = len(qkv), len(before) - old
    q, k, v = qkv.split(
        [s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.num_kv_heads * s.head_dim], 1
    )
    q, k, v = (part.view(nodes, -1, s.head_dim) for part in (q, k, v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms(q, layer.q_norm, s.norm_eps), rms(k, layer.k_norm, s.norm_eps)
    depths = depths_of(parents)
    keys = torch.stack([rotated(k[i], made, length + depths[old + i]) for i in range(nodes)])
    positions = [*range(length), *(length + depth for depth in depths)]
    all_keys = torch.stack([*(key.float() for key, _ in before), *keys])
    all_values = torch.stack([*(value.float() for _, value in before), *v.float()])
    mixed = []
    for node in range(nodes):
        seen = list(range(length))
        bits = ancestor_bits(parents)[old + node]
        seen += [length + other for other in range(old + nodes) if bits >> other & 1]
        own = length + depths[old + node]
        seen = [at for at in seen if own - positions[at] < (layer.sliding_window or 1 << 30)]
        query = rotated(q[node], made, own)
        for head in range(s.num_heads):
            group = head // (s.num_heads // s.num_kv_heads)
            scores = all_keys[seen, group] @ query[head] * layer.scaling
            mixed.append(scores.softmax(0) @ all_values[seen, group])
    return torch.stack(mixed).view(nodes, -1), keys, v


CASES = {
    "one node": ("llama", [-1], 0, 1, 1),
    "tree": ("llama", TREE, 0, 1, 1),
    "head norm": ("qwen3", TREE, 0, 1, 1),
    "splits": ("llama", TREE, 0, 4, 1),
    "splits of several blocks": ("qwen3", TREE, 0, 4, 4),
    "window": ("mistral", TREE, 0, 4, 1),
    "nodes of earlier forwards": ("llama", TREE, 3, 4, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_attend_and_combine(case: str, dtype: torch.dtype) -> None:
    """Of two texts, one of which ends within a block of keys and one near its end."""
    kind, parents, old, splits, blocks = CASES[case]
    made, nodes, lengths = layers(kind, dtype), len(parents) - old, [5, 60 if splits == 1 else 125]
    if splits == 1:
        lengths = [5, 64 - len(parents)]
    s, cache, rows = made.shape, made.cache, 2 * nodes
    qkv = made.qkv[:rows] = noise(rows, made.qkv.shape[1]).to(dtype)
    for number, stored in enumerate((cache.keys[0], cache.values[0])):
        stored.copy_(noise(*stored.shape, seed=10 + number))
    kept = [stored.clone() for stored in (cache.keys[0], cache.values[0])]
    block = Block(
        torch.tensor([1]), torch.tensor(lengths), torch.tensor([depths_of(parents)] * 2),
        torch.tensor([ancestor_bits(parents)] * 2), nodes, old,
    )  # fmt: skip
    size = s.num_heads * splits * rows
    scratch = [torch.full((n,), torch.nan) for n in (size * s.head_dim, size, size)]
    made._attend(0, s.layers[0], block, KVSplits(1, splits, blocks), scratch)
    for text, length in enumerate(lengths):
        before = [tuple(stored[1 + text, :, at] for stored in kept) for at in range(length + old)]
        part = slice(text * nodes, (text + 1) * nodes)
        mixed, keys, values = truth_of(made, qkv[part], before, parents, old)  # type: ignore[arg-type]
        assert_near(made.mixed[part], mixed, dtype)
        new = slice(length + old, length + old + nodes)
        assert_near(cache.keys[0][1 + text, :, new].transpose(0, 1), keys, dtype)
        assert torch.equal(cache.values[0][1 + text, :, new].transpose(0, 1), values)
        for was, stored in zip(kept, (cache.keys[0], cache.values[0]), strict=True):
            was[1 + text, :, new] = stored[1 + text, :, new]
    for was, stored in zip(kept, (cache.keys[0], cache.values[0]), strict=True):
        assert torch.equal(was, stored)  # nothing else is written


def test_guesses_that_are_not_finite_are_not_stored(dtype: torch.dtype) -> None:
    """They would reach other nodes from behind the mask. The text's own must show."""
    made = layers("llama", dtype)
    qkv = made.qkv[:4] = noise(4, made.qkv.shape[1]).to(dtype)
    start, width = 4 * 32, 2 * 32  # of keys; values follow
    made.qkv[2, start + 3], made.qkv[2, start + width + 9] = torch.nan, torch.inf
    made.qkv[0, start + width] = torch.nan
    parents = [-1, 0, 0, 1]
    block = Block(
        torch.tensor([1]), torch.tensor([20]), torch.tensor([depths_of(parents)]),
        torch.tensor([ancestor_bits(parents)]), 4,
    )  # fmt: skip
    scratch = [torch.empty(4 * 4 * 32), torch.empty(16), torch.empty(16)]
    made._attend(0, made.shape.layers[0], block, KVSplits(0, 1, 1), scratch)
    keys, values = (stored[0, :, 20:24] for stored in (made.cache.keys[0], made.cache.values[0]))
    assert bool(keys.isfinite().all())
    assert float(values[0, 2, 9]) == 0.0 and bool(values[0, 0, 0].isnan())
    # A node with a NaN of its own is lost; its siblings must not be.
    made.qkv[0] = qkv[1]
    made._attend(0, made.shape.layers[0], block, KVSplits(0, 1, 1), scratch)
    assert bool(made.mixed[[0, 1, 3]].isfinite().all())


def test_products_of_all(dtype: torch.dtype) -> None:
    """What CASES leave out: every program of a large grid writes its own part."""
    made, count = layers("llama", dtype), 33
    x = noise(count, 192).to(dtype)
    normed_input(made, x, made.shape.final_norm, 0)
    made.logits.fill_(7)
    made.vocabulary(count)
    truth = rms(x, made.shape.final_norm, made.shape.norm_eps) @ made.shape.lm_head.weight.float().T
    assert_near(made.logits[:count], truth, dtype)
    corners: Any = itertools.product((0, count - 1), (0, 299))
    assert all(float(made.logits[at]) != 7 for at in corners)
