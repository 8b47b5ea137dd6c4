"""The GPU backend of llama-shaped models: a forward by our Triton kernels, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.backends.base import CacheSlice, DeviceTree, kernels_can_read, require
from draftahead.backends.cuda.graphs import ForwardInputs, GraphPool
from draftahead.backends.cuda.layers import (
    MAX_FORWARD_NODES,
    CudaAttentionMetadata,
    CudaLayers,
    KVSplits,
    next_power_of_two,
)
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core.tree import MAX_NODES
from draftahead.core.types import ForwardOutput
from draftahead.kv.cache import KVCache

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # angles depend on the position alone


class CudaDecoder:
    """A Backend: a llama-shaped model bound to one KV cache."""

    batch_invariant = False  # the number of KV splits depends on kv_len
    supports_device_drafts = True
    tolerance = 0.1  # half precision, rounded in other places

    def __init__(self, spec: LlamaSpec, cache: KVCache) -> None:
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        rope = getattr(spec.model.config, "rope_parameters", None) or {}
        rope_type = rope.get("rope_type", "default")
        require(rope_type in ROPE_TYPES, f"{rope_type} rotary angles depend on the sequence")
        require(type(spec.embed) is nn.Embedding, "the embedding is no nn.Embedding")
        plain = kernels_can_read(spec.embed.weight, dtype, device.type)
        require(plain, "the embedding has another dtype, device or layout than the KV cache")
        positions = torch.arange(cache.num_entries, device=device)[None]
        cos, sin = spec.rotary(spec.embed.weight[None, :1], positions)
        self.layers = CudaLayers(spec, cache, (cos[0], sin[0]))
        self.spec, self.cache, self.device = spec, cache, device
        self.graphs = GraphPool(device, type(spec.model).__name__)
        self.argmax = torch.empty(MAX_FORWARD_NODES, dtype=torch.int64, device=device)
        self._aux_layers: tuple[int, ...] = ()

    def set_aux_layers(self, aux_layers: tuple[int, ...]) -> None:
        self._aux_layers = aux_layers
        self._aux_hidden = self.layers.empty(
            MAX_FORWARD_NODES, len(aux_layers), self.spec.hidden_size
        )
        self.graphs.forget()

    def supports(self, num_sequences: int, num_nodes: int, with_logits: bool) -> bool:
        # Prefill is bound by arithmetic; these kernels are made for reading weights.
        small = num_nodes <= MAX_NODES and num_sequences * num_nodes <= MAX_FORWARD_NODES
        return with_logits and small and self.graphs.can_capture

    def forward(
        self,
        tokens: Tensor,
        num_cached: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput | None:
        splits = KVSplits.over(cache_slice.first_slot, cache_slice.kv_len)
        found = self.graphs.run_nodes(
            splits,
            partial(self._launch, splits=splits),
            tokens,
            num_cached,
            parents,
            cache_slice.num_context_tokens,
        )
        if found is None:
            return None
        logits, argmax = found
        assert logits is not None
        return ForwardOutput(logits, argmax=argmax)

    def _launch(self, inputs: ForwardInputs, splits: KVSplits) -> tuple[Tensor | None, ...]:
        """Launches all kernels of a forward."""
        spec, layers, kernels = self.spec, self.layers, self.layers.kernels
        batch, num_nodes = inputs.tokens.shape
        count = batch * num_nodes
        if inputs.known == "roots":
            layers.launch(
                kernels.unpack_trees, batch,
                roots=inputs.roots, trees=inputs.trees, tokens=inputs.tokens,
                depths=inputs.depths, ancestors=inputs.ancestors,
                vocab_size=spec.embed.weight.shape[0], NODES=num_nodes,
                BLOCK=next_power_of_two(num_nodes),
            )  # fmt: skip
        layers.launch(
            kernels.embed, count,
            tokens=inputs.tokens, table=spec.embed.weight, norm=spec.layers[0].input_norm,
            x=layers.x, scaled=layers.scaled, squares=layers.squares[0], HIDDEN=spec.hidden_size,
            NUM_PARTIALS=layers.num_partials, NORM_SCALE=layers.norm_scale,
            BLOCK=next_power_of_two(spec.hidden_size),
        )  # fmt: skip
        metadata = CudaAttentionMetadata(
            inputs.num_context_tokens, inputs.num_cached, inputs.depths, inputs.ancestors, num_nodes
        )
        layers.run(metadata, splits, after_layer=partial(self._store_aux_hidden, count=count))
        tiles, _ = layers.lm_head(count)
        layers.launch(
            kernels.argmax, count,
            tile_max=layers.tile_max, tile_argmax=layers.tile_argmax, best=self.argmax,
            tiles=tiles, BLOCK=next_power_of_two(tiles),
        )  # fmt: skip
        if self._aux_layers:
            entries = inputs.num_cached[:, None] + torch.arange(num_nodes, device=self.device)
            hidden = self._aux_hidden[:count].view(batch, num_nodes, len(self._aux_layers), -1)
            self.cache.store_hidden(hidden, splits.first_slot, entries)
        logits = layers.logits[:count].view(batch, num_nodes, -1)
        return logits, self.argmax[:count].view(batch, num_nodes)

    def _store_aux_hidden(self, num_layers: int, count: int) -> None:
        """Stores the hidden states after `num_layers` layers if wanted; after the last, normed."""
        for index, layer in enumerate(self._aux_layers):
            if layer == num_layers:
                hidden = self.layers.x[:count]
                if num_layers == len(self.spec.layers):
                    size = hidden.shape[-1:]
                    hidden = F.rms_norm(hidden, size, self.spec.final_norm, self.spec.norm_eps)
                self._aux_hidden[:count, index] = hidden
