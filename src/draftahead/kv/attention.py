"""The attention function that every layer of the target calls, and its mask.

A model's forward hands a 4-D mask to every layer as it is. Ours holds *distances*: how many
positions a key lies behind the query, or a negative number where the query must not look. One
tensor then serves full and sliding-window layers, chains and trees (where a node's slot in the
cache is not its position).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "draftahead"
PROBE = "draftahead_probe"


def distances(lengths: Tensor, depths: Tensor, ancestors: Tensor | None, live: int) -> Tensor:
    """[B] lengths, [B, N] depths -> [B, 1, N, live] int64 distances.

    `ancestors` [B, N, N] says which nodes lead to which; None for chains, where all earlier
    ones do.
    """
    positions = lengths[:, None] + depths  # [B, N]
    slots = torch.arange(live, device=lengths.device)
    found = positions[:, :, None] - slots
    if ancestors is not None:
        rows, width = depths.shape
        apart = (depths[:, :, None] - depths[:, None, :]).where(ancestors, -1)  # [B, N, N]
        node = slots - lengths[:, None]  # which node of this pass a slot holds, [B, live]
        apart = apart.gather(2, node.clamp(0, width - 1)[:, None].expand(rows, width, live))
        apart = apart.where((node < width)[:, None], -1)
        found = found.where((node < 0)[:, None], apart)
    return found[:, None]


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, N, width]
    key: Tensor,  # [B, key heads, live, width]
    value: Tensor,  # [B, key heads, live, value width]
    attention_mask: Tensor | None,  # distances, [B, 1, N, live]
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of N nodes over the live keys, without repeating keys for grouped heads.

    The query heads that share a key head are folded into the query axis, so that one matrix
    product serves them all.
    """
    assert attention_mask is not None, "the model did not pass on our mask"
    rows, heads, nodes, width = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    scaling = width**-0.5 if scaling is None else scaling
    folded = query.reshape(rows, key_heads, group * nodes, width)
    scores = (folded @ key.transpose(2, 3)).view(rows, key_heads, group, nodes, -1) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = attention_mask >= 0
    if sliding_window is not None:
        seen &= attention_mask < sliding_window
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if s_aux is not None:  # a sink: one more logit a head that takes weight and gives no value
        sink = s_aux.to(scores.dtype).view(1, key_heads, group, 1, 1)
        scores = torch.cat([scores, sink.expand(rows, -1, -1, nodes, 1)], -1)
        weights = scores.softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.to(value.dtype).reshape(rows, key_heads, group * nodes, -1)
    mixed = (weights @ value).view(rows, heads, nodes, -1)
    return mixed.transpose(1, 2).contiguous(), None


def additive(distance: Tensor, dtype: torch.dtype) -> Tensor:
    """The same mask for models that do not use the attention interface: a float to be added."""
    hidden = torch.finfo(dtype).min
    return torch.zeros(distance.shape, dtype=dtype, device=distance.device).masked_fill_(
        distance < 0, hidden
    )


def _mask_from_us(*_: object, **__: object) -> Tensor:
    raise AssertionError("the model asked for a mask of its own although ours was passed")


def register(calls: dict[int, dict[str, Any]]) -> str:
    """Makes the function known to transformers. Both names: without the second a model would
    get no mask at all. Returns the name of a variant that notes each layer's options in `calls`.
    """

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls[int(getattr(module, "layer_idx", -1))] = kwargs
        return grouped_attention(module, *args, **kwargs)

    for name, function in ((NAME, grouped_attention), (PROBE, noting)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _mask_from_us)
    return PROBE
