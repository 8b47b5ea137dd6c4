"""The model's own forward, recorded as CUDA graphs: for models whose shape our kernels do not know.

Nothing in such a pass may depend on values that only the host knows, so the mask, the positions and
the slots are computed on the device from the integers that change. With `compiled`, each layer also
goes through torch.compile: fewer kernels, for some seconds at every new number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.backends.base import CacheSlice, DeviceTree, UnsupportedSpecError
from draftahead.backends.cuda.graphs import GraphPool, Inputs, NodeInputs
from draftahead.backends.cuda.layers import power_of_two
from draftahead.core.types import ForwardOutput
from draftahead.kv import attention
from draftahead.kv.cache import CacheView, KVCache

MOST_NODES = 64
MOST_SHAPES = 64  # that one layer is compiled for
SHORTEST = 256  # slots; longer stretches are powers of two
FEWEST = 32  # tokens of a prompt's pass; more are powers of two

Forward = Callable[[Tensor, Tensor, Tensor, CacheView, bool], Tensor]


class GraphedForward:
    batch_invariant = scores_device_drafts = False

    def __init__(self, model: Any, forward: Forward, cache: KVCache, *, compiled: bool) -> None:
        self._forward, self._cache = forward, cache
        self.graphs = GraphPool(cache.keys[0].device, type(model).__name__)
        self._layers = CompiledLayers(model) if compiled else None
        half = cache.keys[0].dtype in (torch.bfloat16, torch.float16)
        self.tolerance = 0.1 if half else 1e-3  # other numbers of slots make other sums

    def capture_hidden(self, depths: tuple[int, ...]) -> None:
        self.graphs.forget()  # the forward itself stores the states

    def supports(self, num_slots: int, num_nodes: int, with_logits: bool) -> bool:
        return self.graphs.works and with_logits and num_nodes <= MOST_NODES

    def forward(
        self,
        tokens: Tensor,
        kv_lens: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        cache_slice: CacheSlice,
        with_logits: bool = True,
    ) -> ForwardOutput | None:
        """None where a pass cannot be recorded."""
        live = SHORTEST
        while live < cache_slice.kv_len:
            live *= 2
        cache_slice = cache_slice._replace(kv_len=min(live, self._cache.num_entries))
        body = partial(self._pass, cache_slice=cache_slice)
        found = self.graphs.over(
            cache_slice, body, tokens, kv_lens, parents, cache_slice.num_context_tokens
        )
        if found is None:
            return None
        (logits,) = found
        assert logits is not None
        return ForwardOutput(logits)

    def _pass(self, inputs: NodeInputs, cache_slice: CacheSlice) -> tuple[Tensor | None, ...]:
        nodes, lengths = inputs.tokens.shape[1], inputs.lengths
        index = torch.arange(nodes, device=lengths.device)
        ancestors = ((inputs.ancestors[:, :, None] >> index) & 1) == 1
        mask = attention.distances(lengths, inputs.depths, ancestors, cache_slice.kv_len)
        positions = (lengths[:, None] + inputs.depths).clamp(max=cache_slice.last_position)
        slots = lengths[:, None] + index
        window = CacheView(
            self._cache,
            cache_slice.first_slot,
            slots,
            cache_slice.kv_len,
            cache_slice.num_context_tokens,
        )
        if self._layers is None:
            return (self._forward(inputs.tokens, positions, mask, window, True),)
        with self._layers.in_place():
            return (self._forward(inputs.tokens, positions, mask, window, True),)


class PrefillInputs(Inputs):
    """Of one text's pass over so many tokens."""

    def __init__(self, nodes: int, device: torch.device) -> None:
        super().__init__([(1,), (1,), (1,), (1, nodes)], device)
        self.row, self.length, self.real, self.tokens = self.parts


class GraphedPrefill:
    """A prompt's pass by a model's own forward, or by a head's. Few hundred tokens keep a device
    busy for less time than the host needs to launch all that; so from the second time on, passes
    over about as many tokens are recordings."""

    def __init__(self, owner: str, forward: Forward, cache: KVCache) -> None:
        self._forward, self._cache = forward, cache
        self.graphs = GraphPool(cache.keys[0].device, owner)
        self._seen: set[tuple[int, int]] = set()

    def run(self, row: int, tokens: Sequence[int], held: int, last_position: int) -> bool:
        """Tokens behind the first `held` of a row; False where the pass is for others."""
        nodes = max(FEWEST, power_of_two(len(tokens)))
        live = min(max(SHORTEST, power_of_two(held + nodes)), self._cache.num_entries)
        is_new = (nodes, live) not in self._seen
        self._seen.add((nodes, live))
        if is_new or held + nodes > live or not self.graphs.works:
            return False

        def write(inputs: PrefillInputs) -> None:
            inputs.words[:] = [row, held, len(tokens), *tokens, *[0] * (nodes - len(tokens))]

        found = self.graphs.run(
            (nodes, live, last_position),
            partial(self._pass, live=live, last_position=last_position),
            lambda: PrefillInputs(nodes, self._cache.keys[0].device),
            write,
        )
        return found is not None

    def _pass(
        self, inputs: PrefillInputs, live: int, last_position: int
    ) -> tuple[Tensor | None, ...]:
        depths = torch.arange(inputs.tokens.shape[1], device=inputs.length.device)[None]
        mask = attention.distances(inputs.length, depths, None, live)
        slots = inputs.length[:, None] + depths
        window = CacheView(self._cache, inputs.row, slots, live, inputs.real)
        positions = slots.clamp(max=last_position)
        return (self._forward(inputs.tokens, positions, mask, window, False),)


class CompiledLayers:
    """The decoder layers of a model, one compiled function for all of them."""

    def __init__(self, model: Any) -> None:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        stack = max(lists, key=len, default=None)
        if stack is None or any("past_key_values" in vars(layer) for layer in stack):
            raise UnsupportedSpecError("no list of layers")
        self._layers = list(stack)
        # The compiler counts by code: each model has its own, and room for its shapes.
        code = _call.__code__.replace(co_name=f"{type(model).__name__}_{id(self)}")
        self._compiled = torch.compile(FunctionType(code, globals()), dynamic=False)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        try:
            for index, layer in enumerate(self._layers):
                layer.__dict__["forward"] = partial(self._run, index, layer)
            with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
                yield
        finally:
            for layer in self._layers:
                del layer.__dict__["forward"]

    def _run(self, index: int, layer: nn.Module, *args: Any, **options: Any) -> Any:
        # Its own part of the cache: with all of it, the layer's number would be compiled in.
        if isinstance(window := options.get("past_key_values"), CacheView):
            options["past_key_values"] = window.of_layer(index)
        return self._compiled(layer, *args, **options)


def _call(layer: nn.Module, *args: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *args, **options)
