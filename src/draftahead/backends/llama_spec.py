"""What our own kernels need to know of a model, and which models they take.

Nothing of a model is written again: weights stay where they are, embeddings and rotary frequencies
come from the model's own modules. A model is taken only if its parts are exactly those of the shape
below, its type is known, *and* a pass agrees with the model's own forward at load (passes.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError, require
from draftahead.backends.fingerprint import is_patched
from draftahead.kv.cache import KVCache

# Others may have the same parts and another forward, at positions that no comparison reaches.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LayerSpec:
    linears: dict[str, Any]  # by the names of LINEARS
    input_norm: Tensor
    after_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int  # 0: none
    scaling: float


@dataclass(frozen=True)
class LlamaSpec:
    model: Any
    embed: Any
    rotary: Any
    layers: list[LayerSpec]
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


def recognise(model: Any, cache: KVCache, calls: dict[int, dict[str, Any]]) -> LlamaSpec:
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
    width, linears = cache.shapes[0].key_dim, layers[0].linears
    return LlamaSpec(
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


def _layer(layer: Any, cache: KVCache, call: dict[str, Any]) -> LayerSpec:
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    require(set(dict(layer.named_children())) == parts, "other parts of a layer")
    attention, mlp = layer.self_attn, layer.mlp
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    require(set(dict(attention.named_children())) <= known, "other parts of the attention")
    parts = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    require(set(dict(mlp.named_children())) == parts, "other parts of the feed-forward")
    same = all(
        s.key_dim == s.value_dim and s.num_key_heads == s.num_value_heads for s in cache.shapes
    )
    require(same and len(set(cache.shapes)) == 1, "keys and values of different widths")
    require(call.get("softcap") is None and call.get("s_aux") is None, "softcap or sinks")
    linears = [getattr(attention, f"{name}_proj") for name in LINEARS[:4]]
    linears += [getattr(mlp, f"{name}_proj") for name in LINEARS[4:]]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return LayerSpec(
        linears=dict(zip(LINEARS, linears, strict=True)),
        input_norm=layer.input_layernorm.weight,
        after_norm=layer.post_attention_layernorm.weight,
        q_norm=None if norms[0] is None else norms[0].weight,
        k_norm=None if norms[1] is None else norms[1].weight,
        window=call.get("sliding_window") or 0,
        scaling=call.get("scaling") or cache.shapes[0].key_dim ** -0.5,
    )


def _norms(layer: Any) -> list[nn.Module]:
    found = [layer.input_layernorm, layer.post_attention_layernorm]
    heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return found + [norm for norm in heads if norm is not None]


def _epsilon(norm: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise UnsupportedSpecError("norms")
