"""Recognises llama-shaped models and describes them for our kernels.

A model is described only if its type is known and its modules are exactly those below. Weights stay
where they are; embeddings and rotary frequencies are computed by the model's own modules. A backend
built from the description must also agree with the model's own forward at load (select.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftahead.backends.base import UnsupportedSpecError, require
from draftahead.kv.cache import KVCache

# The type must be known too: a model with the same modules may differ at positions that the
# comparison at load does not reach.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SILU, GELU_TANH = 0, 1  # as enum Activation in cpu/csrc/abi.h
ACTIVATIONS = {
    "SiLUActivation": SILU,
    "SiLU": SILU,
    "GELUTanh": GELU_TANH,
    "PytorchGELUTanh": GELU_TANH,
}
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer."""

    linears: dict[str, Any]  # modules with or without bias, by the names of LINEARS
    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    sliding_window: int  # tokens; 0: none
    scaling: float  # of attention scores


@dataclass(frozen=True)
class LlamaSpec:
    """A llama-shaped model, or the layers of a head. It keeps the modules and tensors alive."""

    model: Any
    embed: Any
    rotary: Any
    layers: list[LayerSpec]
    final_norm: Tensor
    lm_head: Any
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    first_input_size: int  # of the first layer's attention: hidden_size, or an EAGLE head's own
    intermediate_size: int
    activation: int  # SILU or GELU_TANH

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.out_features)


def llama_spec_of(
    model: Any, cache: KVCache, attention_options: dict[int, dict[str, Any]]
) -> LlamaSpec:
    """`attention_options`: by layer, the options of its attention function (scaling, window).
    Raises UnsupportedSpecError with the reason if the model has another shape."""
    kind = model.config.model_type
    require(kind in MODEL_TYPES, f"model type {kind} is not one of {', '.join(MODEL_TYPES)}")
    _require_children(model, {"model", "lm_head"}, "the model")
    body = model.model
    _require_children(body, {"embed_tokens", "layers", "norm", "rotary_emb"}, "the decoder")
    _require_uniform_cache(cache)
    layers = [
        _layer_spec(layer, cache, attention_options.get(i, {}))
        for i, layer in enumerate(body.layers)
    ]
    head_dim, linears = cache.shapes[0].key_dim, layers[0].linears
    return LlamaSpec(
        model=model,
        embed=body.embed_tokens,
        rotary=body.rotary_emb,
        layers=layers,
        final_norm=body.norm.weight,
        lm_head=model.lm_head,
        norm_eps=_norm_eps([body.norm, *(m for layer in body.layers for m in _norms(layer))]),
        num_heads=linears["q"].out_features // head_dim,
        num_kv_heads=linears["k"].out_features // head_dim,
        head_dim=head_dim,
        hidden_size=linears["q"].in_features,
        first_input_size=linears["q"].in_features,
        intermediate_size=linears["gate"].out_features,
        activation=_activation(body),
    )


def _require_children(module: Any, expected: set[str], what: str) -> None:
    found = {name for name, _ in module.named_children()}
    other = ", ".join(sorted(found ^ expected))
    require(found == expected, f"{what} has other modules than a llama: {other}")


def _require_uniform_cache(cache: KVCache) -> None:
    uniform = len(set(cache.shapes)) == 1
    require(uniform, "layers have different numbers of KV heads or head sizes")
    shape = cache.shapes[0]
    same = shape.key_dim == shape.value_dim and shape.num_key_heads == shape.num_value_heads
    require(same, "keys and values have different shapes")


def _layer_spec(layer: Any, cache: KVCache, options: dict[str, Any]) -> LayerSpec:
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    _require_children(layer, parts, "a layer")
    attention, mlp = layer.self_attn, layer.mlp
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    other = {name for name, _ in attention.named_children()} - known
    require(not other, f"attention has other modules than a llama: {', '.join(sorted(other))}")
    _require_children(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"}, "a feed-forward")
    require(options.get("softcap") is None, "attention scores are soft-capped")
    require(options.get("s_aux") is None, "attention has sinks")
    scaling = options.get("scaling") or cache.shapes[0].key_dim ** -0.5
    return layer_spec(layer, scaling, options.get("sliding_window") or 0)


def layer_spec(layer: Any, scaling: float, sliding_window: int = 0) -> LayerSpec:
    """Of a layer that has the modules of a llama's."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, f"{name}_proj") for name in LINEARS[:4]]
    linears += [getattr(mlp, f"{name}_proj") for name in LINEARS[4:]]
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return LayerSpec(
        linears=dict(zip(LINEARS, linears, strict=True)),
        input_norm=layer.input_layernorm.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        sliding_window=sliding_window,
        scaling=scaling,
    )


def _activation(body: Any) -> int:
    names = {type(layer.mlp.act_fn).__name__ for layer in body.layers}
    supported = len(names) == 1 and names <= set(ACTIVATIONS)
    require(supported, f"activation {', '.join(sorted(names))} is not SiLU or GELU (tanh)")
    return ACTIVATIONS[names.pop()]


def _norms(layer: Any) -> list[nn.Module]:
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    of_heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return norms + [norm for norm in of_heads if norm is not None]


def _norm_eps(norms: list[Any]) -> float:
    found = set()
    for norm in norms:
        names = [name for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
        if not names:
            raise UnsupportedSpecError(f"norm {type(norm).__name__} has no epsilon")
        found.add(float(getattr(norm, names[0])))
    require(len(found) == 1, "norms have different epsilons")
    return found.pop()
