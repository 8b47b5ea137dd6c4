"""The attention function that every layer of the target calls, and its mask.

transformers passes a 4-D mask on to every layer unchanged. Ours holds *distances*: query position
minus key position, negative where the key is masked. One tensor then serves full and sliding-window
layers, chains and trees (where the index of a KV entry is not its position).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "draftahead"  # under which transformers finds our attention and mask functions


def distances(num_cached: Tensor, depths: Tensor, ancestors: Tensor | None, kv_len: int) -> Tensor:
    """`num_cached` [B] entries before the nodes, their `depths` [B, N] -> [B, 1, N, kv_len] int64.

    `ancestors` [B, N, N] marks the ancestors of each node; None for chains, where those are all
    earlier nodes.
    """
    positions = num_cached[:, None] + depths  # [B, N]
    entries = torch.arange(kv_len, device=num_cached.device)
    found = positions[:, :, None] - entries
    if ancestors is not None:
        batch, num_nodes = depths.shape
        apart = (depths[:, :, None] - depths[:, None, :]).where(ancestors, -1)  # [B, N, N]
        node = entries - num_cached[:, None]  # [B, kv_len] node of this forward in an entry
        index = node.clamp(0, num_nodes - 1)[:, None].expand(batch, num_nodes, kv_len)
        apart = apart.gather(2, index).where((node < num_nodes)[:, None], -1)
        found = found.where((node < 0)[:, None], apart)
    return found[:, None]


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, num_heads, N, head_dim]
    key: Tensor,  # [B, num_kv_heads, kv_len, head_dim]
    value: Tensor,  # [B, num_kv_heads, kv_len, value_dim]
    attention_mask: Tensor | None,  # distances, [B, 1, N, kv_len]
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of N nodes over the KV entries, without repeating keys for grouped heads.

    The query heads that share a KV head are folded into the query axis, so that one matrix product
    serves them all.
    """
    assert attention_mask is not None, "the model did not pass on our mask"
    batch, num_heads, num_nodes, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    scaling = head_dim**-0.5 if scaling is None else scaling
    folded = query.reshape(batch, num_kv_heads, group * num_nodes, head_dim)
    scores = (folded @ key.transpose(2, 3)).view(batch, num_kv_heads, group, num_nodes, -1)
    scores = scores * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    visible = attention_mask >= 0
    if sliding_window is not None:
        visible &= attention_mask < sliding_window
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if s_aux is not None:  # a sink: one more logit per head that takes weight and adds no value
        sink = s_aux.to(scores.dtype).view(1, num_kv_heads, group, 1, 1)
        scores = torch.cat([scores, sink.expand(batch, -1, -1, num_nodes, 1)], -1)
        weights = scores.softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.to(value.dtype).reshape(batch, num_kv_heads, group * num_nodes, -1)
    mixed = (weights @ value).view(batch, num_heads, num_nodes, -1)
    return mixed.transpose(1, 2).contiguous(), None


def additive(distance: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as a float to be added, for models that do not use the attention interface."""
    mask_value = torch.finfo(dtype).min
    return torch.zeros(distance.shape, dtype=dtype, device=distance.device).masked_fill_(
        distance < 0, mask_value
    )


# -------------------------------------------------------------------- as a model's own attention


class _ThisThread(threading.local):
    is_ours = False  # whether it runs a model inside `in_configs`
    calls: dict[int, dict[str, Any]] | None = None  # see `in_configs`


_this_thread = _ThisThread()
# By id of a configuration, the name of the attention function that its owner has chosen.
_owners_choice: dict[int, str] = {}


@contextmanager
def in_configs(
    configs: Sequence[Any], calls: dict[int, dict[str, Any]] | None = None
) -> Iterator[None]:
    """While entered, the layers with these configurations call our attention function in this
    thread, and their owner's in other threads. `calls` takes each layer's options."""
    before = [config._attn_implementation for config in configs]
    for config, name in zip(configs, before, strict=True):
        if id(config) not in _owners_choice:
            weakref.finalize(config, _owners_choice.pop, id(config), None)
        _owners_choice[id(config)] = name
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)  # without one, a model gets no mask
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        _this_thread.is_ours, _this_thread.calls = True, calls
        yield
    finally:
        _this_thread.is_ours, _this_thread.calls = False, None
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def _attention(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
    if torch.compiler.is_compiling():  # which only our own forwards do under this name
        return grouped_attention(module, *args, **options)
    if not _this_thread.is_ours:
        name = _owners_choice[id(module.config)]
        theirs = AttentionInterface().get(name, _eager_attention(module))
        return theirs(module, *args, **options)  # type: ignore[no-any-return]
    if _this_thread.calls is not None:
        _this_thread.calls[int(getattr(module, "layer_idx", -1))] = options
    return grouped_attention(module, *args, **options)


def _mask(*args: Any, config: Any = None, **options: Any) -> Any:
    assert not _this_thread.is_ours, "the model built its own mask although ours was passed"
    function = AttentionMaskInterface().get(_owners_choice[id(config)])
    return None if function is None else function(*args, config=config, **options)


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The function that transformers takes for "eager": in the file of the module's class."""
    homes = (sys.modules.get(base.__module__) for base in type(module).__mro__)
    found = (getattr(home, "eager_attention_forward", None) for home in homes)
    function: Callable[..., Any] = next(one for one in found if one is not None)
    return function
