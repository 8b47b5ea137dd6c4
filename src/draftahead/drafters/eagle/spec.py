"""An EAGLE head as our kernels take it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftahead.backends.llama_spec import LINEARS, LayerSpec, LlamaSpec
from draftahead.drafters.eagle.head import EagleHead


def _fusing(head: EagleHead) -> tuple[str, Tensor] | None:
    """How states are normed before they are fused, and the weights of that [states, H']."""
    c = head.config
    none = head.norm.weight.new_ones(len(c.depths), c.target_hidden)
    if c.norm_each and c.norm_before_fuse:
        return None
    if c.norm_each:
        norms = [one.weight for one in list[Any](head.fc_norm)]
        return "each", torch.stack(norms).detach()
    if c.norm_before_fuse:
        return "all", head.input_norm.weight.detach().view_as(none)
    return "none", none


def shape_of(head: EagleHead) -> LlamaSpec:
    """The head's layers as our kernels take them."""
    c = head.config
    layers, stack = [], list[Any](head.layers)
    for layer in stack:
        parts = [getattr(layer.self_attn, f"{name}_proj") for name in LINEARS[:4]]
        parts += [getattr(layer.mlp, f"{name}_proj") for name in LINEARS[4:]]
        layers.append(
            LayerSpec(
                linears=dict(zip(LINEARS, parts, strict=True)),
                input_norm=layer.input_layernorm.weight,
                after_norm=layer.post_attention_layernorm.weight,
                q_norm=None,
                k_norm=None,
                window=0,
                scaling=c.head_dim**-0.5,
            )
        )
    return LlamaSpec(
        model=head,
        embed=None,
        rotary=None,
        layers=layers,
        norm=head.norm.weight,
        head=head.lm_head,
        eps=float(c.layer.rms_norm_eps),
        heads=int(c.layer.num_attention_heads),
        key_heads=int(c.layer.num_key_value_heads),
        width=c.head_dim,
        hidden=int(c.layer.hidden_size),
        inner=int(c.layer.intermediate_size),
        activation=0,
    )
