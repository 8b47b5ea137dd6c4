"""An EAGLE head as our kernels take it: its layers, and the input projection of its first layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.backends.llama_spec import SILU, LlamaSpec, layer_spec
from draftahead.drafters.eagle.head import EagleHead


class InputProjection(NamedTuple):
    """How a head combines the target's hidden states and a token embedding into its input."""

    fc: Any  # linear layer over the target's hidden states of a token, side by side
    norm: str  # of the hidden states before fc: "each", "all" (as one vector) or "none"
    norm_weights: Tensor  # [hidden states, target's hidden size]; ones for "none"
    embed: Any  # nn.Embedding of the target's vocabulary
    embed_norm: Tensor  # [hidden size]
    hidden_norm: Tensor  # [hidden size]
    norm_before_residual: bool  # the residual starts from the normed feature
    norm_output: bool  # the head's output is normed before it is its next input
    draft_to_target: Tensor | None  # [draft vocabulary] token ids; None: the same vocabulary


def input_projection(
    head: EagleHead, embed: Any, draft_to_target: Tensor | None
) -> InputProjection | None:
    """None for heads that norm the hidden states twice, which no kernel of ours does."""
    c = head.config
    weights = head.norm.weight.new_ones(len(c.aux_layers), c.target_hidden_size)
    if c.fc_norm and c.norm_before_fc:
        return None
    if c.fc_norm:
        weights = torch.stack([norm.weight for norm in list[Any](head.fc_norm)]).detach()
    elif c.norm_before_fc:
        weights = head.input_norm.weight.detach().view_as(weights)
    first = list[Any](head.layers)[0]
    return InputProjection(
        fc=head.fc,
        norm="each" if c.fc_norm else "all" if c.norm_before_fc else "none",
        norm_weights=weights,
        embed=embed,
        embed_norm=first.input_layernorm.weight,
        hidden_norm=first.hidden_norm.weight,
        norm_before_residual=c.norm_before_residual,
        norm_output=c.norm_output,
        draft_to_target=draft_to_target,
    )


def head_spec(head: EagleHead) -> LlamaSpec:
    """The head's layers, without an embedding and rotary angles: each forward is given those."""
    c = head.config
    head_dim = int(c.layer.head_dim)
    return LlamaSpec(
        model=head,
        embed=None,
        rotary=None,
        layers=[layer_spec(layer, head_dim**-0.5) for layer in list[Any](head.layers)],
        final_norm=head.norm.weight,
        lm_head=head.lm_head,
        norm_eps=float(c.layer.rms_norm_eps),
        num_heads=int(c.layer.num_attention_heads),
        num_kv_heads=int(c.layer.num_key_value_heads),
        head_dim=head_dim,
        hidden_size=int(c.layer.hidden_size),
        first_input_size=2 * int(c.layer.hidden_size),  # token embeddings beside hidden states
        intermediate_size=int(c.layer.intermediate_size),
        activation=SILU,
    )
