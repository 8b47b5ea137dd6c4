"""Kernels that build draft trees: drafters/eagle/cuda_kernels.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.cuda.layers import next_power_of_two
from draftahead.core.draft import CONFIDENCE_SCALE
from draftahead.drafters.eagle import cuda_kernels as kernels
from draftahead.sampling.noise import uniforms
from interpreted.plain import DTYPES, assert_near, noise, rms

EPS = 1e-6
HIDDEN = 96  # no power of two
both = pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])


@both
@pytest.mark.parametrize("norm", ["each", "all", "none"])
def test_gather_hidden(norm: str, dtype: torch.dtype) -> None:
    """Three of four captured hidden states, in another order than they are stored."""
    hidden_states = noise(2, 1, 10, 4 * HIDDEN).to(dtype)
    weights = (1 + 0.1 * noise(3, HIDDEN, seed=2)).to(dtype)
    indices = torch.tensor([2, 0, 3], dtype=torch.int32)
    entries = torch.tensor([[0, 7, 99], [5, 9, 1]])
    out = torch.empty(6, 3 * HIDDEN, dtype=dtype)
    kernels.gather_hidden[(6,)](
        hidden_states=hidden_states, hidden_indices=indices, weights=weights, out=out,
        entries=entries, max_inputs=3, num_entries=10, stride=4 * HIDDEN, eps=EPS,
        NUM_HIDDEN=3, HIDDEN=HIDDEN, BLOCK=128, NORM=norm,
    )  # fmt: skip
    slots = torch.arange(2)[:, None]
    found = hidden_states[slots, 0, entries.clamp(max=9)].view(6, 4, HIDDEN)
    found = found[:, indices.long()].float()
    if norm == "each":
        found = F.rms_norm(found, (HIDDEN,), None, EPS) * weights.float()
    if norm == "all":
        found = rms(found.flatten(1), weights.flatten(), EPS).view(found.shape)
    assert_near(out, found.flatten(1), dtype)


def projection(dtype: torch.dtype) -> dict[str, Tensor]:
    """Embeddings, and the norms of embeddings and of hidden states."""
    embed_norm, hidden_norm = (1 + 0.1 * noise(2, HIDDEN, seed=4)).to(dtype)
    embeddings = noise(40, HIDDEN, seed=3).to(dtype)
    return {"embeddings": embeddings, "embed_norm": embed_norm, "hidden_norm": hidden_norm}


def projected(
    weights: dict[str, Tensor], tokens: list[int], hidden: Tensor, norm_residual: bool
) -> tuple[Tensor, Tensor]:
    """The input of the first layer's attention, and what its residual starts from."""
    embedded = rms(weights["embeddings"][tokens], weights["embed_norm"], EPS)
    normed = rms(hidden, weights["hidden_norm"], EPS)
    return torch.cat([embedded, normed], 1), normed if norm_residual else hidden


@both
@pytest.mark.parametrize("norm_residual", [False, True])
def test_first_inputs(norm_residual: bool, dtype: torch.dtype) -> None:
    weights, tokens, features = projection(dtype), [3, 39, 0], noise(3, HIDDEN).to(dtype)
    first_input, x = (torch.empty(3, n * HIDDEN, dtype=dtype) for n in (2, 1))
    kernels.first_inputs[(3,)](
        tokens=torch.tensor(tokens), features=features, **weights, first_input=first_input, x=x,
        eps=EPS, HIDDEN=HIDDEN, BLOCK=128, NORM_RESIDUAL=norm_residual,
    )  # fmt: skip
    truths = projected(weights, tokens, features, norm_residual)
    for found, truth in zip((first_input, x), truths, strict=True):
        assert_near(found, truth, dtype)


# ------------------------------------------------------------ the pool of candidate nodes

