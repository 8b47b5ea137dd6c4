"""Triton kernels of one pass over a few rows of a llama-shaped decoder, for half precision.

A pass over few rows is bound by reading weights, so each kernel streams its weights once and uses
a tile for all rows while it is on the chip. What stands between two linear layers costs launches
rather than bytes, so it is done inside them: five kernels a layer, six for a long text.

Sums run in one fixed order and nothing is added atomically: the same pass gives the same bits.
Roundings follow the model's own forward: half precision between the operations, float32 inside.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plant(
    roots, trees, tokens, depths, ancestors, vocabulary, NODES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Tokens, depths and ancestors of a text's tree that no host has looked at. Whatever stands
    there, node 0 is the root, tokens are known ones, and parents stand before their children."""
    text, node = tl.program_id(0), tl.arange(0, BLOCK)
    inside, at = node < NODES, text * NODES + node
    tree = trees + text * 2 * NODES + node
    token = tl.load(tree, mask=inside, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    token = tl.where(node == 0, tl.load(roots + text), token)
    parent = tl.load(tree + NODES, mask=inside, other=0)
    parent = tl.minimum(tl.maximum(parent, 0), node - 1).to(tl.int32)  # the root's is -1
    depth = tl.zeros((BLOCK,), tl.int64)
    seen = tl.full((BLOCK,), 1, tl.int64) << node
    above = parent
    for _ in range(1, NODES):
        leads = above >= 0
        depth += leads.to(tl.int64)
        seen |= tl.where(leads, tl.full((BLOCK,), 1, tl.int64) << tl.maximum(above, 0), 0)
        higher = tl.sum(tl.where(above[:, None] == node[None, :], parent[None, :], 0), 1)
        above = tl.where(leads, higher, -1)
    tl.store(tokens + at, token, mask=inside)
    tl.store(depths + at, depth, mask=inside)
    tl.store(ancestors + at, seen, mask=inside)


@triton.jit
def embed(
    tokens, table, norm, x, scaled, squares,
    HIDDEN: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[r] = table[tokens[r]], and what the first norm needs of it."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    value = tl.load(table + token * HIDDEN + at, mask=inside, other=0.0)
    tl.store(x + row * HIDDEN + at, value, mask=inside)
    wide = value.to(tl.float32)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * HIDDEN + at, (wide * weight * SHIFT).to(value.dtype), mask=inside)
    part = tl.arange(0, PARTS)
    total = tl.sum(wide * wide, 0)
    tl.store(squares + row * PARTS + part, tl.where(part == 0, total, 0.0))


@triton.jit
def _inverse_rms(squares, row, inside, IN: tl.constexpr, PARTS: tl.constexpr, eps):
    """[ROWS] 1 / root mean square, from the partial sums that the last kernel left."""
    part = tl.arange(0, PARTS)
    found = tl.load(squares + row[:, None] * PARTS + part[None, :], mask=inside[:, None], other=0.0)
    return 1.0 / tl.sqrt_rn(tl.sum(found, 1) / IN + eps)


@triton.jit(do_not_specialize=["count", "out0", "out1"])
def linear(
    x, squares, eps, w0, w1, w2, b0, b1, b2, out0, out1,
    y, residual, norm, scaled, squares_out, tops, places, sums, count,
    IN: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
    NORMED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BEST: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y[r] = w @ x[r] (+ bias) (+ residual[r]); up to three weights side by side.

    A norm is one factor a row and one a column. With `NORMED`, x comes with the columns' factors
    applied, and the row's factor, which needs all of the row, is applied to the result. With a
    residual, y is prepared for the next norm the same way: `scaled`, and the squares of what was
    written, a partial sum a program. With `BEST`, each program also tells its largest output, and
    with `SUMS` how much all of its outputs are beside that, as logits.
    """
    pid = tl.program_id(0)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    inside = row < count
    weight, bias, local = w0, b0, n
    if SEGMENTS > 1:
        if pid * BLOCK_N >= out0 + out1:
            weight, bias, local = w2, b2, n - out0 - out1
        elif pid * BLOCK_N >= out0:
            weight, bias, local = w1, b1, n - out0
    local = tl.minimum(local, OUT - 1)  # behind the last output: computed, not written
    k = tl.arange(0, BLOCK_K)
    w_at = weight + local.to(tl.int64)[:, None] * IN + k[None, :]
    x_at = x + row[:, None] * IN + k[None, :]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, IN, BLOCK_K):
        if EVEN:
            w_tile = tl.load(w_at, eviction_policy="evict_first")
            x_tile = tl.load(x_at, mask=inside[:, None], other=0.0, eviction_policy="evict_last")
        else:
            here = (start + k < IN)[None, :]
            w_tile = tl.load(w_at, mask=here, other=0.0)
            x_tile = tl.load(x_at, mask=inside[:, None] & here, other=0.0)
        acc = tl.dot(w_tile, x_tile.T, acc)
        w_at += BLOCK_K
        x_at += BLOCK_K
    if NORMED:
        acc *= (_inverse_rms(squares, row, inside, IN, PARTS, eps) / SHIFT)[None, :]
    written = inside[None, :] & (n < OUT)[:, None]
    if BIAS:
        acc += tl.load(bias + local).to(tl.float32)[:, None]
    value = acc.to(y.dtype.element_ty)
    at = row[None, :] * OUT + n[:, None]
    if RESIDUAL:
        value += tl.load(residual + at, mask=written, other=0.0)
        wide = value.to(tl.float32)
        part = tl.sum(tl.where(written, wide * wide, 0.0), 0)
        tl.store(squares_out + row * PARTS + pid, part, mask=inside)
        factor = tl.load(norm + local).to(tl.float32) * SHIFT
        tl.store(scaled + at, (wide * factor[:, None]).to(value.dtype), mask=written)
    if BEST:
        wide = value.to(tl.float32)
        wide = tl.where(wide == wide, wide, float("inf"))  # NaN must not hide behind a number
        wide = tl.where((n < OUT)[:, None], wide, float("-inf"))
        top, place = tl.max(wide, 0, return_indices=True)
        tl.store(tops + row * tl.num_programs(0) + pid, top, mask=inside)
        tl.store(places + row * tl.num_programs(0) + pid, pid * BLOCK_N + place, mask=inside)
        if SUMS:
            total = tl.sum(tl.exp(wide - top[None, :]), 0)
            tl.store(sums + row * tl.num_programs(0) + pid, total, mask=inside)
    tl.store(y + at, value, mask=written)


@triton.jit(do_not_specialize=["tiles"])
def pick(tops, places, best, tiles, BLOCK: tl.constexpr):
    """best[r] = index of the largest logit, the first of equals; -1 where it is not finite."""
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    top = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    most, winner = tl.max(top, 0, return_indices=True)
    place = tl.load(places + row * tiles + winner).to(tl.int64)
    tl.store(best + row, tl.where(tl.abs(most) < float("inf"), place, -1))


@triton.jit(do_not_specialize=["count"])
def gated(
    x, squares, eps, gate, up, y, count,
    IN: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """y[r] = act(gate @ norm(x[r])) * (up @ norm(x[r])), normed as in `linear`."""
    pid = tl.program_id(0)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    inside = row < count
    local = tl.minimum(n, OUT - 1)
    k = tl.arange(0, BLOCK_K)
    offset = local.to(tl.int64)[:, None] * IN + k[None, :]
    gate_at, up_at = gate + offset, up + offset
    x_at = x + row[:, None] * IN + k[None, :]
    acc_gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, IN, BLOCK_K):
        if EVEN:
            g_tile = tl.load(gate_at, eviction_policy="evict_first")
            u_tile = tl.load(up_at, eviction_policy="evict_first")
            x_tile = tl.load(x_at, mask=inside[:, None], other=0.0, eviction_policy="evict_last")
        else:
            here = (start + k < IN)[None, :]
            g_tile = tl.load(gate_at, mask=here, other=0.0)
            u_tile = tl.load(up_at, mask=here, other=0.0)
            x_tile = tl.load(x_at, mask=inside[:, None] & here, other=0.0)
        acc_gate = tl.dot(g_tile, x_tile.T, acc_gate)
        acc_up = tl.dot(u_tile, x_tile.T, acc_up)
        gate_at += BLOCK_K
        up_at += BLOCK_K
        x_at += BLOCK_K
    inverse = (_inverse_rms(squares, row, inside, IN, PARTS, eps) / SHIFT)[None, :]
    kind = y.dtype.element_ty
    wide = (acc_gate * inverse).to(kind).to(tl.float32)
    if SILU:
        active = wide / (1.0 + tl.exp(-wide))
    else:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = wide / (1.0 + tl.exp(-2.0 * inner))
    value = active.to(kind) * (acc_up * inverse).to(kind)
    written = inside[None, :] & (n < OUT)[:, None]
    tl.store(y + row[None, :] * OUT + n[:, None], value, mask=written)


@triton.jit
def _turned(low, high, cos, sin, position, half, WIDTH: tl.constexpr):
    """Rotates the halves of [R, WIDTH] by their positions: x cos + rotate_half(x) sin."""
    at = position[:, None] * WIDTH + half[None, :]
    cos_low, sin_low = tl.load(cos + at).to(tl.float32), tl.load(sin + at).to(tl.float32)
    at += WIDTH // 2
    cos_high, sin_high = tl.load(cos + at).to(tl.float32), tl.load(sin + at).to(tl.float32)
    kind = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    return (low * cos_low - high * sin_low).to(kind), (high * cos_high + low * sin_high).to(kind)


@triton.jit
def _head_normed(low, high, weight, half, eps, WIDTH: tl.constexpr):
    """The norm over a head that some models apply before they rotate."""
    kind = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    total = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
    inverse = 1.0 / tl.sqrt_rn(total / WIDTH + eps)
    low = (wide_low * inverse[:, None]).to(kind) * tl.load(weight + half)[None, :]
    high = (wide_high * inverse[:, None]).to(kind) * tl.load(weight + WIDTH // 2 + half)[None, :]
    return low, high


@triton.jit
def _finite(value):
    """0 for what is not finite: see CacheWindow in kvcache.py."""
    wide = value.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(value.dtype)


@triton.jit(
    do_not_specialize=[
        "nodes",
        "before",
        "block_nodes",
        "first",
        "slots",
        "last_position",
        "window",
    ]
)
def attend(
    qkv, keys, values, cos, sin, q_norm, k_norm, eps,
    real, lengths, depths, ancestors, first, last_position,
    mixed, partial, tops, totals, nodes, before, block_nodes, slots, scaling, window,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, HEAD_NORM: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """All queries of one text that share a key head, over one stretch of its keys.

    New keys are rotated here, used from registers, and put into the cache on the way: by the one
    program whose stretch they lie in. Each key is reduced in the lane of its slot, so a chain's
    sums do not depend on which of its tokens were guesses. `before` nodes of the block are in the
    cache already, from earlier passes: seen by those that they lead to.
    """
    text = tl.program_id(0) // KEY_HEADS
    head = tl.program_id(0) % KEY_HEADS
    split = tl.program_id(1)
    block_of_queries = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    HALF: tl.constexpr = WIDTH // 2
    ALL: tl.constexpr = (HEADS + 2 * KEY_HEADS) * WIDTH
    half, whole = tl.arange(0, HALF), tl.arange(0, WIDTH)
    query = block_of_queries * QUERIES + tl.arange(0, QUERIES)
    node = query % nodes
    asks = query < GROUP * nodes
    length = tl.load(lengths + text).to(tl.int32)
    text_nodes = tl.load(real).to(tl.int32)  # nodes that belong to the text; guesses follow
    depth = tl.load(depths + text * block_nodes + before + node).to(tl.int32)
    seen = tl.load(ancestors + text * block_nodes + before + node)

    # Queries: heads of the group by nodes, [QUERIES, WIDTH] in two halves.
    q_at = (text * nodes + node) * ALL + (head * GROUP + query // nodes) * WIDTH
    q_low = tl.load(qkv + q_at[:, None] + half[None, :], mask=asks[:, None], other=0.0)
    q_high = tl.load(qkv + q_at[:, None] + HALF + half[None, :], mask=asks[:, None], other=0.0)
    if HEAD_NORM:
        q_low, q_high = _head_normed(q_low, q_high, q_norm, half, eps, WIDTH)
    position = tl.minimum(length + depth, last_position)
    q_low, q_high = _turned(q_low, q_high, cos, sin, position, half, WIDTH)

    base = ((first + text) * KEY_HEADS + head).to(tl.int64) * slots * WIDTH
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    for block in tl.static_range(BLOCKS):
        start = (split * BLOCKS + block) * BLOCK
        slot = start + tl.arange(0, BLOCK)
        k_at = base + slot[:, None] * WIDTH + half[None, :]
        v_at = base + slot[:, None] * WIDTH + whole[None, :]
        # What lies behind the text is finite garbage: hidden below, and no reason to wait here.
        k_low = tl.load(keys + k_at, mask=(slot < slots)[:, None], other=0.0)
        k_high = tl.load(keys + k_at + HALF, mask=(slot < slots)[:, None], other=0.0)
        value = tl.load(values + v_at, mask=(slot < slots)[:, None], other=0.0)
        held = slot < length
        apart = depth[:, None] + length - slot[None, :]
        visible = held[None, :] & asks[:, None]
        if (start + BLOCK > length) & (start < length + before + nodes):
            other = tl.maximum(slot - length, 0)
            in_block = (slot >= length) & (other < before + nodes)
            fresh = in_block & (other >= before)
            n_at = (text * nodes + other - before) * ALL + (HEADS + head) * WIDTH
            n_low = tl.load(qkv + n_at[:, None] + half[None, :], mask=fresh[:, None], other=0.0)
            n_high = tl.load(
                qkv + n_at[:, None] + HALF + half[None, :], mask=fresh[:, None], other=0.0
            )
            v_from = n_at[:, None] + KEY_HEADS * WIDTH + whole[None, :]
            n_value = tl.load(qkv + v_from, mask=fresh[:, None], other=0.0)
            d_at = depths + text * block_nodes + other
            other_depth = tl.load(d_at, mask=in_block, other=0).to(tl.int32)
            if HEAD_NORM:
                n_low, n_high = _head_normed(n_low, n_high, k_norm, half, eps, WIDTH)
            other_position = tl.minimum(length + other_depth, last_position)
            n_low, n_high = _turned(n_low, n_high, cos, sin, other_position, half, WIDTH)
            guess = (other >= text_nodes)[:, None]
            n_low = tl.where(guess, _finite(n_low), n_low)
            n_high = tl.where(guess, _finite(n_high), n_high)
            n_value = tl.where(guess, _finite(n_value), n_value)
            if block_of_queries == 0:
                tl.store(keys + k_at, n_low, mask=fresh[:, None])
                tl.store(keys + k_at + HALF, n_high, mask=fresh[:, None])
                tl.store(values + v_at, n_value, mask=fresh[:, None])
            k_low = tl.where(fresh[:, None], n_low, k_low)
            k_high = tl.where(fresh[:, None], n_high, k_high)
            value = tl.where(fresh[:, None], n_value, value)
            leads = ((seen[:, None] >> other[None, :].to(tl.int64)) & 1) == 1
            visible = visible | (in_block[None, :] & leads)
            apart = tl.where(in_block[None, :], depth[:, None] - other_depth[None, :], apart)
        visible = visible & (apart < window)
        scores = tl.dot(q_low, k_low.T)
        scores = tl.dot(q_high, k_high.T, scores)
        # The model's own forward rounds the scores before it scales them.
        scores = (scores.to(value.dtype).to(tl.float32) * scaling).to(value.dtype).to(tl.float32)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(scores - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc)
        top = new_top
    out_row = (text * nodes + node) * HEADS + head * GROUP + query // nodes
    if SPLITS == 1:
        at = out_row[:, None] * WIDTH + whole[None, :]
        tl.store(mixed + at, (acc / total[:, None]).to(mixed.dtype.element_ty), mask=asks[:, None])
    else:
        at = out_row * SPLITS + split
        tl.store(partial + at[:, None] * WIDTH + whole[None, :], acc, mask=asks[:, None])
        tl.store(tops + at, top, mask=asks)
        tl.store(totals + at, total, mask=asks)


@triton.jit
def combine(mixed, partial, tops, totals, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Joins what the stretches of keys gave for one query of one head."""
    row = tl.program_id(0)
    split, whole = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    top = tl.load(tops + row * SPLITS + split)
    found = tl.load(totals + row * SPLITS + split)
    at = (row * SPLITS + split)[:, None] * WIDTH + whole[None, :]
    acc = tl.load(partial + at)
    share = tl.exp(top - tl.max(top, 0))
    acc = tl.sum(acc * share[:, None], 0) / tl.sum(share * found, 0)
    tl.store(mixed + row * WIDTH + whole, acc.to(mixed.dtype.element_ty))
