"""A whole pass of a llama-shaped decoder in one call of our kernels.

Nothing of the model is written again: weights stay where they are, embeddings and rotary
frequencies come from the model's own modules, and a model is taken only if its parts are exactly
those of the shape below, its type is known, *and* a pass agrees with the model's own forward at
load. All others run through that forward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from draftahead import tree
from draftahead.kvcache import KVCache
from draftahead.runtime import build
from draftahead.runtime.linear import Weights, describe, fits

MOST_NODES = 64  # of a row: ancestors are the bits of one word
MOST_ROWS = 64  # of all nodes of a pass
# Others may have the same parts and another forward, at positions that no comparison reaches.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}


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
        *(
            (name, ctypes.c_void_p)
            for name in ["lengths", "depths", "ancestors", "cos", "sin", "x", "logits", "scratch"]
        ),
    )


class NotThisShapeError(Exception):
    """The model is of another shape than the kernels know."""


class Decoder:
    """A recognised model, bound to one cache."""

    def __init__(self, model: Any, cache: KVCache, calls: dict[int, dict[str, Any]]) -> None:
        """`calls`: what each layer passes to its attention function (scaling, window, ...)."""
        library = build.library()
        if library is None:
            raise NotThisShapeError(build.problem())
        self._library, self._hf, body = library, model, model.model
        _require(model.config.model_type in MODEL_TYPES, "another model type")
        _require(set(dict(model.named_children())) == {"model", "lm_head"}, "other heads")
        children = {"embed_tokens", "layers", "norm", "rotary_emb"}
        _require(set(dict(body.named_children())) == children, "other modules")
        _require(cache.keys[0].dtype == torch.float32, "not float32")
        _require(cache.keys[0].device.type == "cpu", "not on the CPU")
        self.embed, self.rotary = body.embed_tokens, body.rotary_emb
        layers = list(body.layers)
        self._layers = (Layer * len(layers))(
            *(
                _layer(layer, cache.keys[i], cache.values[i], calls.get(i, {}))
                for i, layer in enumerate(layers)
            )
        )
        attention, mlp = layers[0].self_attn, layers[0].mlp
        width = cache.shapes[0].key_width
        kinds = {type(layer.mlp.act_fn).__name__ for layer in layers}
        _require(len(kinds) == 1 and kinds <= set(ACTIVATIONS), f"activation {kinds}")
        _require(width % 16 == 0 and mlp.gate_proj.out_features % 16 == 0, "odd widths")
        _require(fits(model.lm_head), "head")
        eps = {_epsilon(norm) for norm in (body.norm, layers[0].input_layernorm)}
        _require(len(eps) == 1, "different epsilons")
        self._model = Model(
            layers=ctypes.addressof(self._layers),
            layer_count=len(layers),
            hidden=attention.q_proj.in_features,
            heads=attention.q_proj.out_features // width,
            key_heads=attention.k_proj.out_features // width,
            width=width,
            inner=mlp.gate_proj.out_features,
            length=cache.length,
            activation=ACTIVATIONS[kinds.pop()],
            final_norm=_vector(body.norm.weight),
            head=describe(model.lm_head),
            eps=eps.pop(),
        )
        self._bound = self._addresses()
        self.vocabulary = model.lm_head.out_features
        self.int8 = bool(self._model.head.scales)
        self._scratch = torch.empty(0)

    def _addresses(self) -> tuple[tuple[Tensor, int], ...]:
        tensors = [*self._hf.parameters(), *self._hf.buffers()]
        return tuple((tensor, tensor.data_ptr()) for tensor in tensors)

    def is_current(self) -> bool:
        """Whether the model is still what was bound: its owner may have moved, cast or replaced
        weights since, or hung hooks on its modules. To be asked before each text."""
        now, then = self._addresses(), self._bound
        return (
            len(now) == len(then)
            and all(a[0] is b[0] and a[1] == b[1] for a, b in zip(now, then, strict=True))
            and not any(_is_patched(module) for module in self._hf.modules())
        )

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: Seq[int],
        parents: Seq[Seq[int]] | None,
        first: int,
        scored: bool,
        real: int,
    ) -> Tensor:
        """As CachedModel.run: nodes [B, N] -> logits [B, N, V], or [B, N, 0] if not `scored`."""
        rows, nodes = tokens.shape
        x = self.embed(tokens).contiguous()
        turns = [part.expand(rows, -1, -1).contiguous() for part in self.rotary(x, positions)]
        assert turns[0].shape[-1] == self._model.width
        depths, ancestors = _shape_of(rows, nodes, parents)
        logits = torch.empty(rows, nodes, self.vocabulary if scored else 0)
        at_once = max(1, MOST_ROWS // nodes)
        for start in range(0, rows, at_once):
            part = slice(start, min(start + at_once, rows))
            self._run(
                x[part],
                [turn[part] for turn in turns],
                torch.tensor(lengths[part]),
                torch.tensor(depths[part], dtype=torch.int32),
                ancestors[part],
                (first + start, real),
                logits[part] if scored else None,
            )
        return logits

    def _run(
        self,
        x: Tensor,
        turns: list[Tensor],
        lengths: Tensor,
        depths: Tensor,
        ancestors: list[list[int]],
        place: tuple[int, int],
        logits: Tensor | None,
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
            logits=None if logits is None else logits.data_ptr(),
            scratch=self._scratch.data_ptr(),
        )
        self._library.draftahead_pass(model, ctypes.byref(arguments), threads)


def _shape_of(
    rows: int, nodes: int, parents: Seq[Seq[int]] | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Depth of every node, and the set of nodes that lead to it as bits; None for chains."""
    if parents is None:
        chain = [(1 << (node + 1)) - 1 for node in range(nodes)]
        return [list(range(nodes))] * rows, [chain] * rows
    ancestors = []
    for row in parents:
        seen = [1]
        for node in range(1, nodes):
            seen.append(seen[row[node]] | 1 << node)
        ancestors.append(seen)
    return [tree.depths(list(row)) for row in parents], ancestors


def _is_patched(module: Any) -> bool:
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise NotThisShapeError(what)


def _layer(layer: Any, keys: Tensor, values: Tensor, call: dict[str, Any]) -> Layer:
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    _require(set(dict(layer.named_children())) == parts, "other parts of a layer")
    attention, mlp = layer.self_attn, layer.mlp
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    _require(set(dict(attention.named_children())) <= known, "other parts of the attention")
    parts = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    _require(set(dict(mlp.named_children())) == parts, "other parts of the feed-forward")
    _require(keys.shape == values.shape, "keys and values of different widths")
    _require(call.get("softcap") is None and call.get("s_aux") is None, "softcap or sinks")
    linears = {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }
    _require(all(fits(linear) for linear in linears.values()), "linear layers")
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return Layer(
        **{name: describe(linear) for name, linear in linears.items()},
        input_norm=_vector(layer.input_layernorm.weight),
        after_norm=_vector(layer.post_attention_layernorm.weight),
        q_norm=None if norms[0] is None else _vector(norms[0].weight),
        k_norm=None if norms[1] is None else _vector(norms[1].weight),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        window=call.get("sliding_window") or 0,
        scaling=call.get("scaling") or keys.shape[-1] ** -0.5,
    )


def _vector(weight: Tensor) -> int:
    _require(weight.dtype == torch.float32 and weight.is_contiguous(), "norms")
    return weight.data_ptr()


def _epsilon(norm: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise NotThisShapeError("norms")