BATCH, POOL, PER_LEVEL, LEVELS, CHILDREN = 2, 64, 3, 4, 4
NUM_EXPANDED = PER_LEVEL * (LEVELS - 1)
MAX_INPUTS = 3
NUM_INPUTS = (1, 3)  # of each sequence; the last one is that of its root


def empty_pool() -> dict[str, Tensor]:
    """As TreeBuffers makes it, and `expanded`."""
    pool = {
        f"pool_{name}": torch.zeros(BATCH, POOL, dtype=torch.int32)
        for name in ("parent_nodes", "depths", "parents", "levels")
    }
    return pool | {
        "pool_tokens": torch.zeros(BATCH, POOL, dtype=torch.int64),
        "pool_confidence": torch.full((BATCH, POOL), torch.nan),
        "expanded": torch.zeros(BATCH, NUM_EXPANDED, dtype=torch.int32),
    }


class Candidate(NamedTuple):
    token: int
    confidence: float
    parent_node: int  # index of the parent in the block; -1: the root
    depth: int
    parent: int  # index of the parent in the pool; -1: the root
    level: int = 0  # at which it was expanded; 0: not yet


POOL_TENSORS = [  # in the order of a candidate's fields
    "pool_tokens",
    "pool_confidence",
    "pool_parent_nodes",
    "pool_depths",
    "pool_parents",
    "pool_levels",
]
Candidates = list[Candidate]  # of one sequence, in the order of the pool


def most_confident(candidates: Candidates) -> list[int]:
    """The next ones to expand."""
    left = [at for at, candidate in enumerate(candidates) if not candidate.level]
    return sorted(left, key=lambda at: (-candidates[at].confidence, at))[:PER_LEVEL]


def random_candidates(sequence: int, levels: int, generator: torch.Generator) -> Candidates:
    """Children of the root, and of the most confident at each further level."""
    found: Candidates = []
    nodes = [(-1, -1, 1.0, 0)]  # index in the block, in the pool, confidence, depth
    for level in range(1, levels + 1):
        for in_block, in_pool, confidence, depth in nodes:
            probs = torch.rand(CHILDREN, generator=generator).sort(descending=True).values
            for prob in probs.tolist():
                token = (7 * len(found) + sequence) % 40
                confidence_here = torch.tensor(confidence * prob).item()  # as float32
                found.append(Candidate(token, confidence_here, in_block, depth + 1, in_pool))
        if level < levels:
            best = most_confident(found)
            for at in best:
                found[at] = found[at]._replace(level=level)
            first = (level - 1) * PER_LEVEL
            nodes = [
                (first + rank, at, found[at].confidence, found[at].depth)
                for rank, at in enumerate(best)
            ]
    return found


def filled(levels: int) -> tuple[dict[str, Tensor], list[Candidates]]:
    """A pool after so many levels, and its candidates."""
    pool, generator = empty_pool(), torch.Generator().manual_seed(levels)
    batch = [random_candidates(b, levels, generator) for b in range(BATCH)]
    for b, candidates in enumerate(batch):
        for name, values in zip(POOL_TENSORS, zip(*candidates, strict=True), strict=True):
            pool[name][b, : len(values)] = torch.tensor(values)
        for level in range(1, levels):
            expanded = [at for at, candidate in enumerate(candidates) if candidate.level == level]
            expanded.sort(key=lambda at: -candidates[at].confidence)
            first = (level - 1) * PER_LEVEL
            pool["expanded"][b, first : first + PER_LEVEL] = torch.tensor(expanded)
    return pool, batch


def ancestors_with(candidate: Candidate, ancestors: Tensor, index_in_block: int) -> int:
    """Ancestor bits of a node of the block, from those of its sequence's earlier nodes."""
    parent = candidate.parent_node
    return (int(ancestors[parent]) if parent >= 0 else 0) | 1 << index_in_block


