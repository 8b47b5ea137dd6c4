"""The EAGLE-3 head (Li et al., arXiv 2503.01840): a decoder layer over the target's own states.

For every token that the target has read, its states after a few layers are fused into one feature.
The head sees that feature beside the embedding of the token that came next, and says what comes
after. Where the target has not been yet, the head's own output stands in for the feature.

Shapes: B texts, N nodes, H hidden, W watched states, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftahead.drafters.eagle.screening import Screening

# Layer, queries [B, heads, N, width], keys, values [B, key heads, N, width] -> mixed values, as
# the queries. Over which keys it looks besides these is the caller's affair.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class EagleConfig:
    """A llama's configuration for the layers, and what is an EAGLE head's own."""

    def __init__(
        self,
        layer: LlamaConfig,
        *,
        draft_vocabulary: int,
        depths: tuple[int, ...],
        target_hidden: int | None = None,
        norm_before_residual: bool = False,
        norm_before_fuse: bool = False,
        norm_each: bool = False,
        norm_output: bool = False,
    ) -> None:
        self.layer = layer
        self.draft_vocabulary = draft_vocabulary
        self.depths = depths  # the target's states that are fused: after so many layers
        self.target_hidden = target_hidden or int(layer.hidden_size)
        self.norm_before_residual = norm_before_residual  # the residual carries the normed feature
        self.norm_before_fuse = norm_before_fuse  # one norm over all the states side by side
        self.norm_each = norm_each  # one for each of them
        self.norm_output = norm_output  # what is fed back is normed as for the vocabulary

    @property
    def width(self) -> int:
        """Of an attention head."""
        return int(
            getattr(self.layer, "head_dim", None)
            or self.layer.hidden_size // self.layer.num_attention_heads
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: EagleConfig, inputs: int) -> None:
        super().__init__()
        c, width = config.layer, config.width
        bias = bool(getattr(c, "attention_bias", False))
        self.heads, self.key_heads = int(c.num_attention_heads), int(c.num_key_value_heads)
        self.q_proj = nn.Linear(inputs, self.heads * width, bias=bias)
        self.k_proj = nn.Linear(inputs, self.key_heads * width, bias=bias)
        self.v_proj = nn.Linear(inputs, self.key_heads * width, bias=bias)
        self.o_proj = nn.Linear(self.heads * width, int(c.hidden_size), bias=bias)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, index: int, wanted: int
    ) -> Tensor:
        cos, sin = turn
        query = _turned(
            self._split(self.q_proj(x[:, -wanted:]), self.heads),
            cos[:, :, -wanted:],
            sin[:, :, -wanted:],
        )
        key = _turned(self._split(self.k_proj(x), self.key_heads), cos, sin)
        mixed = attend(index, query, key, self._split(self.v_proj(x), self.key_heads))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = int(config.hidden_size), int(config.intermediate_size)
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A decoder layer. The first one of a head sees the embedding beside the feature."""

    def __init__(self, config: EagleConfig, *, is_first: bool) -> None:
        super().__init__()
        hidden, eps = int(config.layer.hidden_size), float(config.layer.rms_norm_eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        if is_first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden if is_first else hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = FeedForward(config.layer)
        self._is_first, self._norms_residual = is_first, config.norm_before_residual

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        attend: Attend,
        at: int,
        wanted: int,
    ) -> Tensor:
        seen, hidden = self.entrance(embedded, hidden)
        hidden = hidden[:, -wanted:] + self.self_attn(seen, turn, attend, at, wanted)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def entrance(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention looks at, and what the residual starts from."""
        if not self._is_first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        seen = torch.cat([self.input_layernorm(embedded), normed], -1)
        return seen, normed if self._norms_residual else hidden


class EagleHead(nn.Module):
    """Names as in published heads. The embedding is the target's and is passed in, unless the head
    brings one of its own."""

    def __init__(self, config: EagleConfig, *, own_embedding: bool = False) -> None:
        super().__init__()
        c, self.config = config.layer, config
        hidden, eps, states = int(c.hidden_size), float(c.rms_norm_eps), len(config.depths)
        if own_embedding:
            self.embed_tokens = nn.Embedding(int(c.vocab_size), hidden)
        if config.norm_before_fuse:
            self.input_norm = RMSNorm(states * config.target_hidden, eps)
        if config.norm_each:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden, eps) for _ in range(states))
        self.fc = nn.Linear(states * config.target_hidden, hidden, bias=False)
        count = int(c.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(config, is_first=i == 0) for i in range(count))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False)
        # Draft token -> the target's.
        self.tokens: Tensor
        self.register_buffer("tokens", torch.arange(config.draft_vocabulary))
        self.rotary = LlamaRotaryEmbedding(c)
        self.screening: Screening | None = None  # for guesses from fewer bytes, on a CPU

    def feature(self, states: Tensor) -> Tensor:
        """The target's states [..., W, H'] -> what the layers go by, [..., H]."""
        if self.config.norm_each:
            parts = zip(self.fc_norm, states.unbind(-2), strict=True)
            states = torch.stack([norm(state) for norm, state in parts], -2)
        joined = states.flatten(-2)
        if self.config.norm_before_fuse:
            joined = self.input_norm(joined)
        return self.fc(joined)  # type: ignore[no-any-return]

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: int | None = None,
    ) -> Tensor:
        """Embeddings of tokens and features (or earlier outputs) of those before them, both
        [B, N, H], at positions [B, N] -> what stands in for their own features, [B, N, H]: of the
        last `wanted`, where the others are there for their keys alone."""
        cos, sin = self.rotary(hidden, positions)
        turn, nodes = (cos[:, None], sin[:, None]), hidden.shape[1]
        for index, layer in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            asked = wanted if is_last and wanted is not None else nodes
            hidden = layer(embedded, hidden, turn, attend, index, asked)
        return self.norm(hidden) if self.config.norm_output else hidden

    def spoken(self, hidden: Tensor) -> Tensor:
        """An output as the vocabulary's rows take it."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary, [..., D]."""
        return self.lm_head(self.spoken(hidden))  # type: ignore[no-any-return]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves turned against each other, as llama does."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def new_head(
    model: Any,
    tokens: Tensor,
    *,
    depths: tuple[int, ...],
    layers: int = 1,
    inner: int | None = None,
) -> EagleHead:
    """An untrained head for a target, in float32 on its device. `tokens`: the draft vocabulary, in
    order. Its head starts as the target's rows for them, its last norm as the target's."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    layer = LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=inner or getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        tie_word_embeddings=False,
    )
    config = EagleConfig(
        layer,
        draft_vocabulary=len(tokens),
        depths=depths,
        # States grow with depth, and a few tokens' are huge: without norms they drown the rest.
        norm_before_residual=True,
        norm_each=True,
    )
    head = EagleHead(config).to(model.device)
    head.tokens.copy_(tokens)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight[head.tokens]
        head.lm_head.weight.copy_(rows)
        norm = getattr(model.get_decoder(), "norm", None)
        if norm is not None and getattr(norm, "weight", rows).shape == head.norm.weight.shape:
            head.norm.weight.copy_(norm.weight)
    return head
