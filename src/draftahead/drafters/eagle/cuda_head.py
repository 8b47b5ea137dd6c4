"""An EAGLE head on a GPU: its missing inputs and a whole draft tree as one CUDA graph.

A level takes the device tens of microseconds, less than a copy to the host. So the tree stays in
device memory, is verified there by the target's forward, and copied to the host with the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftahead.backends.base import kernels_can_read, require
from draftahead.backends.cuda.graphs import GraphPool, Inputs
from draftahead.backends.cuda.layers import (
    MAX_FORWARD_NODES,
    CudaAttentionMetadata,
    CudaLayers,
    KVSplits,
    next_power_of_two,
)
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core import tree
from draftahead.core.draft import CONFIDENCE_SCALE, DeviceTimer
from draftahead.drafters.eagle.spec import InputProjection
from draftahead.kv.cache import KVCache

MIN_INPUTS = 8  # of a sequence in a graph; larger graphs have powers of two
MAX_EXPANDED = 64  # nodes of a block: ancestors are the bits of one word


class TreePlan(NamedTuple):
    """The trees that a graph builds."""

    max_depth: int  # levels, the root's children included
    nodes_per_level: int  # expanded at each level
    num_children: int  # of each of them
    num_nodes: int  # of the draft, the root included
    sampled: bool  # for sequences that may be sampled

    @property
    def num_expanded(self) -> int:
        return (self.max_depth - 1) * self.nodes_per_level

    @property
    def pool_size(self) -> int:
        return self.num_children * (1 + self.num_expanded)


class TreeBuffers(Inputs):
    """Inputs of a graph, and the memory in which it builds the trees of B sequences."""

    def __init__(
        self,
        batch: int,
        max_inputs: int,
        plan: TreePlan,
        hidden_indices: tuple[int, ...],
        output: Tensor,
    ) -> None:
        """`hidden_indices`: of the stored hidden states that the head reads. `output`: [1, H] as
        the head's outputs are."""
        device, size = output.device, (batch, max_inputs)
        shapes = [(1,), (batch,), (batch,), (batch,), size, size, (batch, plan.max_depth)]
        super().__init__(shapes, device)
        self.num_context_tokens, self.num_cached, self.num_inputs, self.temperatures, *parts = (
            self.parts
        )
        self.tokens, self.entries, self.rng_keys = parts
        self.hidden_indices = torch.tensor(hidden_indices, dtype=torch.int32, device=device)
        chain = tree.ancestor_bits(range(-1, max_inputs - 1))
        self.chain_depths = torch.arange(max_inputs, device=device).repeat(batch, 1)
        self.chain_ancestors = torch.tensor(chain, device=device).repeat(batch, 1)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # The pool of candidates: see cuda_kernels.py.
        self.pool_length = next_power_of_two(plan.pool_size)
        pool = (batch, self.pool_length)
        self.pool = {
            "pool_tokens": zeros(*pool, dtype=torch.int64),
            "pool_confidence": zeros(*pool, dtype=torch.float32),
            "pool_parent_nodes": zeros(*pool),  # index of the parent in the block; -1: the root
            "pool_depths": zeros(*pool),
            "pool_levels": zeros(*pool),  # at which it was expanded; 0: not yet
            "pool_parents": zeros(*pool),  # index of the parent in the pool; -1: the root
        }
        # The block: the nodes that were expanded, and the head's outputs for them.
        num_expanded = max(1, plan.num_expanded)
        self.expanded = zeros(batch, num_expanded)  # their indices in the pool
        self.depths = zeros(batch, num_expanded, dtype=torch.int64)
        self.ancestors = zeros(batch, num_expanded, dtype=torch.int64)
        self.outputs = torch.zeros_like(output).repeat(batch * num_expanded, 1)
        self.root_outputs = torch.zeros_like(output).repeat(batch * max_inputs, 1)
        # [B, 3, num_nodes]: tokens, parents and confidence of the drafts.
        self.trees = zeros(batch, 3, plan.num_nodes, dtype=torch.int64)
        self.trees[:, 1, 0] = -1
        self.trees[:, 2, 0] = CONFIDENCE_SCALE


