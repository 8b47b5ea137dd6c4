"""What our own kernels need to know of a model, and which models they take.

Nothing of a model is written again: weights stay where they are, embeddings and rotary frequencies
come from the model's own modules. A model is taken only if its parts are exactly those of the shape
below, its type is known, *and* a pass agrees with the model's own forward at load (passes.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.kvcache import KVCache

# Others may have the same parts and another forward, at positions that no comparison reaches.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


class Place(NamedTuple):
    """Where in the cache a pass stands."""

    first: int  # row of the cache that the first text lies in
    live: int  # slots to read, at least
    last_position: int  # there is none behind it; padding may point there
    real: int  # nodes that belong to the text; those behind are guesses or padding


class Ahead(NamedTuple):
    """Trees that a device is still growing. The host knows their roots alone."""

    roots: Seq[int]
    trees: Tensor  # [B, 2 or more, N]: tokens and parents, on the device

    def and_idle(self, rows: int) -> Ahead:
        """With so many rows behind them that hold no text."""
        return Ahead([*self.roots, *[0] * rows], F.pad(self.trees, (0, 0, 0, 0, 0, rows)))


class Scored(NamedTuple):
    """What a pass finds. Good until the next pass, which may write where it lies."""

    logits: Tensor  # [B, N, V]
    best: Tensor | None = None  # [B, N] the first of the largest, -1 where that is not finite
    top: Tensor | None = None  # [B, N, 4] the largest, the best first, if found on the way


class NotThisShapeError(Exception):
    """The model is of another shape than the kernels know."""


@dataclass(frozen=True)
class LayerParts:
    linears: dict[str, Any]  # by the names of LINEARS
    input_norm: Tensor
    after_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int  # 0: none
    scaling: float


@dataclass(frozen=True)
class LlamaShape:
    model: Any
    embed: Any
    rotary: Any
    layers: list[LayerParts]
    norm: Tensor
    head: Any
    eps: float
    heads: int
    key_heads: int
    width: int  # of a head
    hidden: int
    inner: int
    activation: int

    @property
    def vocabulary(self) -> int:
        return int(self.head.out_features)


class Decoder(Protocol):
    """A pass by kernels of our own, or recorded from the model's forward."""

    bit_stable: bool  # a token's logits are the same bits in every pass, whatever else is in it
    tolerance: float  # how far from the model's own forward its logits may be, relative
    reads_ahead: bool  # trees that the host has not seen yet

    def watch(self, depths: tuple[int, ...]) -> None:
        """Passes store the states after so many layers from now on; after the last one, normed."""

    def takes(self, texts: int, nodes: int, scored: bool) -> bool: ...

    def run(
        self,
        tokens: Tensor,
        lengths: Seq[int],
        parents: Seq[Seq[int]] | Ahead | None,
        *,
        place: Place,
        scored: bool = True,
    ) -> Scored | None:
        """Trees ahead are for those that read ahead. None where this pass cannot be done that way
        after all."""
        ...


def recognise(model: Any, cache: KVCache, calls: dict[int, dict[str, Any]]) -> LlamaShape:
    """`calls`: what each layer passes to its attention function (scaling, window, ...)."""
    require(model.config.model_type in MODEL_TYPES, "another model type")
    require(set(dict(model.named_children())) == {"model", "lm_head"}, "other heads")
    body = model.model
    children = {"embed_tokens", "layers", "norm", "rotary_emb"}
    require(set(dict(body.named_children())) == children, "other modules")
    layers = [_layer(layer, cache, calls.get(i, {})) for i, layer in enumerate(body.layers)]
    kinds = {type(layer.mlp.act_fn).__name__ for layer in body.layers}
    require(len(kinds) == 1 and kinds <= set(ACTIVATIONS), f"activation {kinds}")
    norms = [body.norm, *(m for layer in body.layers for m in _norms(layer))]
    eps = {_epsilon(norm) for norm in norms}
    require(len(eps) == 1, "different epsilons")
    require(not any(is_patched(module) for module in model.modules()), "hooks on its modules")
    width, linears = cache.shapes[0].key_width, layers[0].linears
    return LlamaShape(
        model=model,
        embed=body.embed_tokens,
        rotary=body.rotary_emb,
        layers=layers,
        norm=body.norm.weight,
        head=model.lm_head,
        eps=eps.pop(),
        heads=linears["q"].out_features // width,
        key_heads=linears["k"].out_features // width,
        width=width,
        hidden=linears["q"].in_features,
        inner=linears["gate"].out_features,
        activation=ACTIVATIONS[kinds.pop()],
    )


class Binding:
    """Whether a model is still what was bound: its owner may have moved, cast or replaced weights
    since, or hung hooks on its modules. To be asked before each text, and so in few steps: torch's
    own ways through a model's parts take milliseconds."""

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules())
        # What each of them consists of, as it is looked up, and as it was.
        self._parts = [
            (part, dict(part))
            for module in self._modules
            for part in (module._modules, module._parameters, module._buffers)
            if part
        ]
        tensors = (thing for _, parts in self._parts for thing in parts.values())
        self._tensors = [(t, t.data_ptr()) for t in tensors if isinstance(t, Tensor)]

    def holds(self) -> bool:
        return (
            all(_same(now, then) for now, then in self._parts)
            and all(tensor.data_ptr() == address for tensor, address in self._tensors)
            and not any(is_patched(module) for module in self._modules)
        )


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """The same things by the same names. Tensors are compared for what they are, not by value."""
    return len(now) == len(then) and all(now.get(name) is part for name, part in then.items())


def is_patched(module: Any) -> bool:
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise NotThisShapeError(what)


def _layer(layer: Any, cache: KVCache, call: dict[str, Any]) -> LayerParts:
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    require(set(dict(layer.named_children())) == parts, "other parts of a layer")
    attention, mlp = layer.self_attn, layer.mlp
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    require(set(dict(attention.named_children())) <= known, "other parts of the attention")
    parts = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    require(set(dict(mlp.named_children())) == parts, "other parts of the feed-forward")
    same = all(s.key_width == s.value_width and s.key_heads == s.value_heads for s in cache.shapes)
    require(same and len(set(cache.shapes)) == 1, "keys and values of different widths")
    require(call.get("softcap") is None and call.get("s_aux") is None, "softcap or sinks")
    linears = [getattr(attention, f"{name}_proj") for name in LINEARS[:4]]
    linears += [getattr(mlp, f"{name}_proj") for name in LINEARS[4:]]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return LayerParts(
        linears=dict(zip(LINEARS, linears, strict=True)),
        input_norm=layer.input_layernorm.weight,
        after_norm=layer.post_attention_layernorm.weight,
        q_norm=None if norms[0] is None else norms[0].weight,
        k_norm=None if norms[1] is None else norms[1].weight,
        window=call.get("sliding_window") or 0,
        scaling=call.get("scaling") or cache.shapes[0].key_width ** -0.5,
    )


def _norms(layer: Any) -> list[nn.Module]:
    found = [layer.input_layernorm, layer.post_attention_layernorm]
    heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return found + [norm for norm in heads if norm is not None]


def _epsilon(norm: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise NotThisShapeError("norms")


def is_plain(weight: Tensor, dtype: torch.dtype, device: str) -> bool:
    return weight.dtype == dtype and weight.is_contiguous() and weight.device.type == device
