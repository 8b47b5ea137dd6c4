"""The EAGLE-3 head (Li et al., arXiv 2503.01840): decoder layers over the target's hidden states.

For every token that the target has read, its hidden states after a few layers are fused into one
feature. The head reads the feature of token j beside the embedding of token j + 1 and predicts
token j + 2. Behind the last token that the target has read, the head's own output takes the place
of the feature.

Shapes: B sequences, N nodes, H hidden size of the head, H' of the target, W hidden states of a
token (one per auxiliary layer), D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from draftahead.drafters.eagle.screening import Screening
from draftahead.drafters.rms_norm import RMSNorm
from draftahead.loader.stored import weight_of
from draftahead.models.support import text_config

# Layer, queries [B, num_heads, N, head_dim], keys and values [B, num_kv_heads, N, head_dim] of the
# nodes -> mixed values, shaped as the queries. Which earlier KV entries it reads is up to the
# caller.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

CosSin = tuple[Tensor, Tensor]  # of the rotary embedding


@dataclass
class EagleConfig:
    """A llama configuration for the layers, and what only an EAGLE head has."""

    layer: LlamaConfig
    draft_vocab_size: int  # tokens that the head can predict
    aux_layers: tuple[int, ...]  # fused are the target's hidden states after these layers
    target_hidden_size: int = 0  # hidden size of the target; 0: of the layer
    norm_before_residual: bool = False  # the residual starts normed
    norm_before_fc: bool = False  # one norm over all hidden states side by side
    fc_norm: bool = False  # one norm for each of them
    norm_output: bool = False  # an output is normed before it is fed back

    def __post_init__(self) -> None:
        self.target_hidden_size = self.target_hidden_size or int(self.layer.hidden_size)


class EagleAttention(nn.Module):
    """Grouped-query attention over inputs of `input_size`."""

    def __init__(self, config: EagleConfig, input_size: int) -> None:
        super().__init__()
        c, head_dim = config.layer, int(config.layer.head_dim)
        bias = bool(c.attention_bias)
        query_size, kv_size = (
            int(heads) * head_dim for heads in (c.num_attention_heads, c.num_key_value_heads)
        )
        self.head_dim = head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(query_size, int(c.hidden_size), bias=bias)

    def forward(
        self, x: Tensor, cos_sin: CosSin, attend: Attend, layer: int, num_outputs: int
    ) -> Tensor:
        """x [B, N, input_size] -> [B, num_outputs, H], of the last nodes."""
        cos, sin = cos_sin
        last = slice(-num_outputs, None)
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q_proj(x[:, last]), self.k_proj(x), self.v_proj(x))
        )
        query = _rotated(query, cos[:, :, last], sin[:, :, last])
        mixed = attend(layer, query, _rotated(key, cos, sin), value)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin  # type: ignore[no-any-return]


class EagleLayer(nn.Module):
    """A decoder layer. The first one of a head reads the embedding beside the feature."""

    def __init__(self, config: EagleConfig, *, is_first: bool) -> None:
        super().__init__()
        hidden_size, eps = int(config.layer.hidden_size), float(config.layer.rms_norm_eps)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        if is_first:
            self.hidden_norm = RMSNorm(hidden_size, eps)
        self.self_attn = EagleAttention(config, hidden_size * (1 + is_first))
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = LlamaMLP(config.layer)
        self._is_first, self._norms_residual = is_first, config.norm_before_residual

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        cos_sin: CosSin,
        attend: Attend,
        layer: int,
        num_outputs: int,
    ) -> Tensor:
        x, residual = self.input_projection(embedded, hidden)
        mixed = self.self_attn(x, cos_sin, attend, layer, num_outputs)
        hidden = residual[:, -num_outputs:] + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def input_projection(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the attention, [B, N, 2 * H] in the first layer, and the residual
        [B, N, H]."""
        if not self._is_first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        return x, normed if self._norms_residual else hidden


