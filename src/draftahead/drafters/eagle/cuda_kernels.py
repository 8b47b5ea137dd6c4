"""Triton kernels that build draft trees with an EAGLE head, without waiting for the host.

Each sequence has a pool of candidate nodes: `CHILDREN` below the root, and below each node that was
expanded. Those form the block, `nodes_per_level` of them per level. At each level the most
confident candidates that are not expanded yet are (`expand_nodes`), and get children in turn
(`add_children`); at the end the most confident of all become the draft (`select_nodes`). The trees
are those of TreeBuilder (drafters/tree_builder.py).
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


@triton.jit(do_not_specialize=["max_inputs", "num_entries"])
def gather_hidden(
    hidden_states, hidden_indices, weights, out, entries, max_inputs, num_entries, stride, eps,
    NUM_HIDDEN: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The target's hidden states of inputs side by side, [inputs, NUM_HIDDEN * HIDDEN]: each of
    them normed ("each"), all of them as one vector ("all"), or as they are ("none")."""
    node = tl.program_id(0)
    seq = node // max_inputs
    entry = tl.minimum(tl.load(entries + node), num_entries - 1)
    source = hidden_states + (seq.to(tl.int64) * num_entries + entry) * stride
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    squares = 0.0
    if NORM == "all":
        for part in tl.static_range(NUM_HIDDEN):
            from_ = source + tl.load(hidden_indices + part) * HIDDEN
            wide = tl.load(from_ + at, mask=inside, other=0.0).to(tl.float32)
            squares += tl.sum(wide * wide, 0)
    for part in tl.static_range(NUM_HIDDEN):
        from_ = source + tl.load(hidden_indices + part) * HIDDEN
        value = tl.load(from_ + at, mask=inside, other=0.0).to(tl.float32)
        if NORM == "each":
            value = _normed(value, weights + part * HIDDEN, inside, at, eps, HIDDEN)
        if NORM == "all":
            inverse = 1.0 / tl.sqrt_rn(squares / (NUM_HIDDEN * HIDDEN) + eps)
            weight = tl.load(weights + part * HIDDEN + at, mask=inside, other=0.0)
            value = value * inverse * weight.to(tl.float32)
        to = out + (node * NUM_HIDDEN + part) * HIDDEN + at
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_first_input(
    token, hidden, node, embeddings, embed_norm, hidden_norm, first_input, x, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The input of the first layer's attention, and what its residual starts from."""
    dtype = first_input.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    embedded = tl.load(embeddings + token.to(tl.int64) * HIDDEN + at, mask=inside, other=0.0)
    embedded = _normed(embedded, embed_norm, inside, at, eps, HIDDEN).to(dtype)
    normed = _normed(hidden, hidden_norm, inside, at, eps, HIDDEN).to(dtype)
    tl.store(first_input + node * 2 * HIDDEN + at, embedded, mask=inside)
    tl.store(first_input + node * 2 * HIDDEN + HIDDEN + at, normed, mask=inside)
    tl.store(x + node * HIDDEN + at, normed if NORM_RESIDUAL else hidden.to(dtype), mask=inside)


@triton.jit
def first_inputs(
    tokens, features, embeddings, embed_norm, hidden_norm, first_input, x, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Inputs of the text: tokens, and the features of the tokens before them."""
    node = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    hidden = tl.load(features + node * HIDDEN + at, mask=at < HIDDEN, other=0.0)
    _store_first_input(
        tl.load(tokens + node), hidden, node, embeddings, embed_norm, hidden_norm, first_input, x,
        eps, HIDDEN, BLOCK, NORM_RESIDUAL,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["level", "pool_size", "nodes_per_level", "num_expanded", "max_inputs"]
)
def expand_nodes(
    pool_tokens, pool_confidence, pool_parent_nodes, pool_depths, pool_levels, expanded, depths,
    ancestors, num_inputs, root_outputs, outputs,
    embeddings, embed_norm, hidden_norm, norm, first_input, x, eps,
    level, pool_size, nodes_per_level, num_expanded, max_inputs,
    POOL: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM_RESIDUAL: tl.constexpr,
    NORM_OUTPUT: tl.constexpr,
):  # fmt: skip
    """Chooses the nodes of a sequence to expand at this level, each program one of them, and stores
    its input: its token and the head's output for its parent. `pool_levels` holds the level at
    which a candidate was expanded. Other programs of this level may be writing it: such a candidate
    counts as not expanded either way, by `level_of >= level`."""
    seq, rank = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, POOL)
    pool = seq * POOL + index
    inside = index < pool_size
    level_of = tl.load(pool_levels + pool, mask=inside, other=1)
    confidence = tl.load(pool_confidence + pool, mask=inside, other=0.0)
    confidence = tl.where(inside & ((level_of == 0) | (level_of >= level)), confidence, -1.0)
    best = tl.argmax(confidence, 0)
    for _ in range(rank):
        confidence = tl.where(index == best, -1.0, confidence)
        best = tl.argmax(confidence, 0)
    candidate = seq * POOL + best
    index_in_block = (level - 1) * nodes_per_level + rank
    node = seq * num_expanded + index_in_block
    tl.store(pool_levels + candidate, level)
    tl.store(expanded + node, best)
    parent_node = tl.load(pool_parent_nodes + candidate)  # in the block; -1: the root
    parent = tl.load(ancestors + seq * num_expanded + parent_node, mask=parent_node >= 0, other=0)
    tl.store(ancestors + node, parent | (tl.full((), 1, tl.int64) << index_in_block))
    tl.store(depths + node, tl.load(pool_depths + candidate).to(tl.int64) - 1)
    at = tl.arange(0, BLOCK)
    # Outputs lie level by level, sequences side by side.
    num_seqs = tl.num_programs(0)
    output = parent_node // nodes_per_level * num_seqs * nodes_per_level
    output = output + seq * nodes_per_level + parent_node % nodes_per_level
    root = root_outputs + (seq * max_inputs + tl.load(num_inputs + seq) - 1) * HIDDEN
    source = root if parent_node < 0 else outputs + output * HIDDEN
    hidden = tl.load(source + at, mask=at < HIDDEN, other=0.0)
    if NORM_OUTPUT:
        hidden = _normed(hidden, norm, at < HIDDEN, at, eps, HIDDEN).to(hidden.dtype)
    _store_first_input(
        tl.load(pool_tokens + candidate), hidden, seq * nodes_per_level + rank, embeddings,
        embed_norm, hidden_norm, first_input, x, eps, HIDDEN, BLOCK, NORM_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _splitmix64(x):
    """As _mix in sampling/noise.py."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _exponential_noise(key, token):
    """-log of a uniform number: the target's exponential noise of a token."""
    bits = (_splitmix64(key + token * -7046029254386353131) >> 12) & 0xFFFFFFFFFFFFF
    low = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16
    # 1 - u where u is near 1: float32 is dense near 0 only.
    high = ((0x10000000000000 - bits).to(tl.float32) - 0.5) * 2.220446049250313e-16
    near = high * (1.0 + high * (0.5 + high * (0.33333333 + high * 0.25)))
    return tl.where(high < 0.02, near, -tl.log(tl.where(high < 0.02, 0.5, low)))


@triton.jit
def _expanded_node(
    expanded, pool_confidence, pool_depths, num_inputs,
    level, nodes_per_level, num_expanded, max_inputs, POOL: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """The node that a program adds children to: its index in the forward, in the block and in the
    pool (-1: the root), its confidence and its depth."""
    seq, rank = tl.program_id(0), tl.program_id(1)
    if ROOT:
        return seq * max_inputs + tl.load(num_inputs + seq) - 1, -1, -1, 1.0, 0
    else:  # noqa: RET505 (two functions to the compiler)
        index_in_block = (level - 1) * nodes_per_level + rank
        candidate = tl.load(expanded + seq * num_expanded + index_in_block)
        parent_confidence = tl.load(pool_confidence + seq * POOL + candidate)
        return (
            seq * nodes_per_level + rank,
            index_in_block,
            candidate,
            parent_confidence,
            tl.load(pool_depths + seq * POOL + candidate),
        )


@triton.jit
def _add_to_pool(
    pool_tokens, pool_confidence, pool_parent_nodes, pool_depths, pool_levels, pool_parents,
    at, token, confidence, index_in_block, candidate, depth,
):  # fmt: skip
    """Adds a candidate node to the pool."""
    tl.store(pool_tokens + at, token.to(tl.int64))
    tl.store(pool_confidence + at, tl.where(confidence > 0, confidence, 0.0))  # not where it is NaN
    tl.store(pool_parent_nodes + at, index_in_block)
    tl.store(pool_parents + at, candidate)
    tl.store(pool_depths + at, depth + 1)
    tl.store(pool_levels + at, 0)


@triton.jit(do_not_specialize=["level", "nodes_per_level", "num_expanded", "max_inputs", "tiles"])
def add_children(
    logits, tile_max, tile_sums, draft_to_target, pool_tokens, pool_confidence, pool_parent_nodes,
    pool_depths, pool_levels, pool_parents, expanded, num_inputs,
    level, nodes_per_level, num_expanded, max_inputs, tiles,
    ROOT: tl.constexpr, POOL: tl.constexpr, CHILDREN: tl.constexpr, VOCAB_SIZE: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, FULL_VOCAB: tl.constexpr,
):  # fmt: skip
    """Adds the most likely tokens after a node of this level, or after the root, to the pool. The
    top CHILDREN tokens lie in the CHILDREN tiles with the largest logits: only those are read."""
    node, index_in_block, candidate, parent_confidence, depth = _expanded_node(
        expanded, pool_confidence, pool_depths, num_inputs,
        level, nodes_per_level, num_expanded, max_inputs, POOL, ROOT,
    )  # fmt: skip
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    top = tl.load(tile_max + node * tiles + tile, mask=inside, other=float("-inf"))
    total = tl.load(tile_sums + node * tiles + tile, mask=inside, other=0.0)
    largest_logit = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - largest_logit), 0)
    lane = tl.arange(0, CHILDREN * TILE)
    draft_id = lane % TILE
    for rank in tl.static_range(CHILDREN):
        largest, best = tl.max(top, 0, return_indices=True)
        top = tl.where(tile == best, float("-inf"), top)
        # Where no tile is left, the first would be found again, and its tokens added twice.
        start = tl.where(largest > float("-inf"), best * TILE, VOCAB_SIZE)
        draft_id = tl.where(lane // TILE == rank, start + draft_id, draft_id)
    logits_at = logits + node.to(tl.int64) * VOCAB_SIZE + draft_id
    value = tl.load(logits_at, mask=draft_id < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    first = tl.program_id(0) * POOL + (index_in_block + 1) * CHILDREN
    for child in tl.static_range(CHILDREN):
        best, winner = tl.max(value, 0, return_indices=True)
        token = tl.sum(tl.where(lane == winner, draft_id, 0), 0)
        value = tl.where(lane == winner, float("-inf"), value)
        confidence = parent_confidence * tl.minimum(tl.exp(best - largest_logit) / total, 1.0)
        token = tl.minimum(token, VOCAB_SIZE - 1)
        if not FULL_VOCAB:
            token = tl.load(draft_to_target + token)
        _add_to_pool(
            pool_tokens, pool_confidence, pool_parent_nodes, pool_depths, pool_levels, pool_parents,
            first + child, token, confidence, index_in_block, candidate, depth,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["level", "nodes_per_level", "num_expanded", "max_inputs", "max_depth"]
)
def add_children_sampled(
    logits, rng_keys, temperatures, draft_to_target, pool_tokens, pool_confidence,
    pool_parent_nodes, pool_depths, pool_levels, pool_parents, expanded, num_inputs,
    level, nodes_per_level, num_expanded, max_inputs, max_depth,
    ROOT: tl.constexpr, POOL: tl.constexpr, CHILDREN: tl.constexpr, VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, FULL_VOCAB: tl.constexpr,
):  # fmt: skip
    """The same where some sequences are sampled (temperature above 0): their confidence is coupled
    with the target's noise, so any token may have the highest, and all logits are read."""
    seq = tl.program_id(0)
    node, index_in_block, candidate, parent_confidence, depth = _expanded_node(
        expanded, pool_confidence, pool_depths, num_inputs,
        level, nodes_per_level, num_expanded, max_inputs, POOL, ROOT,
    )  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < VOCAB_SIZE
    logits_at = logits + node.to(tl.int64) * VOCAB_SIZE + at
    value = tl.load(logits_at, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    temperature = tl.load(temperatures + seq).to(tl.float32) / CONFIDENCE_SCALE
    value = tl.where(temperature > 0, value / tl.where(temperature > 0, temperature, 1.0), value)
    weight = tl.exp(value - tl.max(value, 0))
    token = at if FULL_VOCAB else tl.load(draft_to_target + at, mask=inside, other=0)
    noise = _exponential_noise(tl.load(rng_keys + seq * max_depth + depth), token.to(tl.int64))
    weight = tl.where(temperature > 0, weight / noise, weight)
    weight = weight / tl.sum(weight, 0)
    first = seq * POOL + (index_in_block + 1) * CHILDREN
    for child in tl.static_range(CHILDREN):
        best, winner = tl.max(weight, 0, return_indices=True)
        weight = tl.where(at == winner, -1.0, weight)
        confidence = parent_confidence * tl.minimum(best, 1.0)
        found = winner if FULL_VOCAB else tl.load(draft_to_target + winner)
        _add_to_pool(
            pool_tokens, pool_confidence, pool_parent_nodes, pool_depths, pool_levels, pool_parents,
            first + child, found, confidence, index_in_block, candidate, depth,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pool_size", "num_nodes"])
def select_nodes(
    pool_tokens, pool_confidence, pool_parents, trees, pool_size, num_nodes, POOL: tl.constexpr
):
    """The root and the `num_nodes` - 1 most confident candidates: tokens, parents, confidence."""
    seq, index = tl.program_id(0), tl.arange(0, POOL)
    pool = seq * POOL + index
    inside = index < pool_size
    confidence = tl.load(pool_confidence + pool, mask=inside, other=-1.0)
    is_earlier = index[None, :] < index[:, None]
    is_better = (confidence[None, :] > confidence[:, None]) | (
        (confidence[None, :] == confidence[:, None]) & is_earlier
    )
    # None is more confident than its parent, which stands before it: the parent is kept too.
    kept = inside & (tl.sum(is_better.to(tl.int32), 1) < num_nodes - 1)
    index_in_tree = 1 + tl.sum((kept[None, :] & is_earlier).to(tl.int32), 1)
    parent_candidate = tl.load(pool_parents + pool, mask=inside, other=-1)
    parent = tl.sum(
        tl.where(parent_candidate[:, None] == index[None, :], index_in_tree[None, :], 0), 1
    )
    tree = trees + seq * 3 * num_nodes + index_in_tree
    tl.store(tree, tl.load(pool_tokens + pool, mask=inside, other=0), mask=kept)
    tl.store(tree + num_nodes, parent.to(tl.int64), mask=kept)
    tl.store(tree + 2 * num_nodes, (confidence * CONFIDENCE_SCALE).to(tl.int64), mask=kept)
