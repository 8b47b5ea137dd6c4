"""The model's own forward, captured as CUDA graphs: for models that our kernels do not support.

A graph repeats host values of its capture, so the mask, the positions and the KV entries are
computed on the device from the graph's inputs. With `compiled`, each layer also goes through
torch.compile: fewer kernels, for some seconds of compilation at every new number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.backends.base import CacheSlice, DeviceTree, UnsupportedSpecError
from draftahead.backends.cuda.graphs import ForwardInputs, GraphPool, Inputs
from draftahead.backends.cuda.layers import next_power_of_two
from draftahead.backends.modules import layers_of, patched_forwards
from draftahead.core.tree import MAX_NODES
from draftahead.core.types import ForwardOutput
from draftahead.errors import ConfigError
from draftahead.kv import attention
from draftahead.kv.cache import CacheView, KVCache

MAX_COMPILED_SHAPES = 64  # of one layer
# Fewest KV entries that a forward reads; more are powers of two. A smaller number reads less in
# short contexts, and captures more graphs.
MIN_KV_LEN = 256
MIN_PREFILL = 32  # fewest tokens of a prefill graph; more are powers of two

Forward = Callable[[Tensor, Tensor, Tensor, CacheView, bool], Tensor]


class GraphedForward:
    """A Backend: the model's own forward as a CUDA graph."""

    batch_invariant = supports_device_drafts = False

    def __init__(self, model: Any, forward: Forward, cache: KVCache, *, compiled: bool) -> None:
        self._forward, self._cache = forward, cache
        self.graphs = GraphPool(cache.keys[0].device, type(model).__name__)
        self._layers = CompiledLayers(model) if compiled else None
        half = cache.keys[0].dtype in (torch.bfloat16, torch.float16)
        self.tolerance = 0.1 if half else 1e-3  # padding the KV entries changes rounding

    def set_aux_layers(self, aux_layers: tuple[int, ...]) -> None:
        self.graphs.forget()  # the forward itself stores the hidden states

    def supports(self, num_sequences: int, num_nodes: int, with_logits: bool) -> bool:
        return self.graphs.can_capture and with_logits and num_nodes <= MAX_NODES

    def forward(
        self,
        tokens: Tensor,
        num_cached: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput | None:
        cache_slice = cache_slice._replace(kv_len=_padded_kv_len(cache_slice.kv_len, self._cache))
        found = self.graphs.run_nodes(
            cache_slice,
            partial(self._launch, cache_slice=cache_slice),
            tokens,
            num_cached,
            parents,
            cache_slice.num_context_tokens,
        )
        if found is None:
            return None
        (logits,) = found
        assert logits is not None
        return ForwardOutput(logits)

    def _launch(self, inputs: ForwardInputs, cache_slice: CacheSlice) -> tuple[Tensor | None, ...]:
        first_slot, kv_len, last_position, num_context_tokens = cache_slice
        num_nodes, num_cached = inputs.tokens.shape[1], inputs.num_cached
        index = torch.arange(num_nodes, device=num_cached.device)
        ancestors = ((inputs.ancestors[:, :, None] >> index) & 1) == 1
        mask = attention.distances(num_cached, inputs.depths, ancestors, kv_len)
        positions = (num_cached[:, None] + inputs.depths).clamp(max=last_position)
        entries = num_cached[:, None] + index
        view = CacheView(self._cache, first_slot, entries, kv_len, num_context_tokens)
        with nullcontext() if self._layers is None else self._layers.patched():
            return (self._forward(inputs.tokens, positions, mask, view, True),)


def _padded_kv_len(kv_len: int, cache: KVCache) -> int:
    return min(max(MIN_KV_LEN, next_power_of_two(kv_len)), cache.num_entries)


class PrefillInputs(Inputs):
    """Inputs of a forward over `num_tokens` prompt tokens of one sequence."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        super().__init__([(1,), (1,), (1,), (1, num_tokens)], device)
        self.slot, self.num_cached, self.num_context_tokens, self.tokens = self.parts


class GraphedPrefill:
    """Prefill by a model's own forward, or by a head's. A few hundred tokens are launch-bound: the
    GPU computes them faster than the host launches the kernels. So from the second prompt of about
    the same length on, prefill is a CUDA graph."""

    def __init__(self, owner: str, forward: Forward, cache: KVCache) -> None:
        self._forward, self._cache = forward, cache
        self.graphs = GraphPool(cache.keys[0].device, owner)
        self._seen: set[tuple[int, int]] = set()

    def run(self, slot: int, tokens: Sequence[int], num_cached: int, last_position: int) -> bool:
        """Computes tokens behind `num_cached` entries of a slot; False if nothing was computed."""
        size = max(MIN_PREFILL, next_power_of_two(len(tokens)))
        kv_len = _padded_kv_len(num_cached + size, self._cache)
        is_new = (size, kv_len) not in self._seen
        self._seen.add((size, kv_len))
        if is_new or num_cached + size > kv_len or not self.graphs.can_capture:
            return False

        def write(inputs: PrefillInputs) -> None:
            inputs.words[:] = [slot, num_cached, len(tokens), *tokens, *[0] * (size - len(tokens))]

        found = self.graphs.run(
            (size, kv_len, last_position),
            partial(self._launch, kv_len=kv_len, last_position=last_position),
            lambda: PrefillInputs(size, self._cache.keys[0].device),
            write,
        )
        return found is not None

    def _launch(
        self, inputs: PrefillInputs, kv_len: int, last_position: int
    ) -> tuple[Tensor | None, ...]:
        depths = torch.arange(inputs.tokens.shape[1], device=inputs.num_cached.device)[None]
        mask = attention.distances(inputs.num_cached, depths, None, kv_len)
        entries = inputs.num_cached[:, None] + depths
        view = CacheView(self._cache, inputs.slot, entries, kv_len, inputs.num_context_tokens)
        positions = entries.clamp(max=last_position)
        return (self._forward(inputs.tokens, positions, mask, view, False),)


class CompiledLayers:
    """The decoder layers of a model, one compiled function for all of them."""

    def __init__(self, model: Any) -> None:
        try:
            layers = layers_of(model)
        except ConfigError as unknown:
            raise UnsupportedSpecError(str(unknown)) from unknown
        self._forwards = [(layer, partial(self._run, i, layer)) for i, layer in enumerate(layers)]
        # The compiler counts shapes by code object: so each model has its own.
        code = _call.__code__.replace(co_name=f"{type(model).__name__}_{id(self)}")
        self._compiled = torch.compile(FunctionType(code, globals()), dynamic=False)

    @contextmanager
    def patched(self) -> Iterator[None]:
        limit = torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_SHAPES)
        with patched_forwards(self._forwards), limit:
            yield

    def _run(self, index: int, layer: nn.Module, *args: Any, **options: Any) -> Any:
        # With the whole cache, each layer's index would be a constant of its own compiled code.
        if isinstance(view := options.get("past_key_values"), CacheView):
            options["past_key_values"] = view.of_layer(index)
        return self._compiled(layer, *args, **options)


def _call(layer: nn.Module, *args: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *args, **options)
