"""A whole pass of a llama-shaped decoder on the CPU, in one call of our kernels."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from draftahead import tree
from draftahead.kvcache import KVCache
from draftahead.runtime import build
from draftahead.runtime.linear import Weights, describe, fits
from draftahead.runtime.shape import (
    LayerParts,
    LlamaShape,
    NotThisShapeError,
    Place,
    Scored,
    is_plain,
    require,
)

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
        ("eps", ctypes.c_float),
        ("unused", ctypes.c_float),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "nodes", "first", "real")),
        *((name, ctypes.c_void_p) for name in ("lengths", "depths", "ancestors", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("x", "logits")),
        ("watched", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("watch", "states", "top", "scratch")),
    )


class CpuDecoder:
    """A recognised model, bound to one cache."""

    bit_stable = True

    def __init__(self, shape: LlamaShape, cache: KVCache) -> None:
        library = build.library()
        if library is None:
            raise NotThisShapeError(build.problem())
        require(cache.keys[0].dtype == torch.float32, "not float32")
        require(cache.keys[0].device.type == "cpu", "not on the CPU")
        require(shape.width % 16 == 0 and shape.inner % 16 == 0, "odd widths")
        require(fits(shape.head), "head")
        self._library, self._shape, self._cache = library, shape, cache
        self._layers = (Layer * len(shape.layers))(
            *(_layer(layer, cache.keys[i], cache.values[i]) for i, layer in enumerate(shape.layers))
        )
        self._model = Model(
            layers=ctypes.addressof(self._layers),
            layer_count=len(shape.layers),
            hidden=shape.hidden,
            heads=shape.heads,
            key_heads=shape.key_heads,
            width=shape.width,
            inner=shape.inner,
            length=cache.length,
            activation=shape.activation,
            final_norm=_vector(shape.norm),
            head=describe(shape.head),
            eps=shape.eps,
        )
        # Rounding to int8 turns the last bits of a sum into a step of the next layer's input.
        self.tolerance = 0.05 if self._model.head.scales else 1e-3
        self._exit: Callable[[Tensor], Tensor] | None = None
        self._scratch = torch.empty(0)
        self._watch = torch.empty(0, dtype=torch.int64)

    def part(
        self, layers: Seq[int], exit: Callable[[Tensor], Tensor] | None, head: Any
    ) -> CpuDecoder:
        """The same for some of the layers, over the same cache. `exit`: what becomes of states
        before the last norm. `head`: in the head's place, if there is one."""
        found = copy.copy(self)
        found._layers = (Layer * len(layers))(*(self._layers[index] for index in layers))
        found._model = Model.from_buffer_copy(self._model)
        found._model.layers = ctypes.addressof(found._layers)
        found._model.layer_count = len(layers)
        if head is not None:
            found._model.head = describe(head)
        found._exit = exit
        found._watch = torch.empty(0, dtype=torch.int64)
        return found

    def watch(self, depths: tuple[int, ...]) -> None:
        self._watch = torch.tensor(depths, dtype=torch.int64)

    def takes(self, texts: int, nodes: int, scored: bool) -> bool:
        return nodes <= MOST_ROWS  # ancestors are the bits of one word

    def run(
        self,
        tokens: Tensor,
        lengths: Seq[int],
        parents: Seq[Seq[int]] | None,
        *,
        place: Place,
        scored: bool = True,
    ) -> Scored:
        """Nodes [B, N] -> logits [B, N, V], or [B, N, 0] if not `scored`."""
        texts, nodes = tokens.shape
        depths, ancestors = _shape_of(texts, nodes, parents)
        deep = torch.tensor(depths)
        positions = (torch.tensor(lengths)[:, None] + deep).clamp(max=place.last_position)
        x = self._shape.embed(tokens).contiguous()
        turns = self._shape.rotary(x, positions)
        turns = [part.expand(texts, -1, -1).contiguous() for part in turns]
        assert turns[0].shape[-1] == self._model.width
        logits = torch.empty(texts, nodes, self._model.head.out if scored else 0)
        top = torch.empty(texts, nodes, TOP, dtype=torch.int64)
        watched = len(self._watch)
        states = torch.empty(texts, nodes, watched, self._shape.hidden) if watched else None
        at_once = max(1, MOST_ROWS // nodes)
        for start in range(0, texts, at_once):
            part = slice(start, min(start + at_once, texts))
            self._run(
                x[part],
                [turn[part] for turn in turns],
                torch.tensor(lengths[part]),
                deep[part].to(torch.int32).contiguous(),
                ancestors[part],
                (place.first + start, place.real),
                (logits[part], top[part]) if scored else None,
                None if states is None else states[part],
            )
        if states is not None:
            slots = torch.tensor(lengths)[:, None] + torch.arange(nodes)
            self._cache.store(states, place.first, slots)
        return Scored(logits, top[..., 0], top) if scored else Scored(logits)

    def _run(
        self,
        x: Tensor,
        turns: list[Tensor],
        lengths: Tensor,
        depths: Tensor,
        ancestors: list[list[int]],
        place: tuple[int, int],
        found: tuple[Tensor, Tensor] | None,
        states: Tensor | None,
    ) -> None:
        rows, nodes = x.shape[:2]
        threads, model = build.threads(), ctypes.byref(self._model)
        needed = self._library.draftahead_scratch(model, rows * nodes, threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        words = (ctypes.c_uint64 * (rows * nodes))(*(word for row in ancestors for word in row))
        arguments = Pass(
            rows=rows,
            nodes=nodes,
            first=place[0],
            real=place[1],
            lengths=lengths.data_ptr(),
            depths=depths.data_ptr(),
            ancestors=ctypes.addressof(words),
            cos=turns[0].data_ptr(),
            sin=turns[1].data_ptr(),
            x=x.data_ptr(),
            logits=None if found is None else found[0].data_ptr(),
            watched=len(self._watch),
            watch=self._watch.data_ptr(),
            states=None if states is None else states.data_ptr(),
            top=None if found is None else found[1].data_ptr(),
            scratch=self._scratch.data_ptr(),
        )
        if self._exit is not None and found is not None:
            arguments.logits = None  # the layers alone, and then none of them
            self._library.draftahead_pass(model, ctypes.byref(arguments), threads)
            x = self._exit(x).contiguous()
            arguments.x, arguments.logits = x.data_ptr(), found[0].data_ptr()
            only_head = Model.from_buffer_copy(self._model)
            only_head.layer_count = 0
            model = ctypes.byref(only_head)
        self._library.draftahead_pass(model, ctypes.byref(arguments), threads)


def _shape_of(
    texts: int, nodes: int, parents: Seq[Seq[int]] | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Depth of every node, and the set of nodes that lead to it as bits; None for chains."""
    if parents is None:
        return [list(range(nodes))] * texts, [tree.ancestor_bits(range(-1, nodes - 1))] * texts
    return [tree.depths(row) for row in parents], [tree.ancestor_bits(row) for row in parents]


def _layer(layer: LayerParts, keys: Tensor, values: Tensor) -> Layer:
    require(all(fits(linear) for linear in layer.linears.values()), "linear layers")
    return Layer(
        **{name: describe(linear) for name, linear in layer.linears.items()},
        input_norm=_vector(layer.input_norm),
        after_norm=_vector(layer.after_norm),
        q_norm=None if layer.q_norm is None else _vector(layer.q_norm),
        k_norm=None if layer.k_norm is None else _vector(layer.k_norm),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        window=layer.window,
        scaling=layer.scaling,
    )


def _vector(weight: Tensor) -> int:
    require(is_plain(weight, torch.float32, "cpu"), "norms")
    return weight.data_ptr()