class CudaEagleHead:
    """A head's layers (without embedding and rotary angles) bound to its KV cache."""

    def __init__(
        self,
        spec: LlamaSpec,
        cache: KVCache,
        projection: InputProjection,
        cos_sin: tuple[Tensor, Tensor],
    ) -> None:
        self.layers = layers = CudaLayers(spec, cache, cos_sin)
        from draftahead.drafters.eagle import cuda_kernels

        self._kernels, self._projection, self._spec = cuda_kernels, projection, spec
        self._cache, kind = cache, layers.device.type
        for weight in (projection.fc.weight, projection.embed.weight, projection.norm_weights):
            plain = kernels_can_read(weight, layers.dtype, kind)
            require(plain, "the input projection has another dtype, device or layout")
        require(type(projection.embed) is nn.Embedding, "the embedding is no nn.Embedding")
        plain_fc = type(projection.fc) is nn.Linear and projection.fc.bias is None
        require(plain_fc, "fc is no nn.Linear without a bias")
        self._first_input = layers.empty(MAX_FORWARD_NODES, 2 * spec.hidden_size)
        self._hidden = layers.empty(MAX_FORWARD_NODES, projection.fc.weight.shape[1])
        self._features = layers.empty(MAX_FORWARD_NODES, spec.hidden_size)
        self.graphs = GraphPool(layers.device, "the head")

    def supports(self, batch: int, plan: TreePlan) -> bool:
        num_nodes = batch * max(MIN_INPUTS, plan.nodes_per_level)
        small = num_nodes <= MAX_FORWARD_NODES and plan.num_expanded <= MAX_EXPANDED
        return self.graphs.can_capture and small

    def max_inputs(self, batch: int) -> int:
        """Missing inputs of a sequence that one graph computes."""
        return max(MIN_INPUTS, next_power_of_two(MAX_FORWARD_NODES // batch + 1) // 2)

    def build_trees(
        self,
        tokens: Sequence[Sequence[int]],
        num_cached: Sequence[int],
        entries: Sequence[Sequence[int]],
        hidden_states: Tensor,
        hidden_indices: tuple[int, ...],
        plan: TreePlan,
        *,
        timer: DeviceTimer,
        rng_keys: Sequence[Sequence[int]] = (),
        temperatures: Sequence[float] = (),
    ) -> Tensor | None:
        """Computes the missing inputs of every sequence behind its `num_cached` KV entries:
        `tokens`, with the hidden states before them, which lie in `entries` of the target's
        `hidden_states` [slots, 1, entries, W * H]. Then builds trees from the last input. Returns
        [B, 3, num_nodes] tokens, parents and confidence, still being computed on the device; None
        if that cannot be captured. `rng_keys`, `temperatures`: with `plan.sampled`, the target's
        RNG key at each depth, and the temperatures."""
        batch, max_inputs = len(tokens), _padded_length(max(map(len, tokens)))
        counts = [len(one) for one in tokens]
        longest = max(map(sum, zip(num_cached, counts, strict=True)))
        kv_len = longest + max(plan.num_expanded, max_inputs)
        splits = KVSplits.over(0, min(kv_len, self._cache.num_entries))

        def write(inputs: TreeBuffers) -> None:
            scaled = [round(CONFIDENCE_SCALE * t) for t in temperatures] or [0] * batch
            keys = [key for one in rng_keys for key in one] or [0] * (batch * plan.max_depth)
            padded = [_padded(one, max_inputs) for one in (*tokens, *entries)]
            flat = [number for one in padded for number in one]
            inputs.words[:] = [0, *num_cached, *counts, *scaled, *flat, *keys]

        outputs = self.graphs.run(
            (batch, max_inputs, plan, splits, hidden_indices, hidden_states.data_ptr()),
            partial(self._launch, plan=plan, splits=splits, hidden_states=hidden_states),
            lambda: TreeBuffers(batch, max_inputs, plan, hidden_indices, self.layers.x[:1]),
            write,
            timer,
        )
        return None if outputs is None else outputs[0]

    def _launch(
        self, inputs: TreeBuffers, plan: TreePlan, splits: KVSplits, hidden_states: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Every kernel of a tree, in order."""
        layers, batch = self.layers, len(inputs.tokens)
        self._run_inputs(inputs, splits, hidden_states)
        self._add_children(inputs, plan, 0)
        num_cached = inputs.num_cached + inputs.num_inputs  # before the block
        per_level = plan.nodes_per_level
        for level in range(1, plan.max_depth):
            earlier = (level - 1) * per_level
            self._expand(inputs, plan, level)
            metadata = CudaAttentionMetadata(
                inputs.num_context_tokens, num_cached, inputs.depths, inputs.ancestors, per_level,
                earlier,
            )  # fmt: skip
            out = inputs.outputs[earlier * batch : (earlier + per_level) * batch]
            layers.run(metadata, splits, first_input=self._first_input, out=out)
            self._add_children(inputs, plan, level)
        pool = {name: inputs.pool[name] for name in ("pool_tokens", "pool_confidence")}
        layers.launch(
            self._kernels.select_nodes, batch, **pool, pool_parents=inputs.pool["pool_parents"],
            trees=inputs.trees, pool_size=plan.pool_size, num_nodes=plan.num_nodes,
            POOL=inputs.pool_length,
        )  # fmt: skip
        return (inputs.trees,)

    def _run_inputs(self, inputs: TreeBuffers, splits: KVSplits, hidden_states: Tensor) -> None:
        """The missing inputs; the last one of each sequence is that of its root."""
        layers, kernels, projection = self.layers, self._kernels, self._projection
        batch, max_inputs = inputs.tokens.shape
        count = batch * max_inputs
        num_hidden, hidden_size = projection.norm_weights.shape
        layers.launch(
            kernels.gather_hidden, count,
            hidden_states=hidden_states, hidden_indices=inputs.hidden_indices,
            weights=projection.norm_weights, out=self._hidden, entries=inputs.entries,
            max_inputs=max_inputs, num_entries=hidden_states.shape[2],
            stride=hidden_states.shape[3], eps=self._spec.norm_eps, NUM_HIDDEN=num_hidden,
            HIDDEN=hidden_size, BLOCK=next_power_of_two(hidden_size), NORM=projection.norm,
        )  # fmt: skip
        layers.linear("down", [projection.fc], self._hidden, self._features, count)
        layers.launch(
            kernels.first_inputs, count,
            tokens=inputs.tokens, features=self._features, **self._first_input_arguments(),
        )  # fmt: skip
        metadata = CudaAttentionMetadata(
            inputs.num_context_tokens, inputs.num_cached, inputs.chain_depths,
            inputs.chain_ancestors, max_inputs,
        )  # fmt: skip
        layers.run(metadata, splits, first_input=self._first_input, out=inputs.root_outputs)

    def _expand(self, inputs: TreeBuffers, plan: TreePlan, level: int) -> None:
        """Chooses the nodes to expand at a level, and prepares their inputs."""
        pool = {name: t for name, t in inputs.pool.items() if name != "pool_parents"}
        self.layers.launch(
            self._kernels.expand_nodes, (len(inputs.tokens), plan.nodes_per_level), **pool,
            expanded=inputs.expanded, depths=inputs.depths, ancestors=inputs.ancestors,
            num_inputs=inputs.num_inputs, root_outputs=inputs.root_outputs,
            outputs=inputs.outputs, norm=self._spec.final_norm, level=level,
            pool_size=plan.num_children * (1 + (level - 1) * plan.nodes_per_level),
            nodes_per_level=plan.nodes_per_level, num_expanded=plan.num_expanded,
            max_inputs=inputs.tokens.shape[1], POOL=inputs.pool_length,
            NORM_OUTPUT=self._projection.norm_output, **self._first_input_arguments(),
        )  # fmt: skip

    def _add_children(self, inputs: TreeBuffers, plan: TreePlan, level: int) -> None:
        """Adds children of the nodes that were expanded at a level to the pool; level 0: of the
        roots."""
        layers, kernels, draft_to_target = (
            self.layers, self._kernels, self._projection.draft_to_target,
        )  # fmt: skip
        batch, max_inputs = inputs.tokens.shape
        per_level, vocab_size = plan.nodes_per_level if level else 1, self._spec.vocab_size
        count = batch * (per_level if level else max_inputs)
        tiles, tile = layers.lm_head(count, sums=not plan.sampled)
        full_vocab = draft_to_target is None
        arguments = {
            "logits": layers.logits,
            "draft_to_target": inputs.pool["pool_tokens"] if full_vocab else draft_to_target,
            **inputs.pool,
            "expanded": inputs.expanded,
            "num_inputs": inputs.num_inputs,
            "level": level,
            "nodes_per_level": plan.nodes_per_level,
            "num_expanded": max(1, plan.num_expanded),
            "max_inputs": max_inputs,
            "ROOT": level == 0,
            "POOL": inputs.pool_length,
            "CHILDREN": plan.num_children,
            "VOCAB_SIZE": vocab_size,
            "FULL_VOCAB": full_vocab,
        }
        if plan.sampled:
            layers.launch(
                kernels.add_children_sampled, (batch, per_level), **arguments,
                rng_keys=inputs.rng_keys, temperatures=inputs.temperatures,
                max_depth=plan.max_depth, BLOCK=next_power_of_two(vocab_size), num_warps=16,
            )  # fmt: skip
        else:
            layers.launch(
                kernels.add_children, (batch, per_level), **arguments,
                tile_max=layers.tile_max, tile_sums=layers.tile_sums, tiles=tiles,
                TILES=next_power_of_two(tiles), TILE=tile,
            )  # fmt: skip

    def _first_input_arguments(self) -> dict[str, Any]:
        """Arguments of kernels that store the input of the first layer's attention."""
        projection, hidden_size = self._projection, self._spec.hidden_size
        return {
            "embeddings": projection.embed.weight,
            "embed_norm": projection.embed_norm,
            "hidden_norm": projection.hidden_norm,
            "first_input": self._first_input,
            "x": self.layers.x,
            "eps": self._spec.norm_eps,
            "HIDDEN": hidden_size,
            "BLOCK": next_power_of_two(hidden_size),
            "NORM_RESIDUAL": projection.norm_before_residual,
        }


def _padded_length(num_inputs: int) -> int:
    """Inputs of a sequence in the graph for `num_inputs`, padding included."""
    return max(MIN_INPUTS, next_power_of_two(num_inputs))


def _padded(numbers: Sequence[int], length: int) -> list[int]:
    return [*numbers, *[0] * (length - len(numbers))]
