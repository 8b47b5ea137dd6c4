"""A trained head on a GPU: the pairs that it lacks and a whole tree of guesses as one CUDA graph.

A level of such a tree takes the device tens of microseconds, less than the host needs to look at
it. So the host does not look: the tree is grown, handed to the target's pass and scored where it
lies, and read back with the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError, is_plain, require
from draftahead.backends.cuda.graphs import GraphPool, Inputs
from draftahead.backends.cuda.layers import MOST_ROWS, Block, CudaLayers, KVSplits, power_of_two
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core import tree
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceTimer
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.spec import InputProjection, input_projection
from draftahead.kv.cache import KVCache

LEAST_PAIRS = 8  # of a text in a recording; more are powers of two


class Plan(NamedTuple):
    """What a recording does."""

    deepest: int  # levels, the root's children included
    a_level: int  # nodes that it goes on from at each of them
    children: int
    size: int  # nodes of the draft, the root included
    sampled: bool

    @property
    def nodes(self) -> int:
        return (self.deepest - 1) * self.a_level

    @property
    def guesses(self) -> int:
        return self.children * (1 + self.nodes)


class Growth(Inputs):
    """What changes from step to step, and where the trees of B texts grow."""

    def __init__(
        self,
        texts: int,
        pairs: int,
        plan: Plan,
        places: tuple[int, ...],
        outputs: Tensor,
    ) -> None:
        """`places`: of the states that are fused. `outputs`: like one row of the head's."""
        device = outputs.device
        each = (texts, pairs)
        shapes = [(1,), (texts,), (texts,), (texts,), each, each, (texts, plan.deepest)]
        super().__init__(shapes, device)
        self.real, self.lengths, self.counts, self.warmth, *parts = self.parts
        self.tokens, self.slots, self.keys = parts
        self.places = torch.tensor(places, dtype=torch.int32, device=device)
        chain = tree.ancestor_bits(range(-1, pairs - 1))
        self.chain_depths = torch.arange(pairs, device=device).repeat(texts, 1)
        self.chain_ancestors = torch.tensor(chain, device=device).repeat(texts, 1)
        # The pool of guesses: token, parent in the block, depth, level since which it is in the
        # block, and parent in the pool.
        self.pool = power_of_two(plan.guesses)

        def whole(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.said = torch.zeros(texts, self.pool, dtype=torch.int64, device=device)
        self.likely = torch.zeros(texts, self.pool, device=device)
        self.aboves, self.deep, self.since, self.higher = (
            whole(texts, self.pool) for _ in range(4)
        )
        # The block: nodes that the trees went on from, and what became of them.
        nodes = max(1, plan.nodes)
        self.chosen = whole(texts, nodes)
        self.depths = torch.zeros(texts, nodes, dtype=torch.int64, device=device)
        self.ancestors = torch.zeros(texts, nodes, dtype=torch.int64, device=device)
        self.outputs = torch.zeros_like(outputs).repeat(texts * nodes, 1)
        self.roots = torch.zeros_like(outputs).repeat(texts * pairs, 1)
        # [B, 3, size]: tokens, parents and likelihoods of the drafts.
        self.trees = torch.zeros(texts, 3, plan.size, dtype=torch.int64, device=device)
        self.trees[:, 1, 0] = -1
        self.trees[:, 2, 0] = CONFIDENCE_SCALE


class CudaEagleHead:
    """`shape` without an embedding and a rotation, bound to a cache."""

    def __init__(
        self,
        shape: LlamaSpec,
        cache: KVCache,
        entrance: InputProjection,
        turns: tuple[Tensor, Tensor],
    ) -> None:
        self.layers = CudaLayers(shape, cache, turns)
        from draftahead.drafters.eagle import cuda_kernels

        self._growth, self._entrance, self._shape = cuda_kernels, entrance, shape
        self._cache, layers = cache, self.layers
        kind = layers.device.type
        for weight in (entrance.fc.weight, entrance.embed.weight, entrance.norm_weights):
            require(is_plain(weight, layers.dtype, kind), "an entrance of another kind")
        require(type(entrance.embed) is nn.Embedding, "embeddings")
        require(type(entrance.fc) is nn.Linear and entrance.fc.bias is None, "fusing")
        self._seen = layers.empty(MOST_ROWS, 2 * shape.hidden_size)
        self._joined = layers.empty(MOST_ROWS, entrance.fc.weight.shape[1])
        self._features = layers.empty(MOST_ROWS, shape.hidden_size)
        self.graphs = GraphPool(layers.device, "the head")

    def takes(self, texts: int, plan: Plan) -> bool:
        rows = texts * max(LEAST_PAIRS, plan.a_level)
        return self.graphs.works and rows <= MOST_ROWS and plan.nodes <= 64

    def most_pairs(self, texts: int) -> int:
        """Of each text, in one go."""
        return max(LEAST_PAIRS, power_of_two(MOST_ROWS // texts + 1) // 2)

    def grow(
        self,
        pairs: Sequence[Sequence[int]],
        held: Sequence[int],
        slots: Sequence[Sequence[int]],
        states: Tensor,
        places: tuple[int, ...],
        plan: Plan,
        *,
        clock: DeviceTimer,
        keys: Sequence[Sequence[int]] = (),
        warmth: Sequence[float] = (),
    ) -> Tensor | None:
        """Feeds every text its next pairs' tokens behind the slots it has `held`, beside the states
        before them, which lie in `slots` of the target's `states` [rows, 1, slots, W * H'], and in
        `places` of each; grows trees from the last. Returns [B, 3, size], still under way: tokens,
        parents and likelihoods. Where `plan.sampled`: the target's key at each depth, and the
        temperature of each text."""
        texts, width = len(pairs), _width(max(map(len, pairs)))
        counts = [len(row) for row in pairs]
        live = max(map(sum, zip(held, counts, strict=True))) + max(plan.nodes, width)
        reach = KVSplits.over(0, min(live, self._cache.num_entries))

        def write(growth: Growth) -> None:
            said = [token for row in pairs for token in [*row, *[0] * (width - len(row))]]
            at = [slot for row in slots for slot in [*row, *[0] * (width - len(row))]]
            warm = [round(CONFIDENCE_SCALE * one) for one in warmth] or [0] * texts
            noise = [key for row in keys for key in row] or [0] * (texts * plan.deepest)
            growth.words[:] = [0, *held, *counts, *warm, *said, *at, *noise]

        found = self.graphs.run(
            (texts, width, plan, reach, places, states.data_ptr()),
            partial(self._pass, plan=plan, reach=reach, states=states),
            lambda: Growth(texts, width, plan, places, self.layers.x[:1]),
            write,
            clock,
        )
        return None if found is None else found[0]

    def _pass(
        self, growth: Growth, plan: Plan, reach: KVSplits, states: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Every kernel of a step, in order."""
        layers, kernels, entrance = self.layers, self._growth, self._entrance
        texts, width = growth.tokens.shape
        self._pairs(growth, reach, states)
        self._branch(growth, plan, 0)
        below = growth.lengths + growth.counts  # slots before the block
        weight, rows = self._weights(), texts * plan.a_level
        for level in range(1, plan.deepest):
            before = (level - 1) * plan.a_level
            layers.launch(
                kernels.expand, (texts, plan.a_level),
                growth.said, growth.likely, growth.aboves, growth.deep, growth.since,
                growth.chosen, growth.depths, growth.ancestors, growth.counts, growth.roots,
                growth.outputs, *weight, self._shape.final_norm, self._seen, layers.x,
                self._shape.norm_eps,
                level, plan.children * (1 + before), plan.a_level, plan.nodes, width,
                POOL=growth.pool, NORMS_OUTPUT=entrance.norm_output, **self._sizes(),
            )  # fmt: skip
            block = Block(growth.real, below, growth.depths, growth.ancestors, plan.a_level, before)
            out = growth.outputs[(level - 1) * rows : level * rows]
            layers.run(block, reach, seen=self._seen, out=out)
            self._branch(growth, plan, level)
        layers.launch(
            kernels.select, texts, growth.said, growth.likely, growth.higher, growth.trees,
            plan.guesses, plan.size, POOL=growth.pool,
        )  # fmt: skip
        return (growth.trees,)

    def _pairs(self, growth: Growth, reach: KVSplits, states: Tensor) -> None:
        """The pairs that the head lacks; the last is the root of a tree."""
        layers, kernels, entrance = self.layers, self._growth, self._entrance
        texts, width = growth.tokens.shape
        rows = texts * width
        parts, hidden = entrance.norm_weights.shape
        layers.launch(
            kernels.fuse, rows, states, growth.places, entrance.norm_weights, self._joined,
            growth.slots,
            width, states.shape[2], states.shape[3], self._shape.norm_eps,
            PARTS=parts, HIDDEN=hidden, BLOCK=power_of_two(hidden), NORM=entrance.norm,
        )  # fmt: skip
        layers.linear("down", [entrance.fc], self._joined, self._features, rows)
        layers.launch(
            kernels.enter, rows, growth.tokens, self._features, *self._weights(), self._seen,
            layers.x, self._shape.norm_eps, **self._sizes(),
        )  # fmt: skip
        block = Block(
            growth.real, growth.lengths, growth.chain_depths, growth.chain_ancestors, width
        )
        layers.run(block, reach, seen=self._seen, out=growth.roots)

    def _branch(self, growth: Growth, plan: Plan, level: int) -> None:
        """Children for the nodes of a level, or for the roots (level 0)."""
        layers, kernels, tokens = self.layers, self._growth, self._entrance.draft_to_target
        texts, width = growth.tokens.shape
        count, size = plan.a_level if level else 1, self._shape.vocab_size
        tiles, tile = layers.vocabulary(texts * (count if level else width), sums=not plan.sampled)
        pool = (
            growth.said if tokens is None else tokens, growth.said, growth.likely, growth.aboves,
            growth.deep, growth.since, growth.higher, growth.chosen, growth.counts,
            level, plan.a_level, max(1, plan.nodes), width,
        )  # fmt: skip
        sizes = {
            "ROOT": level == 0,
            "POOL": growth.pool,
            "CHILDREN": plan.children,
            "TOKENS": size,
            "WHOLE": tokens is None,
        }
        if plan.sampled:
            layers.launch(
                kernels.branch_sampled, (texts, count), layers.logits, growth.keys, growth.warmth,
                *pool, plan.deepest, BLOCK=power_of_two(size), **sizes, num_warps=16,
            )  # fmt: skip
        else:
            layers.launch(
                kernels.branch, (texts, count), layers.logits, layers.tops, layers.sums,
                *pool, tiles, TILES=power_of_two(tiles), TILE=tile, **sizes,
            )  # fmt: skip

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        entrance = self._entrance
        return entrance.embed.weight, entrance.embed_norm, entrance.hidden_norm

    def _sizes(self) -> dict[str, Any]:
        hidden = self._shape.hidden_size
        return {
            "HIDDEN": hidden,
            "BLOCK": power_of_two(hidden),
            "NORMS_RESIDUAL": self._entrance.norm_before_residual,
        }


def _width(pairs: int) -> int:
    """Pairs of a text that the recording for so many takes."""
    return max(LEAST_PAIRS, power_of_two(pairs))


def gpu_kernels(
    head: EagleHead, shape: LlamaSpec, cache: KVCache, embed: Any, turns: list[Tensor], whole: bool
) -> CudaEagleHead | None:
    entrance = input_projection(head, embed, whole)
    if entrance is None:
        return None
    try:
        return CudaEagleHead(shape, cache, entrance, (turns[0], turns[1]))
    except UnsupportedSpecError:
        return None