@both
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_expand_nodes(level: int, norms: bool, dtype: torch.dtype) -> None:
    """The most confident that are not expanded yet, each with the output for its parent."""
    pool, batch = filled(level)
    weights, norm = projection(dtype), (1 + 0.1 * noise(HIDDEN, seed=8)).to(dtype)
    root_outputs = noise(BATCH * MAX_INPUTS, HIDDEN).to(dtype)
    outputs = noise(BATCH * NUM_EXPANDED, HIDDEN, seed=5).to(dtype)
    depths, ancestors = (torch.full((BATCH, NUM_EXPANDED), -5) for _ in range(2))
    first = (level - 1) * PER_LEVEL
    for b, candidates in enumerate(batch):
        for node in range(first):
            candidate = candidates[int(pool["expanded"][b, node])]
            ancestors[b, node] = ancestors_with(candidate, ancestors[b], node)
    count = BATCH * PER_LEVEL
    first_input, x = (torch.empty(count, n * HIDDEN, dtype=dtype) for n in (2, 1))
    kernels.expand_nodes[(BATCH, PER_LEVEL)](
        **{name: tensor for name, tensor in pool.items() if name != "pool_parents"},
        depths=depths, ancestors=ancestors, num_inputs=torch.tensor(NUM_INPUTS),
        root_outputs=root_outputs, outputs=outputs, **weights, norm=norm, first_input=first_input,
        x=x, eps=EPS, level=level, pool_size=len(batch[0]), nodes_per_level=PER_LEVEL,
        num_expanded=NUM_EXPANDED, max_inputs=MAX_INPUTS, POOL=POOL, NORM_OUTPUT=norms,
        HIDDEN=HIDDEN, BLOCK=128, NORM_RESIDUAL=norms,
    )  # fmt: skip
    tokens, hidden = [], []
    for b, candidates in enumerate(batch):
        for rank, at in enumerate(most_confident(candidates)):
            node, candidate = first + rank, candidates[at]
            assert int(pool["expanded"][b, node]) == at
            assert int(pool["pool_levels"][b, at]) == level
            assert int(depths[b, node]) == candidate.depth - 1
            assert int(ancestors[b, node]) == ancestors_with(candidate, ancestors[b], node)
            tokens.append(candidate.token)
            if candidate.parent_node < 0:
                hidden.append(root_outputs[b * MAX_INPUTS + NUM_INPUTS[b] - 1])
            else:
                parent_level, parent_rank = divmod(candidate.parent_node, PER_LEVEL)
                hidden.append(outputs[parent_level * count + b * PER_LEVEL + parent_rank])
    inputs = torch.stack(hidden).float()
    if norms:
        inputs = rms(inputs, norm, EPS).to(dtype).float()
    truths = projected(weights, tokens, inputs, norms)
    for found, truth in zip((first_input, x), truths, strict=True):
        assert_near(found, truth, dtype)


def common_arguments(
    pool: dict[str, Tensor], level: int, logits: Tensor, draft_to_target: Tensor | None
) -> dict[str, Any]:
    """Of both kernels that add children."""
    full_vocab = draft_to_target is None
    return pool | {
        "logits": logits,
        "draft_to_target": pool["pool_tokens"] if full_vocab else draft_to_target,
        "num_inputs": torch.tensor(NUM_INPUTS),
        "level": level,
        "nodes_per_level": PER_LEVEL,
        "num_expanded": NUM_EXPANDED,
        "max_inputs": MAX_INPUTS,
        "ROOT": level == 0,
        "POOL": POOL,
        "CHILDREN": CHILDREN,
        "VOCAB_SIZE": logits.shape[1],
        "FULL_VOCAB": full_vocab,
    }


