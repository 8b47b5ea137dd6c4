"""Triton kernels that grow trees of guesses with a trained head, without a look by the host.

For each text there is a pool of guesses, four (`CHILDREN`) below the root and below each node that
the tree went on from: those are its block, `nodes` at each level. Level by level the likeliest of
the pool that were not gone on from are (`expand`), and get children in turn (`branch`); at the end
the likeliest of all are the draft (`select`). As growth.Grower does it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftahead.core import draft

CONFIDENCE_SCALE = tl.constexpr(draft.CONFIDENCE_SCALE)


@triton.jit
def _normed(value, weight, inside, at, eps, HIDDEN: tl.constexpr):
    """The root mean square norm of a row, as float32."""
    wide = value.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / HIDDEN + eps)
    return wide * inverse * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["width", "slots"])
def fuse(
    states, places, weights, out, at_slots, width, slots, stride, eps,
    PARTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The target's states in `width` slots of a text side by side, [rows, PARTS * HIDDEN]; each
    of them normed ("each"), all of them as one ("all"), or as they are ("none")."""
    row = tl.program_id(0)
    text = row // width
    slot = tl.minimum(tl.load(at_slots + row), slots - 1)
    source = states + (text.to(tl.int64) * slots + slot) * stride
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    squares = 0.0
    if NORM == "all":
        for part in tl.static_range(PARTS):
            from_ = source + tl.load(places + part) * HIDDEN
            wide = tl.load(from_ + at, mask=inside, other=0.0).to(tl.float32)
            squares += tl.sum(wide * wide, 0)
    for part in tl.static_range(PARTS):
        from_ = source + tl.load(places + part) * HIDDEN
        value = tl.load(from_ + at, mask=inside, other=0.0).to(tl.float32)
        if NORM == "each":
            value = _normed(value, weights + part * HIDDEN, inside, at, eps, HIDDEN)
        if NORM == "all":
            inverse = 1.0 / tl.sqrt_rn(squares / (PARTS * HIDDEN) + eps)
            weight = tl.load(weights + part * HIDDEN + at, mask=inside, other=0.0)
            value = value * inverse * weight.to(tl.float32)
        to = out + (row * PARTS + part) * HIDDEN + at
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _enter(
    token, hidden, row, embeddings, embed_norm, hidden_norm, seen, x, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORMS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What the first layer looks at, and what its residual starts from."""
    kind = seen.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    embedded = tl.load(embeddings + token.to(tl.int64) * HIDDEN + at, mask=inside, other=0.0)
    embedded = _normed(embedded, embed_norm, inside, at, eps, HIDDEN).to(kind)
    normed = _normed(hidden, hidden_norm, inside, at, eps, HIDDEN).to(kind)
    tl.store(seen + row * 2 * HIDDEN + at, embedded, mask=inside)
    tl.store(seen + row * 2 * HIDDEN + HIDDEN + at, normed, mask=inside)
    tl.store(x + row * HIDDEN + at, normed if NORMS_RESIDUAL else hidden.to(kind), mask=inside)


@triton.jit
def enter(
    tokens, features, embeddings, embed_norm, hidden_norm, seen, x, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORMS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Pairs of the text: tokens, and the target's states before them."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    hidden = tl.load(features + row * HIDDEN + at, mask=at < HIDDEN, other=0.0)
    _enter(
        tl.load(tokens + row), hidden, row, embeddings, embed_norm, hidden_norm, seen, x, eps,
        HIDDEN, BLOCK, NORMS_RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["level", "filled", "nodes", "all_nodes", "width"])
def expand(
    said, likely, aboves, deep, since, chosen, depths, ancestors, counts, roots, outputs,
    embeddings, embed_norm, hidden_norm, norm, seen, x, eps,
    level, filled, nodes, all_nodes, width,
    POOL: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORMS_RESIDUAL: tl.constexpr,
    NORMS_OUTPUT: tl.constexpr,
):  # fmt: skip
    """Chooses a text's nodes to go on from at this level, each program one of them, and lets it in
    beside what the head made of its parent. `since` says at which level a guess was chosen: other
    programs may be writing it just now."""
    text, which = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, POOL)
    pool = text * POOL + index
    inside = index < filled
    taken = tl.load(since + pool, mask=inside, other=1)
    chance = tl.load(likely + pool, mask=inside, other=0.0)
    chance = tl.where(inside & ((taken == 0) | (taken >= level)), chance, -1.0)
    best = tl.argmax(chance, 0)
    for _ in range(which):
        chance = tl.where(index == best, -1.0, chance)
        best = tl.argmax(chance, 0)
    guess = text * POOL + best
    own = (level - 1) * nodes + which
    node = text * all_nodes + own
    tl.store(since + guess, level)
    tl.store(chosen + node, best)
    above = tl.load(aboves + guess)  # in the block; -1 is the root
    parent = tl.load(ancestors + text * all_nodes + above, mask=above >= 0, other=0)
    tl.store(ancestors + node, parent | (tl.full((), 1, tl.int64) << own))
    tl.store(depths + node, tl.load(deep + guess).to(tl.int64) - 1)
    at = tl.arange(0, BLOCK)
    # Outputs lie level by level, texts side by side.
    texts = tl.num_programs(0)
    place = above // nodes * texts * nodes + text * nodes + above % nodes
    root = roots + (text * width + tl.load(counts + text) - 1) * HIDDEN
    source = root if above < 0 else outputs + place * HIDDEN
    hidden = tl.load(source + at, mask=at < HIDDEN, other=0.0)
    if NORMS_OUTPUT:
        hidden = _normed(hidden, norm, at < HIDDEN, at, eps, HIDDEN).to(hidden.dtype)
    _enter(
        tl.load(said + guess), hidden, text * nodes + which, embeddings, embed_norm, hidden_norm,
        seen, x, eps, HIDDEN, BLOCK, NORMS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _mixed(x):
    """splitmix64, as in sampling.py."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _arrival(key, token):
    """-log of a uniform number: when a token arrives in the target's own race."""
    bits = (_mixed(key + token * -7046029254386353131) >> 12) & 0xFFFFFFFFFFFFF
    low = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16
    # Counted from above where that is the nearer end: float32 is dense at 0 only.
    high = ((0x10000000000000 - bits).to(tl.float32) - 0.5) * 2.220446049250313e-16
    near = high * (1.0 + high * (0.5 + high * (0.33333333 + high * 0.25)))
    return tl.where(high < 0.02, near, -tl.log(tl.where(high < 0.02, 0.5, low)))


@triton.jit
def _node(chosen, likely, deep, counts, level, nodes, all_nodes, width, POOL: tl.constexpr,
          ROOT: tl.constexpr):  # fmt: skip
    """Which node a program is for: its row of the pass, its places in the block and the pool (-1:
    the root), its likelihood and its depth."""
    text, which = tl.program_id(0), tl.program_id(1)
    if ROOT:
        return text * width + tl.load(counts + text) - 1, -1, -1, 1.0, 0
    else:  # noqa: RET505 (two functions to the compiler)
        own = (level - 1) * nodes + which
        guess = tl.load(chosen + text * all_nodes + own)
        before = tl.load(likely + text * POOL + guess)
        return text * nodes + which, own, guess, before, tl.load(deep + text * POOL + guess)


@triton.jit
def _join(said, likely, aboves, deep, since, higher, at, token, chance, own, guess, depth):
    """A guess enters the pool."""
    tl.store(said + at, token.to(tl.int64))
    tl.store(likely + at, tl.where(chance > 0, chance, 0.0))  # not where it is NaN
    tl.store(aboves + at, own)
    tl.store(higher + at, guess)
    tl.store(deep + at, depth + 1)
    tl.store(since + at, 0)


@triton.jit(do_not_specialize=["level", "nodes", "all_nodes", "width", "tiles"])
def branch(
    logits, tops, sums, vocabulary, said, likely, aboves, deep, since, higher, chosen, counts,
    level, nodes, all_nodes, width, tiles,
    ROOT: tl.constexpr, POOL: tl.constexpr, CHILDREN: tl.constexpr, TOKENS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The likeliest tokens after a node of this level, or after the root, join the pool. As many
    tiles of the vocabulary as tokens are looked at: those with the largest logits hold them."""
    row, own, guess, before, depth = _node(
        chosen, likely, deep, counts, level, nodes, all_nodes, width, POOL, ROOT
    )
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    top = tl.load(tops + row * tiles + tile, mask=inside, other=float("-inf"))
    total = tl.load(sums + row * tiles + tile, mask=inside, other=0.0)
    most = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - most), 0)
    lane = tl.arange(0, CHILDREN * TILE)
    place = lane % TILE
    for rank in tl.static_range(CHILDREN):
        largest, best = tl.max(top, 0, return_indices=True)
        top = tl.where(tile == best, float("-inf"), top)
        # Where no tile is left, the first would be found again, and its tokens join twice.
        start = tl.where(largest > float("-inf"), best * TILE, TOKENS)
        place = tl.where(lane // TILE == rank, start + place, place)
    said_of = logits + row.to(tl.int64) * TOKENS + place
    value = tl.load(said_of, mask=place < TOKENS, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    first = tl.program_id(0) * POOL + (own + 1) * CHILDREN
    for child in tl.static_range(CHILDREN):
        best, winner = tl.max(value, 0, return_indices=True)
        token = tl.sum(tl.where(lane == winner, place, 0), 0)
        value = tl.where(lane == winner, float("-inf"), value)
        chance = before * tl.minimum(tl.exp(best - most) / total, 1.0)
        token = tl.minimum(token, TOKENS - 1)
        if not WHOLE:
            token = tl.load(vocabulary + token)
        _join(
            said, likely, aboves, deep, since, higher, first + child, token, chance, own, guess,
            depth,
        )  # fmt: skip


@triton.jit(do_not_specialize=["level", "nodes", "all_nodes", "width", "deepest"])
def branch_sampled(
    logits, keys, warmth, vocabulary, said, likely, aboves, deep, since, higher, chosen, counts,
    level, nodes, all_nodes, width, deepest,
    ROOT: tl.constexpr, POOL: tl.constexpr, CHILDREN: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The same where some texts are sampled (warmth above 0): there likely is what the target would
    draw from this law, and any token may be that."""
    text = tl.program_id(0)
    row, own, guess, before, depth = _node(
        chosen, likely, deep, counts, level, nodes, all_nodes, width, POOL, ROOT
    )
    at = tl.arange(0, BLOCK)
    inside = at < TOKENS
    said_of = logits + row.to(tl.int64) * TOKENS + at
    value = tl.load(said_of, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    warm = tl.load(warmth + text).to(tl.float32) / CONFIDENCE_SCALE
    value = tl.where(warm > 0, value / tl.where(warm > 0, warm, 1.0), value)
    weight = tl.exp(value - tl.max(value, 0))
    token = at if WHOLE else tl.load(vocabulary + at, mask=inside, other=0)
    arrival = _arrival(tl.load(keys + text * deepest + depth), token.to(tl.int64))
    weight = tl.where(warm > 0, weight / arrival, weight)
    weight = weight / tl.sum(weight, 0)
    first = text * POOL + (own + 1) * CHILDREN
    for child in tl.static_range(CHILDREN):
        best, winner = tl.max(weight, 0, return_indices=True)
        weight = tl.where(at == winner, -1.0, weight)
        chance = before * tl.minimum(best, 1.0)
        found = winner if WHOLE else tl.load(vocabulary + winner)
        _join(
            said, likely, aboves, deep, since, higher, first + child, found, chance, own, guess,
            depth,
        )  # fmt: skip


@triton.jit(do_not_specialize=["filled", "size"])
def select(said, likely, higher, trees, filled, size, POOL: tl.constexpr):
    """The root and the likeliest `size` - 1 guesses of a text: tokens, parents and likelihoods."""
    text, index = tl.program_id(0), tl.arange(0, POOL)
    pool = text * POOL + index
    inside = index < filled
    chance = tl.load(likely + pool, mask=inside, other=-1.0)
    earlier = index[None, :] < index[:, None]
    ahead = (chance[None, :] > chance[:, None]) | ((chance[None, :] == chance[:, None]) & earlier)
    # No guess is likelier than its parent, which stands before it: so it comes with it.
    kept = inside & (tl.sum(ahead.to(tl.int32), 1) < size - 1)
    place = 1 + tl.sum((kept[None, :] & earlier).to(tl.int32), 1)
    above = tl.load(higher + pool, mask=inside, other=-1)
    parent = tl.sum(tl.where(above[:, None] == index[None, :], place[None, :], 0), 1)
    tree = trees + text * 3 * size + place
    tl.store(tree, tl.load(said + pool, mask=inside, other=0), mask=kept)
    tl.store(tree + size, parent.to(tl.int64), mask=kept)
    tl.store(tree + 2 * size, (chance * CONFIDENCE_SCALE).to(tl.int64), mask=kept)
