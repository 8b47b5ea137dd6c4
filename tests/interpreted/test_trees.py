"""Kernels that build draft trees: drafters/eagle/cuda_kernels.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.cuda.layers import power_of_two
from draftahead.core.draft import CONFIDENCE_SCALE
from draftahead.drafters.eagle import cuda_kernels as kernels
from draftahead.sampling.noise import uniforms
from interpreted.plain import DTYPES, assert_near, noise, rms

EPS = 1e-6
HIDDEN = 96  # no power of two
both = pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])


@both
@pytest.mark.parametrize("norm", ["each", "all", "none"])
def test_fuse(norm: str, dtype: torch.dtype) -> None:
    """Three of four captured states, in another order than they are stored."""
    states = noise(2, 1, 10, 4 * HIDDEN).to(dtype)
    weights = (1 + 0.1 * noise(3, HIDDEN, seed=2)).to(dtype)
    places, at = torch.tensor([2, 0, 3], dtype=torch.int32), torch.tensor([[0, 7, 99], [5, 9, 1]])
    out = torch.empty(6, 3 * HIDDEN, dtype=dtype)
    kernels.fuse[(6,)](
        states, places, weights, out, at, 3, 10, 4 * HIDDEN, EPS,
        PARTS=3, HIDDEN=HIDDEN, BLOCK=128, NORM=norm,
    )  # fmt: skip
    rows = torch.arange(2)[:, None]
    found = states[rows, 0, at.clamp(max=9)].view(6, 4, HIDDEN)[:, places.long()].float()
    if norm == "each":
        found = F.rms_norm(found, (HIDDEN,), None, EPS) * weights.float()
    if norm == "all":
        found = rms(found.flatten(1), weights.flatten(), EPS).view(found.shape)
    assert_near(out, found.flatten(1), dtype)


def input_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, and the norms of embeddings and of hidden states."""
    norms = (1 + 0.1 * noise(2, HIDDEN, seed=4)).to(dtype)
    return noise(40, HIDDEN, seed=3).to(dtype), norms[0], norms[1]


