"""Kernels of a forward: backends/cuda/kernels.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.cuda.layers import (
    CudaAttentionMetadata,
    CudaLayers,
    KVSplits,
    next_power_of_two,
)
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
FOREST = [-1, -1, -1, 0, 1, 0, 4]  # the block of a draft tree: its root is in the context
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])


def normed_input(made: CudaLayers, x: Tensor, weight: Tensor, index: int) -> None:
    """Prepares x for a norm, as the kernel before would: multiplied by its weight, and squares."""
    count, wide = len(x), x.float()
    made.scaled[:count] = (wide * weight.float() * made.norm_scale).to(made.dtype)
    made.squares[index, :count] = 0
    parts = torch.arange(x.shape[1]) % made.num_partials
    made.squares[index, :count].index_add_(1, parts, wide**2)


def test_unpack_trees(dtype: torch.dtype) -> None:
    """Whatever the device holds becomes a tree: tokens in range, parents before children."""
    made, num_nodes = layers("llama", dtype), len(TREE)
    trees = torch.tensor([[[3, 4, 5, 6, 7, 8, 9], TREE]] * 3)
    trees[1, 0, 2], trees[1, 0, 4], trees[1, 1, 3], trees[1, 1, 1] = 10**9, -5, 50, -1
    trees[2, 1] = torch.tensor([-1, 0, 1, 2, 3, 4, 5])
    roots = torch.tensor([70, 71, 299])
    tokens, depths, ancestors = (torch.full((3, num_nodes), -7) for _ in range(3))
    made.launch(
        made.kernels.unpack_trees, 3, roots=roots, trees=trees, tokens=tokens, depths=depths,
        ancestors=ancestors, vocab_size=300, NODES=num_nodes, BLOCK=next_power_of_two(num_nodes),
    )  # fmt: skip
    for b in range(3):
        given, given_parents = trees[b].tolist()
        parents = [-1] + [min(max(p, 0), node) for node, p in enumerate(given_parents[1:])]
        expected = [int(roots[b]), *(min(max(token, 0), 299) for token in given[1:])]
        assert tokens[b].tolist() == expected
        assert depths[b].tolist() == depths_of(parents)
        assert ancestors[b].tolist() == ancestor_bits(parents)


def test_embed(dtype: torch.dtype) -> None:
    made = layers("llama", dtype)
    table, norm, tokens = made.spec.embed.weight, made.spec.layers[0].input_norm, [7, 299, 0]
    made.launch(
        made.kernels.embed, 3, tokens=torch.tensor(tokens), table=table, norm=norm, x=made.x,
        scaled=made.scaled, squares=made.squares[0], HIDDEN=192, NUM_PARTIALS=made.num_partials,
        NORM_SCALE=made.norm_scale, BLOCK=256,
    )  # fmt: skip
    assert torch.equal(made.x[:3], table[tokens])
    assert_near(made.scaled[:3], made.x[:3].float() * norm.float() * made.norm_scale, dtype)
    assert_exact(made.squares[0, :3].sum(1), (made.x[:3].float() ** 2).sum(1))


@pytest.mark.parametrize(("kind", "count"), [("llama", 1), ("qwen2", 3), ("llama", 20)])
def test_linear_with_a_norm_before_it(kind: str, count: int, dtype: torch.dtype) -> None:
    """Three weights side by side, with and without biases."""
    made, x = layers(kind, dtype), noise(count, 192).to(dtype)
    layer = made.spec.layers[0]
    parts = [layer.linears[name] for name in "qkv"]
    normed_input(made, x, layer.input_norm, 0)
    made.qkv.fill_(7)
    made.linear("qkv", parts, made.scaled, made.qkv, count, normed=True)
    read = rms(x, layer.input_norm, made.spec.norm_eps)
    biases = [0 if part.bias is None else part.bias.float() for part in parts]
    pairs = zip(parts, biases, strict=True)
    truth = torch.cat([read @ part.weight.float().T + bias for part, bias in pairs], 1)
    assert_near(made.qkv[:count], truth, dtype)
    assert bool((made.qkv[count:] == 7).all())  # nothing behind the nodes is written


@pytest.mark.parametrize("count", [1, 20])
def test_linear_with_a_residual(count: int, dtype: torch.dtype) -> None:
    """And what the next norm needs."""
    made, x = layers("llama", dtype), noise(count, 128).to(dtype)
    layer, add = made.spec.layers[0], made.x
    made.attended[:count], add[:count] = x, noise(count, 192, seed=2).to(dtype)
    made.linear(
        "o", [layer.linears["o"]], made.attended, made.after_attention, count,
        squares=1, add=add, norm=layer.post_attention_norm,
    )  # fmt: skip
    found = made.after_attention[:count].float()
    assert_near(found, x.float() @ layer.linears["o"].weight.float().T + add[:count].float(), dtype)
    assert_exact(made.squares[1, :count].sum(1), (found**2).sum(1))
    assert_near(
        made.scaled[:count], found * layer.post_attention_norm.float() * made.norm_scale, dtype
    )


def lm_head(made: CudaLayers, x: Tensor) -> tuple[Tensor, int]:
    """Logits, and the number of tiles."""
    normed_input(made, x, made.spec.final_norm, 0)
    tiles, size = made.lm_head(len(x), sums=True)
    assert size == 16 and tiles == 19
    return made.logits[: len(x)], tiles


def argmax(made: CudaLayers, count: int, tiles: int) -> list[int]:
    best = torch.empty(count, dtype=torch.int64)
    made.launch(
        made.kernels.argmax, count, tile_max=made.tile_max, tile_argmax=made.tile_argmax,
        best=best, tiles=tiles, BLOCK=next_power_of_two(tiles),
    )  # fmt: skip
    found: list[int] = best.tolist()
    return found


def test_logits_and_the_largest_of_each_tile(dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype), noise(3, 192).to(dtype)
    logits, tiles = lm_head(made, x)
    weight = made.spec.lm_head.weight.float()
    assert_near(logits, rms(x, made.spec.final_norm, made.spec.norm_eps) @ weight.T, dtype)
    largest, places, sums = (
        flat.view(-1)[: 3 * tiles].view(3, tiles)
        for flat in (made.tile_max, made.tile_argmax, made.tile_sums)
    )
    wide = F.pad(logits.float(), (0, 4), value=-torch.inf).view(3, tiles, 16)
    assert torch.equal(largest, wide.max(-1).values)
    assert torch.equal(places, wide.argmax(-1) + 16 * torch.arange(tiles))
    assert_exact(sums, (wide - largest[..., None]).exp().sum(-1))
    assert argmax(made, 3, tiles) == logits.float().argmax(-1).tolist()


def test_argmax_is_the_first_of_equals_and_nothing_that_is_not_finite(dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype), noise(4, 192).to(dtype)
    with torch.no_grad():
        made.spec.lm_head.weight[170:] = made.spec.lm_head.weight[40:170]  # every logit twice
    x[1, 5] = torch.nan
    x[2] = torch.inf
    logits, tiles = lm_head(made, x)
    assert bool(logits[1].isnan().all())
    made.tile_max.view(-1)[3 * tiles : 4 * tiles] = -torch.inf
    assert argmax(made, 4, tiles) == [int(logits[0].float().argmax()), -1, -1, -1]


def test_a_nan_does_not_hide_behind_a_number(dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype), noise(1, 192).to(dtype)
    with torch.no_grad():
        made.spec.lm_head.weight[77, 3] = torch.nan  # one logit of a tile
    _, tiles = lm_head(made, x)
    assert argmax(made, 1, tiles) == [-1]


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gate_up(activation: str, dtype: torch.dtype) -> None:
    made, x = layers("llama", dtype, hidden_act=activation), noise(3, 192).to(dtype)
    layer = made.spec.layers[0]
    normed_input(made, x, layer.post_attention_norm, 1)
    made._gate_up(layer, 3)
    read = rms(x, layer.post_attention_norm, made.spec.norm_eps)
    gate, up = (read @ layer.linears[name].weight.float().T for name in ("gate", "up"))
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_near(made.activated[:3], act * up, dtype)


# ------------------------------------------------------------------------------- attention


def rotated(x: Tensor, made: CudaLayers, position: int) -> Tensor:
    cos, sin = made.cos[position].float(), made.sin[position].float()
    low, high = x.float().chunk(2, -1)
    return x.float() * cos + torch.cat([-high, low], -1) * sin


def truth_of(
    made: CudaLayers,
    qkv: Tensor,
    earlier: list[tuple[Tensor, Tensor]],
    parents: list[int],
    num_earlier: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of the nodes of one sequence from `num_earlier` on. `earlier`: its keys and values
    by position, then by node of the block. Returns its output, and the new keys and values."""
    spec, layer = made.spec, made.spec.layers[0]
    num_nodes, num_cached = len(qkv), len(earlier) - num_earlier
    kv_size = spec.num_kv_heads * spec.head_dim
    q, k, v = (
        part.view(num_nodes, -1, spec.head_dim)
        for part in qkv.split([spec.num_heads * spec.head_dim, kv_size, kv_size], 1)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms(q, layer.q_norm, spec.norm_eps), rms(k, layer.k_norm, spec.norm_eps)
    depths = depths_of(parents)
    new = range(num_earlier, num_earlier + num_nodes)
    keys = torch.stack([rotated(k[i], made, num_cached + depths[at]) for i, at in enumerate(new)])
    positions = [*range(num_cached), *(num_cached + depth for depth in depths)]
    all_keys = torch.stack([*(key.float() for key, _ in earlier), *keys])
    all_values = torch.stack([*(value.float() for _, value in earlier), *v.float()])
    attended = []
    for i, at in enumerate(new):
        bits, position = ancestor_bits(parents)[at], num_cached + depths[at]
        visible = [*range(num_cached), *(num_cached + n for n in range(new.stop) if bits >> n & 1)]
        window = layer.sliding_window or 1 << 30
        visible = [entry for entry in visible if position - positions[entry] < window]
        query = rotated(q[i], made, position)
        for head in range(spec.num_heads):
            group = head // (spec.num_heads // spec.num_kv_heads)
            scores = all_keys[visible, group] @ query[head] * layer.scaling
            attended.append(scores.softmax(0) @ all_values[visible, group])
    return torch.stack(attended).view(num_nodes, -1), keys, v


CASES = {
    "one node": ("llama", [-1], 0, 1, 1),
    "tree": ("llama", TREE, 0, 1, 1),
    "head norm": ("qwen3", TREE, 0, 1, 1),
    "splits": ("llama", TREE, 0, 4, 1),
    "splits of several blocks": ("qwen3", TREE, 0, 4, 4),
    "window": ("mistral", TREE, 0, 4, 1),
    "nodes of earlier forwards": ("llama", TREE, 3, 4, 1),
    "block without a root": ("llama", FOREST, 3, 1, 1),
}


def scratch_for(made: CudaLayers, count: int, splits: int) -> dict[str, Tensor]:
    """Memory for the results of splits, filled with NaN."""
    size = made.spec.num_heads * splits * count
    sizes = {"split_sums": size * made.spec.head_dim, "split_max": size, "split_weights": size}
    return {name: torch.full((n,), torch.nan) for name, n in sizes.items()}


@pytest.mark.parametrize("case", CASES)
def test_attend_and_combine_splits(case: str, dtype: torch.dtype) -> None:
    """Of two sequences: one ends within a block of KV entries, and one near the end of a block."""
    kind, parents, num_earlier, splits, blocks = CASES[case]
    made, num_nodes = layers(kind, dtype), len(parents) - num_earlier
    counts = [5, 64 - len(parents) if splits == 1 else 125]
    cache, count = made.cache, 2 * num_nodes
    qkv = made.qkv[:count] = noise(count, made.qkv.shape[1]).to(dtype)
    for number, stored in enumerate((cache.keys[0], cache.values[0])):
        stored.copy_(noise(*stored.shape, seed=10 + number))
    copies = [stored.clone() for stored in (cache.keys[0], cache.values[0])]
    metadata = CudaAttentionMetadata(
        torch.tensor([1]), torch.tensor(counts), torch.tensor([depths_of(parents)] * 2),
        torch.tensor([ancestor_bits(parents)] * 2), num_nodes, num_earlier,
    )  # fmt: skip
    scratch = scratch_for(made, count, splits)
    made._attend(0, made.spec.layers[0], metadata, KVSplits(1, splits, blocks), scratch)
    for b, num_cached in enumerate(counts):
        slot, held = 1 + b, num_cached + num_earlier
        earlier = [(copies[0][slot, :, at], copies[1][slot, :, at]) for at in range(held)]
        part = slice(b * num_nodes, (b + 1) * num_nodes)
        attended, keys, values = truth_of(made, qkv[part], earlier, parents, num_earlier)
        assert_near(made.attended[part], attended, dtype)
        new = slice(held, held + num_nodes)
        assert_near(cache.keys[0][slot, :, new].transpose(0, 1), keys, dtype)
        assert torch.equal(cache.values[0][slot, :, new].transpose(0, 1), values)
        for copy, stored in zip(copies, (cache.keys[0], cache.values[0]), strict=True):
            copy[slot, :, new] = stored[slot, :, new]
    for copy, stored in zip(copies, (cache.keys[0], cache.values[0]), strict=True):
        assert torch.equal(copy, stored)  # nothing else is written


def test_drafted_nodes_that_are_not_finite_are_not_stored(dtype: torch.dtype) -> None:
    """They would reach other nodes from behind the mask. Those of the text must show."""
    made = layers("llama", dtype)
    qkv = made.qkv[:4] = noise(4, made.qkv.shape[1]).to(dtype)
    start, kv_size = 4 * 32, 2 * 32  # of keys; values follow
    made.qkv[2, start + 3], made.qkv[2, start + kv_size + 9] = torch.nan, torch.inf
    made.qkv[0, start + kv_size] = torch.nan
    parents = [-1, 0, 0, 1]
    metadata = CudaAttentionMetadata(
        torch.tensor([1]), torch.tensor([20]), torch.tensor([depths_of(parents)]),
        torch.tensor([ancestor_bits(parents)]), 4,
    )  # fmt: skip
    scratch = scratch_for(made, 4, 1)
    made._attend(0, made.spec.layers[0], metadata, KVSplits(0, 1, 1), scratch)
    keys, values = (stored[0, :, 20:24] for stored in (made.cache.keys[0], made.cache.values[0]))
    assert bool(keys.isfinite().all())
    assert float(values[0, 2, 9]) == 0.0 and bool(values[0, 0, 0].isnan())
    # A node with a NaN of its own is lost; its siblings must not be.
    made.qkv[0] = qkv[1]
    made._attend(0, made.spec.layers[0], metadata, KVSplits(0, 1, 1), scratch)
    assert bool(made.attended[[0, 1, 3]].isfinite().all())


def test_every_program_of_a_large_grid_writes_its_own_outputs(dtype: torch.dtype) -> None:
    made, count = layers("llama", dtype), 33
    x = noise(count, 192).to(dtype)
    normed_input(made, x, made.spec.final_norm, 0)
    made.logits.fill_(7)
    made.lm_head(count)
    truth = rms(x, made.spec.final_norm, made.spec.norm_eps) @ made.spec.lm_head.weight.float().T
    assert_near(made.logits[:count], truth, dtype)
    corners: Any = itertools.product((0, count - 1), (0, 299))
    assert all(float(made.logits[at]) != 7 for at in corners)
