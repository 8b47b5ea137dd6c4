"""Which way to run a model's passes: kernels of our own, a recording, or its own forward."""

from __future__ import annotations

from typing import Any

from draftahead.backends.base import Decoder, UnsupportedSpecError
from draftahead.backends.cpu.decoder import CpuDecoder
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.backends.cuda.hf_graph import Forward, GraphedForward
from draftahead.backends.fingerprint import is_patched
from draftahead.backends.llama_spec import recognise
from draftahead.core.device import device_of
from draftahead.kv.cache import KVCache


def kernels_for(model: Any, cache: KVCache, calls: dict[int, dict[str, Any]]) -> Decoder | None:
    """Our kernels if they know the shape."""
    try:
        shape = recognise(model, cache, calls)
        if device_of(cache.keys[0].device).is_gpu:
            return CudaDecoder(shape, cache)
        return CpuDecoder(shape, cache)
    except UnsupportedSpecError:
        return None


def recording_of(
    model: Any, cache: KVCache, forward: Forward, *, compiled: bool, switch: int | None
) -> Decoder | None:
    """On a GPU the model's own forward as a recording, unless that would leave something out or
    decide it once for all: hooks, and frequencies that switch."""
    hooks = any(is_patched(module) for module in model.modules())
    if not device_of(cache.keys[0].device).is_gpu or switch is not None or hooks:
        return None
    return GraphedForward(model, forward, cache, compiled=compiled)
