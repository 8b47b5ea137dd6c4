"""A whole pass of a llama-shaped decoder on the CPU, in one call of our kernels."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.backends.base import (
    CacheSlice,
    DeviceTree,
    ForwardOutput,
    UnsupportedSpecError,
    is_plain,
    require,
)
from draftahead.backends.cpu import build
from draftahead.backends.cpu.linear import Weights, describe, fits
from draftahead.backends.cpu.lower_layers import LowerLayerCache
from draftahead.backends.llama_spec import LayerSpec, LlamaSpec
from draftahead.core import tree
from draftahead.core.device import device_of
from draftahead.kv.cache import KVCache

Exit = Callable[[Tensor], Tensor]
MOST_ROWS = 64  # of all nodes of a pass
TOP = 4  # tokens after each node that a pass names: as in model.h


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Weights) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "after_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("unused", ctypes.c_float),
    )


class Screening(ctypes.Structure):
    _fields_ = (
        *((name, Weights) for name in ("sight", "preview", "rows")),
        ("least", ctypes.c_int64),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                [
                    "layer_count",
                    "hidden",
                    "heads",
                    "key_heads",
                    "width",
                    "inner",
                    "length",
                    "activation",
                ]
            )
        ),
        ("final_norm", ctypes.c_void_p),
        ("head", Weights),
        ("shortlist", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("unused", ctypes.c_float),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "nodes", "first", "real")),
        ("lengths", ctypes.c_void_p),
        ("block", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("which", "depths", "ancestors", "cos", "sin")),
        ("seen", ctypes.c_void_p),
        ("keys_only", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "logits")),
        ("watched", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("watch", "states", "top", "scratch")),
    )


class CpuDecoder:
    """A recognised model, bound to one cache."""

    batch_invariant = True
    scores_device_drafts = False

    def __init__(self, shape: LlamaSpec, cache: KVCache) -> None:
        self._kernels, self._layers, self._model = bound(shape, cache)
        self._shape, self._cache = shape, cache
        # Rounding to int8 turns the last bits of a sum into a step of the next layer's input.
        self.tolerance = 0.05 if self._model.head.scales else 1e-3
        self._exit: Exit | None = None
        self._whole: CpuDecoder | None = None  # that this is a part of
        self._lower = 0  # of how many of the first layers, if of these
        self._below: LowerLayerCache | None = None
        self._watch = torch.empty(0, dtype=torch.int64)

    def part(self, layers: Sequence[int], exit: Exit | None, head: Any) -> CpuDecoder:
        """The same for some of the layers, over the same cache. `exit`: what becomes of states
        before the last norm. `head`: in the head's place, if there is one."""
        found = copy.copy(self)
        found._layers = (Layer * len(layers))(*(self._layers[index] for index in layers))
        found._model = self._some(0, len(layers))
        found._model.layers = ctypes.addressof(found._layers)
        if head is not None:
            found._model.head = describe(head)
        found._exit = exit
        found._watch = torch.empty(0, dtype=torch.int64)
        found._whole = self
        found._lower = len(layers) if tuple(layers) == tuple(range(len(layers))) else 0
        return found

    def _some(self, first: int, count: int) -> Model:
        """The model with some layers in a row."""
        found = Model.from_buffer_copy(self._model)
        found.layers = ctypes.addressof(self._layers) + first * ctypes.sizeof(Layer)
        found.layer_count = count
        return found

    def watch(self, depths: tuple[int, ...]) -> None:
        self._watch = torch.tensor(depths, dtype=torch.int64)

    def takes(self, texts: int, nodes: int, scored: bool) -> bool:
        return nodes <= MOST_ROWS  # ancestors are the bits of one word

    def run(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        *,
        place: CacheSlice,
        scored: bool = True,
    ) -> ForwardOutput:
        """Nodes [B, N] -> logits [B, N, V], or [B, N, 0] if not `scored`."""
        assert not isinstance(parents, DeviceTree)
        texts, count = tokens.shape
        parents = parents or [range(-1, count - 1)] * texts
        whole = self._whole or self
        below, whole._below = whole._below, None  # any pass may write where it lies
        x = self._shape.embed(tokens).contiguous()
        nodes = self._nodes(x, lengths, parents, place)
        watched = len(self._watch)
        states = torch.empty(texts, count, watched, self._shape.hidden) if watched else None
        logits = torch.empty(texts, count, self._model.head.out if scored else 0)
        top = torch.empty(texts, count, TOP, dtype=torch.int64)
        found = (logits, top) if scored else None
        model = self._model
        if self._lower:
            below = LowerLayerCache.before(below, self._lower, self._cache, place.first, lengths)
            if below is not None and not below.nodes:
                nodes = nodes._replace(real=1)  # the root, as the whole pass has it
        elif below is not None and whole is self and scored and place.real == 1 and not watched:
            come = below.places(self._cache, place.first, tokens.tolist(), parents)
            if come is not None:
                x = self._from_above(x, nodes, below, come)
                model = self._some(below.layers, len(self._layers) - below.layers)
        self._pass(model, x, nodes, found, states)
        if self._lower and below is not None:
            whole._below = below.and_then(tokens.tolist(), parents, x)
        if states is not None:
            slots = torch.tensor(lengths)[:, None] + torch.arange(count)
            self._cache.store_hidden(states, place.first, slots)
        return ForwardOutput(logits, top[..., 0], top) if scored else ForwardOutput(logits)

    def _from_above(
        self, x: Tensor, nodes: Nodes, below: LowerLayerCache, come: list[list[int]]
    ) -> Tensor:
        """States after the lower layers: of nodes that were there already, and of the others, which
        go through these layers now. `come`: where each node was, or -1."""
        count = x.shape[1]
        moved = [
            (row, to, at)
            for row, places in enumerate(come, nodes.first)
            for to, at in enumerate(places)
            if at not in (-1, to)
        ]
        self._cache.move(moved, below.layers)
        missing = max(row.count(-1) for row in come)
        # The same number in every row; what is done once more comes to the same.
        order = [sorted(range(count), key=[at != -1 for at in row].__getitem__) for row in come]
        which = torch.tensor(order)[:, :missing].contiguous()
        rows = torch.arange(len(come))[:, None]
        found = below.states[rows, torch.tensor(come).clamp(min=0)]
        if missing:
            some = x[rows, which]
            self._pass(self._some(0, below.layers), some, nodes.some(which), None, None)
            found[rows, which] = some
        return found

    def _nodes(
        self, x: Tensor, lengths: Sequence[int], parents: Sequence[Sequence[int]], place: CacheSlice
    ) -> Nodes:
        depths = torch.tensor([tree.depths(row) for row in parents])
        at = torch.tensor(lengths)
        positions = (at[:, None] + depths).clamp(max=place.last_position)
        turns = [
            turn.expand(len(x), -1, -1).contiguous() for turn in self._shape.rotary(x, positions)
        ]
        assert turns[0].shape[-1] == self._model.width
        words = torch.tensor([tree.ancestor_bits(row) for row in parents])
        return Nodes(place.first, place.real, at, depths.to(torch.int32), words, *turns)

    def _pass(
        self,
        model: Model,
        x: Tensor,
        nodes: Nodes,
        found: tuple[Tensor, Tensor] | None,
        states: Tensor | None,
    ) -> None:
        """Leaves in x what the rows are after the last layer."""
        at_once = max(1, MOST_ROWS // x.shape[1])
        for start in range(0, len(x), at_once):
            part = slice(start, start + at_once)
            some, of_them = x[part], nodes.rows(part)
            wanted = None if found is None else (found[0][part], found[1][part])
            watched = None if states is None else (self._watch, states[part])
            if self._exit is None or wanted is None:
                self._kernels.run(model, some, of_them, wanted, watched=watched)
            else:  # the layers alone, and then none of them
                self._kernels.run(model, some, of_them, None, watched=watched)
                out = self._exit(some.clone()).contiguous()
                self._kernels.run(self._some(0, 0), out, of_them, wanted)


class Nodes(NamedTuple):
    """What a pass has to know of its nodes, [B, N]."""

    first: int  # row of the cache
    real: int
    lengths: Tensor  # [B]
    depths: Tensor
    ancestors: Tensor  # as bits
    cos: Tensor  # [B, N, width]
    sin: Tensor
    which: Tensor | None = None  # [B, U] the only ones that the pass is over

    def rows(self, part: slice) -> Nodes:
        return Nodes(
            self.first + part.start,
            self.real,
            self.lengths[part],
            self.depths[part],
            self.ancestors[part],
            self.cos[part],
            self.sin[part],
            None if self.which is None else self.which[part],
        )

    def some(self, which: Tensor) -> Nodes:
        rows = torch.arange(len(which))[:, None]
        return self._replace(cos=self.cos[rows, which], sin=self.sin[rows, which], which=which)


class Kernels:
    """The compiled library, and the memory that its passes work in."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._scratch = torch.empty(0)

    def run(
        self,
        model: Model,
        x: Tensor,
        nodes: Nodes,
        found: tuple[Tensor, Tensor] | None,
        *,
        watched: tuple[Tensor, Tensor] | None = None,
        seen: Tensor | None = None,
        keys_only: bool = False,
    ) -> None:
        """One pass over x [B, N, H], which becomes what it is after the last layer. `found`: logits
        and likeliest tokens, to be filled. `watched`: depths, and states to be filled."""
        rows, count = x.shape[:2]
        threads, pointer = build.threads(), ctypes.byref(model)
        needed = self.library.draftahead_scratch(pointer, rows * count, threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        logits, top = found or (None, None)
        watch, states = watched or (None, None)
        arguments = Pass(
            rows=rows,
            nodes=count,
            first=nodes.first,
            real=nodes.real,
            lengths=_address(nodes.lengths),
            block=nodes.depths.shape[1],
            which=_address(nodes.which),
            depths=_address(nodes.depths),
            ancestors=_address(nodes.ancestors),
            cos=_address(nodes.cos),
            sin=_address(nodes.sin),
            seen=_address(seen),
            keys_only=keys_only,
            x=_address(x),
            logits=_address(logits),
            watched=0 if watch is None else len(watch),
            watch=_address(watch),
            states=_address(states),
            top=_address(top),
            scratch=_address(self._scratch),
        )
        self.library.draftahead_pass(pointer, ctypes.byref(arguments), threads)


def _address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def bound(shape: LlamaSpec, cache: KVCache) -> tuple[Kernels, Any, Model]:
    """The kernels, and a model over a cache as they take it. Shape and cache must outlive
    what is returned: it holds addresses."""
    library = build.library()
    if library is None:
        raise UnsupportedSpecError(build.problem())
    require(cache.keys[0].dtype == torch.float32, "not float32")
    require(device_of(cache.keys[0].device).is_cpu, "not on the CPU")
    require(shape.width % 16 == 0 and shape.inner % 16 == 0, "odd widths")
    require(fits(shape.head), "head")
    layers = (Layer * len(shape.layers))(
        *(described(layer, cache.keys[i], cache.values[i]) for i, layer in enumerate(shape.layers))
    )
    model = Model(
        layers=ctypes.addressof(layers),
        layer_count=len(shape.layers),
        hidden=shape.hidden,
        heads=shape.heads,
        key_heads=shape.key_heads,
        width=shape.width,
        inner=shape.inner,
        length=cache.num_entries,
        activation=shape.activation,
        final_norm=vector(shape.norm),
        head=describe(shape.head),
        eps=shape.eps,
    )
    return Kernels(library), layers, model


def described(layer: LayerSpec, keys: Tensor, values: Tensor) -> Layer:
    require(all(fits(linear) for linear in layer.linears.values()), "linear layers")
    return Layer(
        **{name: describe(linear) for name, linear in layer.linears.items()},
        input_norm=vector(layer.input_norm),
        after_norm=vector(layer.after_norm),
        q_norm=None if layer.q_norm is None else vector(layer.q_norm),
        k_norm=None if layer.k_norm is None else vector(layer.k_norm),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        window=layer.window,
        scaling=layer.scaling,
    )


def vector(weight: Tensor) -> int:
    require(is_plain(weight, torch.float32, "cpu"), "norms")
    return weight.data_ptr()
