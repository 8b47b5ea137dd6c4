"""A pass of a llama-shaped decoder on a GPU: our Triton kernels, replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.backends.base import CacheSlice, DeviceTree, is_plain, require
from draftahead.backends.cuda.graphs import GraphPool, NodeInputs
from draftahead.backends.cuda.layers import MOST_ROWS, Block, CudaLayers, KVSplits, power_of_two
from draftahead.backends.llama_spec import LlamaSpec
from draftahead.core.types import ForwardOutput
from draftahead.kv.cache import KVCache

MOST_NODES = 64  # of a text: ancestors are the bits of one word
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone


class CudaDecoder:
    """A recognised model, bound to one cache."""

    batch_invariant = False  # the attention's stretches depend on how much is read
    scores_device_drafts = True
    tolerance = 0.1  # two ways of rounding to half precision

    def __init__(self, shape: LlamaSpec, cache: KVCache) -> None:
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        rope = getattr(shape.model.config, "rope_parameters", None) or {}
        require(rope.get("rope_type", "default") in ROPE_TYPES, "angles that depend on the text")
        require(type(shape.embed) is nn.Embedding, "embeddings")
        require(is_plain(shape.embed.weight, dtype, device.type), "embeddings")
        positions = torch.arange(cache.num_entries, device=device)[None]
        cos, sin = shape.rotary(shape.embed.weight[None, :1], positions)
        self.layers = CudaLayers(shape, cache, (cos[0], sin[0]))
        self.shape, self.cache, self.device = shape, cache, device
        self.graphs = GraphPool(device, type(shape.model).__name__)
        self.best = torch.empty(MOST_ROWS, dtype=torch.int64, device=device)
        self._watched: tuple[int, ...] = ()

    def capture_hidden(self, depths: tuple[int, ...]) -> None:
        self._watched = depths
        self.states = self.layers.empty(MOST_ROWS, len(depths), self.shape.hidden_size)
        self.graphs.forget()

    def supports(self, num_slots: int, num_nodes: int, with_logits: bool) -> bool:
        # A prompt is bound by arithmetic, which is not what these kernels are made for.
        small = num_nodes <= MOST_NODES and num_slots * num_nodes <= MOST_ROWS
        return with_logits and small and self.graphs.works

    def forward(
        self,
        tokens: Tensor,
        kv_lens: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput | None:
        """Nodes [B, N] -> logits [B, N, V] and the best token after each, good until the next
        pass."""
        reach = KVSplits.over(cache_slice.first_slot, cache_slice.kv_len)
        body = partial(self._pass, reach=reach)
        found = self.graphs.over(
            reach, body, tokens, kv_lens, parents, cache_slice.num_context_tokens
        )
        if found is None:
            return None
        logits, best = found
        assert logits is not None
        return ForwardOutput(logits, argmax=best)

    def _pass(self, inputs: NodeInputs, reach: KVSplits) -> tuple[Tensor | None, ...]:
        """Every kernel of a pass, in order."""
        s, layers, (texts, nodes) = self.shape, self.layers, inputs.tokens.shape
        count, kernels = texts * nodes, self.layers.kernels
        if inputs.known == "roots":
            layers.launch(
                kernels.plant, texts, inputs.roots, inputs.trees, inputs.tokens, inputs.depths,
                inputs.ancestors, s.embed.weight.shape[0], NODES=nodes, BLOCK=power_of_two(nodes),
            )  # fmt: skip
        layers.launch(
            kernels.embed, count,
            inputs.tokens, s.embed.weight, s.layers[0].input_norm, layers.x, layers.scaled,
            layers.squares[0], HIDDEN=s.hidden_size, PARTS=layers.parts, SHIFT=layers.shift,
            BLOCK=power_of_two(s.hidden_size),
        )  # fmt: skip
        block = Block(inputs.real, inputs.lengths, inputs.depths, inputs.ancestors, nodes)
        layers.run(block, reach, shown=partial(self._show, count=count))
        tiles, _ = layers.vocabulary(count)
        layers.launch(
            kernels.pick, count, layers.tops, layers.places, self.best, tiles,
            BLOCK=power_of_two(tiles),
        )  # fmt: skip
        if self._watched:
            slots = inputs.lengths[:, None] + torch.arange(nodes, device=self.device)
            states = self.states[:count].view(texts, nodes, len(self._watched), -1)
            self.cache.store_hidden(states, reach.first, slots)
        logits = layers.logits[:count].view(texts, nodes, -1)
        return logits, self.best[:count].view(texts, nodes)

    def _show(self, done: int, count: int) -> None:
        for place, depth in enumerate(self._watched):
            if depth == done:
                state = self.layers.x[:count]
                if done == len(self.shape.layers):
                    state = F.rms_norm(
                        state, state.shape[-1:], self.shape.final_norm, self.shape.norm_eps
                    )
                self.states[:count, place] = state
