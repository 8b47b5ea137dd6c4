"""Triton kernels of a forward over a few nodes of a llama-shaped decoder, in half precision.

Such a forward is bound by reading weights, so each kernel streams its weights once and uses a tile
for all nodes while it is on the chip. The operations between two linear layers are launch-bound, so
they are fused into them: five kernels per layer, six if attention is split.

Sums run in one fixed order and nothing is added atomically: the same forward gives the same bits.
Rounding follows the model's own forward: half precision between operations, float32 inside.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_trees(
    roots, trees, tokens, depths, ancestors, vocab_size, NODES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Tokens, depths and ancestor bits of a sequence's device draft. Values of `trees` are clamped:
    node 0 is the root, tokens are in the vocabulary, and parents stand before their children."""
    seq, index = tl.program_id(0), tl.arange(0, BLOCK)
    inside, at = index < NODES, seq * NODES + index
    tree = trees + seq * 2 * NODES + index
    token = tl.load(tree, mask=inside, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    token = tl.where(index == 0, tl.load(roots + seq), token)
    parent = tl.load(tree + NODES, mask=inside, other=0)
    parent = tl.minimum(tl.maximum(parent, 0), index - 1).to(tl.int32)  # the root's is -1
    depth = tl.zeros((BLOCK,), tl.int64)
    bits = tl.full((BLOCK,), 1, tl.int64) << index
    ancestor = parent
    for _ in range(1, NODES):
        exists = ancestor >= 0
        depth += exists.to(tl.int64)
        bits |= tl.where(exists, tl.full((BLOCK,), 1, tl.int64) << tl.maximum(ancestor, 0), 0)
        parent_of = tl.sum(tl.where(ancestor[:, None] == index[None, :], parent[None, :], 0), 1)
        ancestor = tl.where(exists, parent_of, -1)
    tl.store(tokens + at, token, mask=inside)
    tl.store(depths + at, depth, mask=inside)
    tl.store(ancestors + at, bits, mask=inside)


@triton.jit
def embed(
    tokens, table, norm, x, scaled, squares,
    HIDDEN: tl.constexpr, NUM_PARTIALS: tl.constexpr, NORM_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[n] = table[tokens[n]], prepared for the first norm as in `linear`."""
    node = tl.program_id(0)
    token = tl.load(tokens + node)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    value = tl.load(table + token * HIDDEN + at, mask=inside, other=0.0)
    tl.store(x + node * HIDDEN + at, value, mask=inside)
    wide = value.to(tl.float32)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + node * HIDDEN + at, (wide * weight * NORM_SCALE).to(value.dtype), mask=inside)
    part = tl.arange(0, NUM_PARTIALS)
    total = tl.sum(wide * wide, 0)
    tl.store(squares + node * NUM_PARTIALS + part, tl.where(part == 0, total, 0.0))


@triton.jit
def _inverse_rms(squares, node, inside, IN: tl.constexpr, NUM_PARTIALS: tl.constexpr, eps):
    """[NODES] 1 / root mean square, from the partial sums of squares that the last kernel wrote."""
    part = tl.arange(0, NUM_PARTIALS)
    found = tl.load(
        squares + node[:, None] * NUM_PARTIALS + part[None, :], mask=inside[:, None], other=0.0
    )
    return 1.0 / tl.sqrt_rn(tl.sum(found, 1) / IN + eps)


@triton.jit(do_not_specialize=["num_nodes", "out0", "out1"])
def linear(
    x, squares, eps, w0, w1, w2, b0, b1, b2, out0, out1,
    y, residual, norm, scaled, squares_out, tile_max, tile_argmax, tile_sums, num_nodes,
    IN: tl.constexpr, OUT: tl.constexpr, NUM_PARTIALS: tl.constexpr, NORM_SCALE: tl.constexpr,
    NORMED: tl.constexpr, NUM_WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ARGMAX: tl.constexpr, SUMS: tl.constexpr,
    NODES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """y[n] = w @ x[n] (+ bias) (+ residual[n]); up to three weights side by side.

    An RMS norm is one factor per node and one per channel. With `NORMED`, x comes with the
    channels' factors applied, and the node's factor, which needs all channels, is applied to the
    result. With a residual, y is prepared for the next norm the same way: `scaled`, and a partial
    sum of squares per program. With `ARGMAX`, each program also stores its largest output, and with
    `SUMS` the sum of the exponentials of its outputs relative to that.
    """
    pid = tl.program_id(0)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    weight, bias, local = w0, b0, n
    if NUM_WEIGHTS > 1:
        if pid * BLOCK_N >= out0 + out1:
            weight, bias, local = w2, b2, n - out0 - out1
        elif pid * BLOCK_N >= out0:
            weight, bias, local = w1, b1, n - out0
    local = tl.minimum(
        local, OUT - 1
    )  # programs beyond the last output compute it, and do not store
    k = tl.arange(0, BLOCK_K)
    w_at = weight + local.to(tl.int64)[:, None] * IN + k[None, :]
    x_at = x + node[:, None] * IN + k[None, :]
    acc = tl.zeros((BLOCK_N, NODES), tl.float32)
    for start in range(0, IN, BLOCK_K):
        if EVEN_K:
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
        acc *= (_inverse_rms(squares, node, inside, IN, NUM_PARTIALS, eps) / NORM_SCALE)[None, :]
    written = inside[None, :] & (n < OUT)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + local).to(tl.float32)[:, None]
    value = acc.to(y.dtype.element_ty)
    at = node[None, :] * OUT + n[:, None]
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=written, other=0.0)
        wide = value.to(tl.float32)
        part = tl.sum(tl.where(written, wide * wide, 0.0), 0)
        tl.store(squares_out + node * NUM_PARTIALS + pid, part, mask=inside)
        factor = tl.load(norm + local).to(tl.float32) * NORM_SCALE
        tl.store(scaled + at, (wide * factor[:, None]).to(value.dtype), mask=written)
    if ARGMAX:
        wide = value.to(tl.float32)
        wide = tl.where(wide == wide, wide, float("inf"))  # so that max returns it
        wide = tl.where((n < OUT)[:, None], wide, float("-inf"))
        top, place = tl.max(wide, 0, return_indices=True)
        tl.store(tile_max + node * tl.num_programs(0) + pid, top, mask=inside)
        tl.store(tile_argmax + node * tl.num_programs(0) + pid, pid * BLOCK_N + place, mask=inside)
        if SUMS:
            total = tl.sum(tl.exp(wide - top[None, :]), 0)
            tl.store(tile_sums + node * tl.num_programs(0) + pid, total, mask=inside)
    tl.store(y + at, value, mask=written)


@triton.jit(do_not_specialize=["tiles"])
def argmax(tile_max, tile_argmax, best, tiles, BLOCK: tl.constexpr):
    """best[n] = index of the largest logit, the first of equals; -1 where it is not finite."""
    node = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    top = tl.load(tile_max + node * tiles + tile, mask=tile < tiles, other=float("-inf"))
    largest, winner = tl.max(top, 0, return_indices=True)
    place = tl.load(tile_argmax + node * tiles + winner).to(tl.int64)
    tl.store(best + node, tl.where(tl.abs(largest) < float("inf"), place, -1))


@triton.jit(do_not_specialize=["num_nodes"])
def gate_up(
    x, squares, eps, gate, up, y, num_nodes,
    IN: tl.constexpr, OUT: tl.constexpr, NUM_PARTIALS: tl.constexpr, NORM_SCALE: tl.constexpr,
    SILU: tl.constexpr, NODES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """y[n] = act(gate @ norm(x[n])) * (up @ norm(x[n])), normed as in `linear`."""
    pid = tl.program_id(0)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    local = tl.minimum(n, OUT - 1)
    k = tl.arange(0, BLOCK_K)
    offset = local.to(tl.int64)[:, None] * IN + k[None, :]
    gate_at, up_at = gate + offset, up + offset
    x_at = x + node[:, None] * IN + k[None, :]
    acc_gate = tl.zeros((BLOCK_N, NODES), tl.float32)
    acc_up = tl.zeros((BLOCK_N, NODES), tl.float32)
    for start in range(0, IN, BLOCK_K):
        if EVEN_K:
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
    inverse = (_inverse_rms(squares, node, inside, IN, NUM_PARTIALS, eps) / NORM_SCALE)[None, :]
    dtype = y.dtype.element_ty
    wide = (acc_gate * inverse).to(dtype).to(tl.float32)
    if SILU:
        active = wide / (1.0 + tl.exp(-wide))
    else:
        scaled = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = wide / (1.0 + tl.exp(-2.0 * scaled))
    value = active.to(dtype) * (acc_up * inverse).to(dtype)
    written = inside[None, :] & (n < OUT)[:, None]
    tl.store(y + node[None, :] * OUT + n[:, None], value, mask=written)


@triton.jit
def _rotated(low, high, cos, sin, position, half_dim, HEAD_DIM: tl.constexpr):
    """Rotates the halves of [R, HEAD_DIM] by their positions: x cos + rotate_half(x) sin."""
    at = position[:, None] * HEAD_DIM + half_dim[None, :]
    cos_low, sin_low = tl.load(cos + at).to(tl.float32), tl.load(sin + at).to(tl.float32)
    at += HEAD_DIM // 2
    cos_high, sin_high = tl.load(cos + at).to(tl.float32), tl.load(sin + at).to(tl.float32)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    return (low * cos_low - high * sin_low).to(dtype), (high * cos_high + low * sin_high).to(dtype)


@triton.jit
def _rms_normed_head(low, high, weight, half_dim, eps, HEAD_DIM: tl.constexpr):
    """RMS norm of a head's query or key, which some models apply before the rotation."""
    dtype = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    total = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
    inverse = 1.0 / tl.sqrt_rn(total / HEAD_DIM + eps)
    low = (wide_low * inverse[:, None]).to(dtype) * tl.load(weight + half_dim)[None, :]
    high = (wide_high * inverse[:, None]).to(dtype) * tl.load(weight + HEAD_DIM // 2 + half_dim)[
        None, :
    ]
    return low, high


@triton.jit
def _finite(value):
    """`value` with 0 for NaN and infinity: see LayerCacheView in kv/cache.py."""
    wide = value.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(value.dtype)


@triton.jit(
    do_not_specialize=[
        "num_nodes",
        "num_earlier",
        "block_size",
        "first_slot",
        "num_entries",
        "last_position",
        "window",
    ]
)
def attend(
    qkv, keys, values, cos, sin, q_norm, k_norm, eps,
    num_context_tokens, num_cached, depths, ancestors, first_slot, last_position,
    attended, split_sums, split_max, split_weights, num_nodes, num_earlier, block_size, num_entries,
    scaling, window,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_NORM: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS_PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """All queries of one sequence that share a KV head, over one split of its KV entries.

    New keys are rotated here, used from registers, and stored in the cache by the program whose
    split holds their entries. Each key is reduced in the lane of its entry, so a chain's sums do
    not depend on which of its tokens were drafted. The first `num_earlier` nodes of the block are
    in the cache already, from earlier forwards, and visible to their descendants.
    """
    seq = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    query_block = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    QKV_DIM: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    half_dim, dim = tl.arange(0, HALF_DIM), tl.arange(0, HEAD_DIM)
    query = query_block * QUERIES + tl.arange(0, QUERIES)
    node = query % num_nodes
    is_query = query < GROUP * num_nodes
    num_cached = tl.load(num_cached + seq).to(tl.int32)
    num_context = tl.load(num_context_tokens).to(tl.int32)  # first nodes, which are text
    depth = tl.load(depths + seq * block_size + num_earlier + node).to(tl.int32)
    ancestor_bits = tl.load(ancestors + seq * block_size + num_earlier + node)

    # Queries: heads of the group by nodes, [QUERIES, HEAD_DIM] in two halves.
    q_at = (seq * num_nodes + node) * QKV_DIM + (head * GROUP + query // num_nodes) * HEAD_DIM
    q_low = tl.load(qkv + q_at[:, None] + half_dim[None, :], mask=is_query[:, None], other=0.0)
    q_high = tl.load(
        qkv + q_at[:, None] + HALF_DIM + half_dim[None, :], mask=is_query[:, None], other=0.0
    )
    if HEAD_NORM:
        q_low, q_high = _rms_normed_head(q_low, q_high, q_norm, half_dim, eps, HEAD_DIM)
    position = tl.minimum(num_cached + depth, last_position)
    q_low, q_high = _rotated(q_low, q_high, cos, sin, position, half_dim, HEAD_DIM)

    base = ((first_slot + seq) * NUM_KV_HEADS + head).to(tl.int64) * num_entries * HEAD_DIM
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    for block in tl.static_range(BLOCKS_PER_SPLIT):
        start = (split * BLOCKS_PER_SPLIT + block) * BLOCK
        entry = start + tl.arange(0, BLOCK)
        k_at = base + entry[:, None] * HEAD_DIM + half_dim[None, :]
        v_at = base + entry[:, None] * HEAD_DIM + dim[None, :]
        # Entries behind the context hold finite numbers, which are masked below.
        k_low = tl.load(keys + k_at, mask=(entry < num_entries)[:, None], other=0.0)
        k_high = tl.load(keys + k_at + HALF_DIM, mask=(entry < num_entries)[:, None], other=0.0)
        value = tl.load(values + v_at, mask=(entry < num_entries)[:, None], other=0.0)
        is_context = entry < num_cached
        distance = depth[:, None] + num_cached - entry[None, :]
        visible = is_context[None, :] & is_query[:, None]
        if (start + BLOCK > num_cached) & (start < num_cached + num_earlier + num_nodes):
            block_node = tl.maximum(entry - num_cached, 0)
            in_block = (entry >= num_cached) & (block_node < num_earlier + num_nodes)
            is_new = in_block & (block_node >= num_earlier)
            n_at = (seq * num_nodes + block_node - num_earlier) * QKV_DIM + (
                NUM_HEADS + head
            ) * HEAD_DIM
            n_low = tl.load(
                qkv + n_at[:, None] + half_dim[None, :], mask=is_new[:, None], other=0.0
            )
            n_high = tl.load(
                qkv + n_at[:, None] + HALF_DIM + half_dim[None, :], mask=is_new[:, None], other=0.0
            )
            v_from = n_at[:, None] + NUM_KV_HEADS * HEAD_DIM + dim[None, :]
            n_value = tl.load(qkv + v_from, mask=is_new[:, None], other=0.0)
            d_at = depths + seq * block_size + block_node
            block_depth = tl.load(d_at, mask=in_block, other=0).to(tl.int32)
            if HEAD_NORM:
                n_low, n_high = _rms_normed_head(n_low, n_high, k_norm, half_dim, eps, HEAD_DIM)
            block_position = tl.minimum(num_cached + block_depth, last_position)
            n_low, n_high = _rotated(n_low, n_high, cos, sin, block_position, half_dim, HEAD_DIM)
            is_draft = (block_node >= num_context)[:, None]
            n_low = tl.where(is_draft, _finite(n_low), n_low)
            n_high = tl.where(is_draft, _finite(n_high), n_high)
            n_value = tl.where(is_draft, _finite(n_value), n_value)
            if query_block == 0:
                tl.store(keys + k_at, n_low, mask=is_new[:, None])
                tl.store(keys + k_at + HALF_DIM, n_high, mask=is_new[:, None])
                tl.store(values + v_at, n_value, mask=is_new[:, None])
            k_low = tl.where(is_new[:, None], n_low, k_low)
            k_high = tl.where(is_new[:, None], n_high, k_high)
            value = tl.where(is_new[:, None], n_value, value)
            is_ancestor = ((ancestor_bits[:, None] >> block_node[None, :].to(tl.int64)) & 1) == 1
            visible = visible | (in_block[None, :] & is_ancestor)
            distance = tl.where(in_block[None, :], depth[:, None] - block_depth[None, :], distance)
        visible = visible & (distance < window)
        scores = tl.dot(q_low, k_low.T)
        scores = tl.dot(q_high, k_high.T, scores)
        # The model's own forward rounds the scores before it scales them.
        scores = (scores.to(value.dtype).to(tl.float32) * scaling).to(value.dtype).to(tl.float32)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(scores - safe[:, None])
        rescale = tl.exp(top - safe)
        total = total * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc)
        top = new_top
    out_row = (seq * num_nodes + node) * NUM_HEADS + head * GROUP + query // num_nodes
    if SPLITS == 1:
        at = out_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(
            attended + at,
            (acc / total[:, None]).to(attended.dtype.element_ty),
            mask=is_query[:, None],
        )
    else:
        at = out_row * SPLITS + split
        tl.store(split_sums + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=is_query[:, None])
        tl.store(split_max + at, top, mask=is_query)
        tl.store(split_weights + at, total, mask=is_query)


@triton.jit
def combine_splits(
    attended, split_sums, split_max, split_weights, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """Combines the results of the KV splits for one query of one head."""
    query = tl.program_id(0)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    top = tl.load(split_max + query * SPLITS + split)
    found = tl.load(split_weights + query * SPLITS + split)
    at = (query * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    acc = tl.load(split_sums + at)
    share = tl.exp(top - tl.max(top, 0))
    acc = tl.sum(acc * share[:, None], 0) / tl.sum(share * found, 0)
    tl.store(attended + query * HEAD_DIM + dim, acc.to(attended.dtype.element_ty))