def entered(
    weights: tuple[Tensor, Tensor, Tensor], tokens: list[int], hidden: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    table, embed_norm, hidden_norm = weights
    right = rms(hidden, hidden_norm, EPS)
    seen = torch.cat([rms(table[tokens], embed_norm, EPS), right], 1)
    return seen, right if normed else hidden


@both
@pytest.mark.parametrize("normed", [False, True])
def test_enter(normed: bool, dtype: torch.dtype) -> None:
    weights, tokens, features = input_weights(dtype), [3, 39, 0], noise(3, HIDDEN).to(dtype)
    seen, x = torch.empty(3, 2 * HIDDEN, dtype=dtype), torch.empty(3, HIDDEN, dtype=dtype)
    kernels.enter[(3,)](
        torch.tensor(tokens), features, *weights, seen, x, EPS,
        HIDDEN=HIDDEN, BLOCK=128, NORMS_RESIDUAL=normed,
    )  # fmt: skip
    for found, truth in zip((seen, x), entered(weights, tokens, features, normed), strict=True):
        assert_near(found, truth, dtype)


# ------------------------------------------------------------ the pool of candidate nodes

TEXTS, POOL, EXPANDED, LEVELS, CHILDREN = 2, 64, 3, 4, 4
BLOCK = EXPANDED * (LEVELS - 1)  # nodes that are expanded


def pool() -> SimpleNamespace:
    def whole(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    return SimpleNamespace(
        tokens=torch.zeros(TEXTS, POOL, dtype=torch.int64),
        confidence=torch.full((TEXTS, POOL), torch.nan),
        parents=whole(TEXTS, POOL),  # in the block
        depths=whole(TEXTS, POOL),
        levels=whole(TEXTS, POOL),  # at which it was expanded, or 0
        pool_parents=whole(TEXTS, POOL),
        chosen=whole(TEXTS, BLOCK),
        counts=torch.tensor([1, 3]),
    )


Candidates = list[dict[str, Any]]  # of one text, in the order of the pool


def likeliest(rows: Candidates) -> list[int]:
    """The next ones to expand."""
    free = [at for at, row in enumerate(rows) if not row["level"]]
    return sorted(free, key=lambda at: (-rows[at]["confidence"], at))[:EXPANDED]


def candidates(text: int, levels: int, noise: torch.Generator) -> Candidates:
    """Children of the root, and of the likeliest at each further level."""
    rows: Candidates = []
    nodes = [(-1, -1, 1.0, 0)]  # place in the block, in the pool, confidence, depth
    for level in range(1, levels + 1):
        for own, at, confidence, depth in nodes:
            shares = torch.rand(CHILDREN, generator=noise).sort(descending=True).values.tolist()
            rows += [
                {
                    "token": (7 * (len(rows) + child) + text) % 40,
                    "confidence": confidence * share,
                    "parent": own,
                    "depth": depth + 1,
                    "level": 0,
                    "pool_parent": at,
                }
                for child, share in enumerate(shares)
            ]
        if level < levels:
            best = likeliest(rows)
            for at in best:
                rows[at]["level"] = level
            owns = range((level - 1) * EXPANDED, level * EXPANDED)
            pairs = zip(owns, best, strict=True)
            nodes = [(own, at, rows[at]["confidence"], rows[at]["depth"]) for own, at in pairs]
    return rows


def filled(levels: int) -> tuple[SimpleNamespace, list[Candidates]]:
    """A pool after so many levels, and the same as plain candidates."""
    made, generator = pool(), torch.Generator().manual_seed(levels)
    plain = [candidates(text, levels, generator) for text in range(TEXTS)]
    for text, rows in enumerate(plain):
        for at, row in enumerate(rows):
            made.tokens[text, at], made.confidence[text, at] = row["token"], row["confidence"]
            made.parents[text, at], made.depths[text, at] = row["parent"], row["depth"]
            made.levels[text, at], made.pool_parents[text, at] = row["level"], row["pool_parent"]
            row["confidence"] = float(made.confidence[text, at])  # as float32
        for level in range(1, levels):
            chosen = [at for at, row in enumerate(rows) if row["level"] == level]
            chosen.sort(key=lambda at: -rows[at]["confidence"])
            start = (level - 1) * EXPANDED
            made.chosen[text, start : start + EXPANDED] = torch.tensor(chosen)
    return made, plain


@both
@pytest.mark.parametrize("options", [(False, False), (True, True)])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_expand(level: int, options: tuple[bool, bool], dtype: torch.dtype) -> None:
    """The likeliest that were not chosen yet, each beside the output for its parent."""
    normed, norms_output = options
    made, plain = filled(level)
    width, weights = 3, input_weights(dtype)
    norm = (1 + 0.1 * noise(HIDDEN, seed=8)).to(dtype)
    roots, outputs = noise(TEXTS * width, HIDDEN).to(dtype), noise(TEXTS * BLOCK, HIDDEN, seed=5)
    outputs = outputs.to(dtype)
    depths, ancestors = (torch.full((TEXTS, BLOCK), -5) for _ in range(2))
    for text, rows in enumerate(plain):
        for own in range((level - 1) * EXPANDED):
            row = rows[int(made.chosen[text, own])]
            above = int(ancestors[text, row["parent"]]) if row["parent"] >= 0 else 0
            ancestors[text, own] = above | 1 << own
    rows_of_pass = TEXTS * EXPANDED
    seen, x = (torch.empty(rows_of_pass, n * HIDDEN, dtype=dtype) for n in (2, 1))
    kernels.expand[(TEXTS, EXPANDED)](
        made.tokens, made.confidence, made.parents, made.depths, made.levels, made.chosen, depths,
        ancestors, made.counts, roots, outputs, *weights, norm, seen, x, EPS,
        level, len(plain[0]), EXPANDED, BLOCK, width,
        POOL=POOL, NORMS_OUTPUT=norms_output, HIDDEN=HIDDEN, BLOCK=128, NORMS_RESIDUAL=normed,
    )  # fmt: skip
    tokens, hidden = [], []
    for text, rows in enumerate(plain):
        for which, at in enumerate(likeliest(rows)):
            own, row = (level - 1) * EXPANDED + which, rows[at]
            assert int(made.chosen[text, own]) == at
            assert int(made.levels[text, at]) == level
            assert int(depths[text, own]) == row["depth"] - 1
            above = int(ancestors[text, row["parent"]]) if row["parent"] >= 0 else 0
            assert int(ancestors[text, own]) == above | 1 << own
            tokens.append(row["token"])
            if row["parent"] < 0:
                hidden.append(roots[text * width + int(made.counts[text]) - 1])
            else:
                before, place = divmod(row["parent"], EXPANDED)
                hidden.append(outputs[before * rows_of_pass + text * EXPANDED + place])
    inputs = torch.stack(hidden).float()
    if norms_output:
        inputs = rms(inputs, norm, EPS).to(dtype).float()
    for found, truth in zip((seen, x), entered(weights, tokens, inputs, normed), strict=True):
        assert_near(found, truth, dtype)


def branched(
    level: int, logits: Tensor, vocabulary: Tensor | None, tile: int = 16
) -> tuple[SimpleNamespace, list[Candidates]]:
    """The pool after `branch` at a level whose nodes' logits these are, [rows, D]."""
    made, plain = filled(level + 1)
    size, width = logits.shape[1], 3
    filled_to = CHILDREN * (1 + max(0, level - 1) * EXPANDED) if level else 0
    for part in (made.tokens, made.confidence, made.parents, made.depths, made.pool_parents):
        part[:, filled_to:] = -9
    made.levels[:, filled_to:] = 9
    tiles = -(-size // tile)
    wide = F.pad(logits.float(), (0, tiles * tile - size), value=-torch.inf)
    wide = wide.view(-1, tiles, tile)
    wide = wide.where(~wide.isnan(), torch.inf)  # as `linear` leaves them
    tops = wide.max(-1).values
    sums = (wide - tops[..., None]).exp().sum(-1)
    count = EXPANDED if level else 1
    kernels.branch[(TEXTS, count)](
        logits, tops, sums, made.tokens if vocabulary is None else vocabulary, made.tokens,
        made.confidence, made.parents, made.depths, made.levels, made.pool_parents, made.chosen,
        made.counts, level, EXPANDED, BLOCK, width, tiles, TILES=power_of_two(tiles), TILE=tile,
        ROOT=level == 0, POOL=POOL, CHILDREN=CHILDREN, TOKENS=size, WHOLE=vocabulary is None,
    )  # fmt: skip
    return made, plain


def nodes_of(made: SimpleNamespace, plain: Any, level: int) -> list[tuple[int, int, int, Any]]:
    """Text, row of the logits, place in the block, and candidate, of every node of a level."""
    if level == 0:
        root = {"confidence": 1.0, "depth": 0}
        return [(t, t * 3 + int(made.counts[t]) - 1, -1, (-1, root)) for t in range(TEXTS)]
    found = []
    for text in range(TEXTS):
        for which in range(EXPANDED):
            own = (level - 1) * EXPANDED + which
            at = int(made.chosen[text, own])
            found.append((text, text * EXPANDED + which, own, (at, plain[text][at])))
    return found


def check_children(
    made: SimpleNamespace, plain: Any, level: int, probs: Tensor, vocabulary: Tensor | None
) -> None:
    for text, row, own, (at, node) in nodes_of(made, plain, level):
        part = slice((own + 1) * CHILDREN, (own + 2) * CHILDREN)
        values, places = probs[row].topk(CHILDREN)
        tokens = places if vocabulary is None else vocabulary[places]
        likely = values > 0
        confidence = made.confidence[text, part]
        assert made.tokens[text, part][likely].tolist() == tokens[likely].tolist()
        assert torch.allclose(confidence, node["confidence"] * values.float(), rtol=1e-4, atol=1e-9)
        assert made.parents[text, part].tolist() == [own] * CHILDREN
        assert made.pool_parents[text, part].tolist() == [at] * CHILDREN
        assert made.depths[text, part].tolist() == [node["depth"] + 1] * CHILDREN
        assert made.levels[text, part].tolist() == [0] * CHILDREN


@both
@pytest.mark.parametrize("size", [200, 48, 40, 17])
@pytest.mark.parametrize(("level", "whole"), [(0, True), (1, False), (3, True)])
def test_branch(level: int, whole: bool, size: int, dtype: torch.dtype) -> None:
    """Also for vocabularies of fewer tiles than children: no token joins twice."""
    orders = torch.stack([noise(size, seed=row).argsort() for row in range(9)])
    logits = (orders / 16).to(dtype)  # no two are equal
    vocabulary = None if whole else torch.arange(size) * 3 + 1
    made, plain = branched(level, logits, vocabulary)
    check_children(made, plain, level, logits.float().softmax(-1), vocabulary)


@both
def test_branch_leaves_out_what_is_no_number(dtype: torch.dtype) -> None:
    """A NaN makes the sum unknown: no guess of its node is likely, others are as they were."""
    logits = noise(9, 64, scale=3.0).to(dtype)
    logits[0, 20] = torch.nan
    made, _ = branched(1, logits, None)
    clean, plain = branched(1, logits.nan_to_num(0.0), None)
    for text, row, own, _ in nodes_of(made, plain, 1):
        part = slice((own + 1) * CHILDREN, (own + 2) * CHILDREN)
        assert bool((made.tokens[text, part] < 64).all())
        if row == 0:
            assert made.confidence[text, part].tolist() == [0.0] * CHILDREN
        else:
            assert torch.equal(made.confidence[text, part], clean.confidence[text, part])


@both
@pytest.mark.parametrize(("level", "whole"), [(0, False), (2, True)])
def test_branch_sampled(level: int, whole: bool, dtype: torch.dtype) -> None:
    """What the target would draw with the same noise; and where it is greedy, what is likely."""
    size, deepest = 50, LEVELS
    logits = noise(9, size, seed=6, scale=2.0).to(dtype)
    made, plain = filled(level + 1)
    vocabulary = None if whole else torch.arange(size) * 3 + 1
    keys = torch.randint(-(1 << 62), 1 << 62, (TEXTS, deepest))
    temperature = torch.tensor([0, round(0.8 * CONFIDENCE_SCALE)])
    kernels.branch_sampled[(TEXTS, EXPANDED if level else 1)](
        logits, keys, temperature, made.tokens if whole else vocabulary, made.tokens,
        made.confidence, made.parents, made.depths, made.levels, made.pool_parents, made.chosen,
        made.counts, level, EXPANDED, BLOCK, 3, deepest, BLOCK=64,
        ROOT=level == 0, POOL=POOL, CHILDREN=CHILDREN, TOKENS=size, WHOLE=whole, num_warps=16,
    )  # fmt: skip
    ids = torch.arange(size) if vocabulary is None else vocabulary
    probs = torch.empty(9, size)
    for text, row, _, (_, node) in nodes_of(made, plain, level):
        one = logits[row].double()
        if text == 1:
            key = int(keys[text, node["depth"]])
            arrival = -uniforms([key], int(ids.max()) + 1)[0, ids].log()
            weight = (one / 0.8).softmax(-1) / arrival
        else:
            weight = one.softmax(-1)
        probs[row] = (weight / weight.sum()).float()
    check_children(made, plain, level, probs, vocabulary)


@pytest.mark.parametrize("size", [2, 9, 16])
def test_select(size: int) -> None:
    """The likeliest candidates of three levels, parents before children."""
    made, plain = filled(3)
    made.confidence[0, 5] = made.confidence[0, 2]  # equals: the first one counts
    plain[0][5]["confidence"] = plain[0][2]["confidence"]
    trees = torch.full((TEXTS, 3, size), -5)
    trees[:, 1, 0] = -1
    kernels.select[(TEXTS,)](
        made.tokens, made.confidence, made.pool_parents, trees, len(plain[0]), size, POOL=POOL
    )
    for text, rows in enumerate(plain):
        ranked = sorted(range(len(rows)), key=lambda at: (-rows[at]["confidence"], at))
        kept = sorted(ranked[: size - 1])
        place = {at: node for node, at in enumerate(kept, start=1)} | {-1: 0}
        tokens, parents, confidence = trees[text].tolist()
        assert tokens[1:] == [rows[at]["token"] for at in kept]
        expected = [place.get(rows[at]["pool_parent"], -99) for at in kept]
        if text == 1:  # in the other one, a node has become likelier than its parent may be
            assert parents[1:] == expected
        assert confidence[1:] == [int(rows[at]["confidence"] * CONFIDENCE_SCALE) for at in kept]
