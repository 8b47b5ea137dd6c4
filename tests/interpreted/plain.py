"""What the kernels compute, in plain torch, and models to compute it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cuda_models import cuda_model
from draftahead.backends.cuda.layers import CudaLayers
from draftahead.backends.llama_spec import llama_spec_of
from draftahead.kv.cache import KVCache, LayerKVShape

DTYPES = [torch.float16, torch.bfloat16]
CPU = torch.device("cpu")
ENTRIES = 320  # KV entries of a slot
# 192 inputs are no multiple of a tile of 128, and 300 outputs none of a tile of 16.
SIZES = {
    "hidden_size": 192,
    "num_hidden_layers": 1,
    "max_position_embeddings": ENTRIES,
}


def layers(kind: str, dtype: torch.dtype, slots: int = 3, **sizes: Any) -> CudaLayers:
    target = cuda_model(kind, dtype, **(SIZES | sizes))
    c = target.config
    shapes = [LayerKVShape(c.num_key_value_heads, c.head_dim, c.num_key_value_heads, c.head_dim)]
    cache = KVCache(shapes * c.num_hidden_layers, slots, ENTRIES, dtype, CPU)
    call = {"sliding_window": getattr(c, "sliding_window", None)}
    spec = llama_spec_of(target, cache, dict.fromkeys(range(c.num_hidden_layers), call))
    positions = torch.arange(ENTRIES)[None]
    cos, sin = spec.rotary(spec.embed.weight[None, :1], positions)
    return CudaLayers(spec, cache, (cos[0], sin[0]))


def noise(*size: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Up to roundings to half precision; what is not finite must be the same."""
    found, truth = found.detach().double(), truth.detach().double()
    finite = truth.isfinite()
    assert torch.equal(found.isfinite(), finite)
    assert torch.equal(found.isnan(), truth.isnan())
    gap = (found - truth)[finite].norm() / truth[finite].norm()
    assert float(gap) < (2e-3 if dtype == torch.float16 else 1.2e-2), float(gap)


def assert_exact(found: Tensor, truth: Tensor) -> None:
    """For float32 sums in another order."""
    assert torch.allclose(found.float(), truth.float(), rtol=2e-5, atol=1e-6), (found, truth)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


def depths_of(parents: list[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def ancestor_bits(parents: list[int]) -> list[int]:
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else 0) | 1 << node)
    return found