class EagleHead(nn.Module):
    """Parameters are named as in published heads. Embeddings are passed in; some heads have their
    own table."""

    def __init__(self, config: EagleConfig, *, own_embedding: bool = False) -> None:
        super().__init__()
        c, self.config = config.layer, config
        hidden_size, eps, num_aux = (
            int(c.hidden_size),
            float(c.rms_norm_eps),
            len(config.aux_layers),
        )
        target_size = config.target_hidden_size
        if own_embedding:
            self.embed_tokens = nn.Embedding(int(c.vocab_size), hidden_size)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_aux * target_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target_size, eps) for _ in range(num_aux))
        self.fc = nn.Linear(num_aux * target_size, hidden_size, bias=False)
        layers = range(int(c.num_hidden_layers))
        self.layers = nn.ModuleList(EagleLayer(config, is_first=i == 0) for i in layers)
        self.norm = RMSNorm(hidden_size, eps)
        self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)
        self.draft_to_target: Tensor  # [D] the target's token of each draft token
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size))
        self.rotary = LlamaRotaryEmbedding(c)
        self.screening: Screening | None = None  # approximate logits from fewer bytes, on a CPU

    def feature(self, hidden_states: Tensor) -> Tensor:
        """The target's hidden states [..., W, H'] -> features [..., H]."""
        if self.config.fc_norm:
            pairs = zip(self.fc_norm, hidden_states.unbind(-2), strict=True)
            hidden_states = torch.stack([norm(hidden) for norm, hidden in pairs], -2)
        joined = hidden_states.flatten(-2)
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        return self.fc(joined)  # type: ignore[no-any-return]

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        num_outputs: int | None = None,
    ) -> Tensor:
        """Embeddings of tokens, and the features or outputs of the tokens before them, both [B, N,
        H], at positions [B, N] -> outputs [B, N, H], which stand in for the features of the tokens.
        `num_outputs`: of the last nodes only; of the others only keys and values are computed."""
        cos, sin = self.rotary(hidden, positions)
        cos_sin, num_nodes = (cos[:, None], sin[:, None]), hidden.shape[1]
        for index, layer in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            count = num_outputs if is_last and num_outputs is not None else num_nodes
            hidden = layer(embedded, hidden, cos_sin, attend, index, count)
        return self.norm(hidden) if self.config.norm_output else hidden

    def normed_output(self, hidden: Tensor) -> Tensor:
        """An output [..., H] as the lm_head reads it."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., H] -> logits over the draft vocabulary [..., D]."""
        return self.lm_head(self.normed_output(hidden))  # type: ignore[no-any-return]


def new_head(
    model: Any,
    draft_to_target: Tensor,
    *,
    aux_layers: tuple[int, ...],
    num_layers: int = 1,
    intermediate_size: int | None = None,
) -> EagleHead:
    """An untrained head for a target, in float32 on its device. `draft_to_target` [D]: the tokens
    of the draft vocabulary, ascending. The lm_head and the last norm start as the target's."""
    text = text_config(model)
    config = EagleConfig(
        _layer_config(text, num_layers, intermediate_size),
        draft_vocab_size=len(draft_to_target),
        aux_layers=aux_layers,
        # Hidden states are larger after deeper layers, and very large for a few tokens: without
        # norms these dominate the others.
        norm_before_residual=True,
        fc_norm=True,
    )
    head = EagleHead(config).to(model.device)
    head.draft_to_target.copy_(draft_to_target)
    with torch.no_grad():
        vocab_rows = weight_of(model.get_output_embeddings(), head.draft_to_target)
        head.lm_head.weight.copy_(vocab_rows)
        norm = getattr(model.get_decoder(), "norm", None)
        if norm is not None and getattr(norm, "weight", vocab_rows).shape == head.norm.weight.shape:
            head.norm.weight.copy_(norm.weight)
    return head


def _layer_config(text: Any, num_layers: int, intermediate_size: int | None) -> LlamaConfig:
    """Layers as wide as the target's."""
    rope = getattr(text, "rope_parameters", None) or {}
    own_size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size or own_size,
        num_hidden_layers=num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None),
        head_dim=getattr(text, "head_dim", None),
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        tie_word_embeddings=False,
    )
