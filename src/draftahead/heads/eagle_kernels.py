"""An EAGLE head as our kernels take it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftahead.heads.eagle import EagleHead
from draftahead.kvcache import KVCache
from draftahead.runtime import cpu_head
from draftahead.runtime.cpu_head import CpuHead
from draftahead.runtime.gpu_head import Entrance, GpuHead
from draftahead.runtime.linear import fits
from draftahead.runtime.shape import (
    LINEARS,
    LayerParts,
    LlamaShape,
    NotThisShapeError,
    is_plain,
)


def cpu_kernels(head: EagleHead, shape: LlamaShape, cache: KVCache) -> CpuHead | None:
    try:
        return CpuHead(shape, cache, head.shortlist)
    except NotThisShapeError:
        return None


def cpu_entrance(
    head: EagleHead, embed: Any, turns: list[Tensor], whole: bool
) -> cpu_head.Entrance | None:
    """How it takes in states and tokens, where the CPU kernels can do that by themselves."""
    fused, first = _fusing(head), list[Any](head.layers)[0]
    near = type(embed) is nn.Embedding and is_plain(embed.weight, torch.float32, "cpu")
    if fused is None or not near or not fits(head.fc):
        return None
    return cpu_head.Entrance(
        head.fc,
        *fused,
        embed.weight,
        first.input_layernorm.weight,
        first.hidden_norm.weight,
        head.config.norm_before_residual,
        head.config.norm_output,
        turns[0],
        turns[1],
        None if whole else head.tokens,
    )


def gpu_kernels(
    head: EagleHead, shape: LlamaShape, cache: KVCache, embed: Any, turns: list[Tensor], whole: bool
) -> GpuHead | None:
    fused, c, first = _fusing(head), head.config, list[Any](head.layers)[0]
    if fused is None:
        return None
    entrance = Entrance(
        head.fc,
        *fused,
        embed,
        first.input_layernorm.weight,
        first.hidden_norm.weight,
        c.norm_before_residual,
        c.norm_output,
        None if whole else head.tokens,
    )
    try:
        return GpuHead(shape, cache, entrance, (turns[0], turns[1]))
    except NotThisShapeError:
        return None


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


def shape_of(head: EagleHead) -> LlamaShape:
    """The head's layers as our kernels take them."""
    c = head.config
    layers, stack = [], list[Any](head.layers)
    for layer in stack:
        parts = [getattr(layer.self_attn, f"{name}_proj") for name in LINEARS[:4]]
        parts += [getattr(layer.mlp, f"{name}_proj") for name in LINEARS[4:]]
        layers.append(
            LayerParts(
                linears=dict(zip(LINEARS, parts, strict=True)),
                input_norm=layer.input_layernorm.weight,
                after_norm=layer.post_attention_layernorm.weight,
                q_norm=None,
                k_norm=None,
                window=0,
                scaling=c.width**-0.5,
            )
        )
    return LlamaShape(
        model=head,
        embed=None,
        rotary=None,
        layers=layers,
        norm=head.norm.weight,
        head=head.lm_head,
        eps=float(c.layer.rms_norm_eps),
        heads=int(c.layer.num_attention_heads),
        key_heads=int(c.layer.num_key_value_heads),
        width=c.width,
        hidden=int(c.layer.hidden_size),
        inner=int(c.layer.intermediate_size),
        activation=0,
    )