def with_children(
    level: int, logits: Tensor, draft_to_target: Tensor | None, tile: int = 16
) -> tuple[dict[str, Tensor], list[Candidates]]:
    """The pool after `add_children` at a level whose nodes have these logits, [nodes, V]."""
    pool, batch = filled(level + 1)
    size = logits.shape[1]
    old = CHILDREN * (1 + max(0, level - 1) * PER_LEVEL) if level else 0
    for name, tensor in pool.items():
        if name != "expanded":
            tensor[:, old:] = 9 if name == "pool_levels" else -9
    tiles = -(-size // tile)
    wide = F.pad(logits.float(), (0, tiles * tile - size), value=-torch.inf)
    wide = wide.view(-1, tiles, tile)
    wide = wide.where(~wide.isnan(), torch.inf)  # as `linear` leaves them
    largest = wide.max(-1).values
    kernels.add_children[(BATCH, PER_LEVEL if level else 1)](
        **common_arguments(pool, level, logits, draft_to_target), tile_max=largest,
        tile_sums=(wide - largest[..., None]).exp().sum(-1), tiles=tiles,
        TILES=next_power_of_two(tiles), TILE=tile,
    )  # fmt: skip
    return pool, batch


class Parent(NamedTuple):
    """A node that children were added to."""

    sequence: int
    node: int  # index in the forward, of its logits
    in_block: int  # index; -1: the root
    in_pool: int
    confidence: float
    depth: int


def parents_at(pool: dict[str, Tensor], batch: list[Candidates], level: int) -> list[Parent]:
    """Every node of a level."""
    if level == 0:
        roots = [b * MAX_INPUTS + NUM_INPUTS[b] - 1 for b in range(BATCH)]
        return [Parent(b, node, -1, -1, 1.0, 0) for b, node in enumerate(roots)]
    found = []
    for b in range(BATCH):
        for rank in range(PER_LEVEL):
            in_block = (level - 1) * PER_LEVEL + rank
            at = int(pool["expanded"][b, in_block])
            one = batch[b][at]
            node = b * PER_LEVEL + rank
            found.append(Parent(b, node, in_block, at, one.confidence, one.depth))
    return found


def check_children(
    pool: dict[str, Tensor],
    batch: list[Candidates],
    level: int,
    probs: Tensor,
    draft_to_target: Tensor | None,
) -> None:
    for parent in parents_at(pool, batch, level):
        part = slice((parent.in_block + 1) * CHILDREN, (parent.in_block + 2) * CHILDREN)
        found = {name: tensor[parent.sequence, part] for name, tensor in pool.items()}
        values, ids = probs[parent.node].topk(CHILDREN)
        tokens = ids if draft_to_target is None else draft_to_target[ids]
        likely = values > 0
        assert found["pool_tokens"][likely].tolist() == tokens[likely].tolist()
        expected = parent.confidence * values.float()
        assert torch.allclose(found["pool_confidence"], expected, rtol=1e-4, atol=1e-9)
        assert found["pool_parent_nodes"].tolist() == [parent.in_block] * CHILDREN
        assert found["pool_parents"].tolist() == [parent.in_pool] * CHILDREN
        assert found["pool_depths"].tolist() == [parent.depth + 1] * CHILDREN
        assert found["pool_levels"].tolist() == [0] * CHILDREN


@both
@pytest.mark.parametrize("size", [200, 48, 40, 17])
@pytest.mark.parametrize(("level", "full_vocab"), [(0, True), (1, False), (3, True)])
def test_add_children(level: int, full_vocab: bool, size: int, dtype: torch.dtype) -> None:
    """Also for vocabularies of fewer tiles than children: no token is added twice."""
    orders = torch.stack([noise(size, seed=node).argsort() for node in range(9)])
    logits = (orders / 16).to(dtype)  # no two are equal
    draft_to_target = None if full_vocab else torch.arange(size) * 3 + 1
    pool, batch = with_children(level, logits, draft_to_target)
    check_children(pool, batch, level, logits.float().softmax(-1), draft_to_target)


@both
def test_children_after_a_nan_have_no_confidence(dtype: torch.dtype) -> None:
    """A NaN makes the sum unknown for its own node; the others are as they were."""
    logits = noise(9, 64, scale=3.0).to(dtype)
    logits[0, 20] = torch.nan
    pool, _ = with_children(1, logits, None)
    clean, batch = with_children(1, logits.nan_to_num(0.0), None)
    for parent in parents_at(pool, batch, 1):
        part = slice((parent.in_block + 1) * CHILDREN, (parent.in_block + 2) * CHILDREN)
        tokens, clean_tokens = (one["pool_tokens"][parent.sequence, part] for one in (pool, clean))
        assert torch.equal(tokens, clean_tokens)  # the NaN is none of them
        found, expected = (one["pool_confidence"][parent.sequence, part] for one in (pool, clean))
        if parent.node == 0:
            assert found.tolist() == [0.0] * CHILDREN
        else:
            assert torch.equal(found, expected)


@both
@pytest.mark.parametrize(("level", "full_vocab"), [(0, False), (2, True)])
def test_add_children_sampled(level: int, full_vocab: bool, dtype: torch.dtype) -> None:
    """What the target would draw with the same noise; for a greedy sequence, what is likely."""
    size, max_depth = 50, LEVELS
    logits = noise(9, size, seed=6, scale=2.0).to(dtype)
    pool, batch = filled(level + 1)
    draft_to_target = None if full_vocab else torch.arange(size) * 3 + 1
    rng_keys = torch.randint(-(1 << 62), 1 << 62, (BATCH, max_depth))
    temperatures = torch.tensor([0, round(0.8 * CONFIDENCE_SCALE)])
    kernels.add_children_sampled[(BATCH, PER_LEVEL if level else 1)](
        **common_arguments(pool, level, logits, draft_to_target), rng_keys=rng_keys,
        temperatures=temperatures, max_depth=max_depth, BLOCK=64, num_warps=16,
    )  # fmt: skip
    ids = torch.arange(size) if draft_to_target is None else draft_to_target
    probs = torch.empty(9, size)
    for parent in parents_at(pool, batch, level):
        one = logits[parent.node].double()
        if parent.sequence == 1:
            key = int(rng_keys[1, parent.depth])
            exponential = -uniforms([key], int(ids.max()) + 1)[0, ids].log()
            weight = (one / 0.8).softmax(-1) / exponential
        else:
            weight = one.softmax(-1)
        probs[parent.node] = (weight / weight.sum()).float()
    check_children(pool, batch, level, probs, draft_to_target)


@pytest.mark.parametrize("size", [2, 9, 16])
def test_select_nodes(size: int) -> None:
    """The most confident candidates of three levels, parents before children."""
    pool, batch = filled(3)
    pool["pool_confidence"][0, 5] = pool["pool_confidence"][0, 2]  # equals: the first one counts
    batch[0][5] = batch[0][5]._replace(confidence=batch[0][2].confidence)
    trees = torch.full((BATCH, 3, size), -5)
    trees[:, 1, 0] = -1
    kernels.select_nodes[(BATCH,)](
        **{name: pool[name] for name in ("pool_tokens", "pool_confidence", "pool_parents")},
        trees=trees, pool_size=len(batch[0]), num_nodes=size, POOL=POOL,
    )  # fmt: skip
    for b, candidates in enumerate(batch):
        ranked = sorted(range(len(candidates)), key=lambda at: (-candidates[at].confidence, at))
        kept = sorted(ranked[: size - 1])
        index_in_tree = {at: node for node, at in enumerate(kept, start=1)} | {-1: 0}
        tokens, parents, confidence = trees[b].tolist()
        assert tokens[1:] == [candidates[at].token for at in kept]
        if b == 1:  # in the other one, a node has become more confident than its parent may be
            assert parents[1:] == [index_in_tree[candidates[at].parent] for at in kept]
        expected = [int(candidates[at].confidence * CONFIDENCE_SCALE) for at in kept]
        assert confidence[1:] == expected
