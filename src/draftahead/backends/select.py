"""Chooses how a model's forward passes are run, and says why.

Candidates, the fastest first: on a CPU our C++ kernels; on a GPU our Triton kernels, then CUDA
graphs of the model's own forward. One is taken if it supports the model and agrees with the model's
own forward; otherwise transformers runs the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftahead.backends.base import Backend, UnsupportedSpecError, require
from draftahead.backends.cpu.decoder import CpuDecoder
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.backends.cuda.hf_graph import Forward, GraphedForward
from draftahead.backends.llama_spec import llama_spec_of
from draftahead.backends.own_code import autocast_of, foreign_code
from draftahead.core.device import device_of
from draftahead.kv.cache import KVCache

CPU_KERNELS, CUDA_KERNELS = "cpu kernels", "cuda kernels"
CUDA_GRAPHS, TRANSFORMERS = "cuda graphs", "transformers"

# Why a backend is taken if no faster one was rejected.
WHY = {
    CPU_KERNELS: "the model is llama-shaped and agrees with its own forward",
    CUDA_KERNELS: "the model is llama-shaped and agrees with its own forward",
    CUDA_GRAPHS: "the model's own forward, captured",
    TRANSFORMERS: "the model's own forward",
}

logger = logging.getLogger("draftahead")


@dataclass(frozen=True)
class BackendChoice:
    """Which backend runs a model, and why."""

    name: str  # CPU_KERNELS, CUDA_KERNELS, CUDA_GRAPHS or TRANSFORMERS
    reason: str  # with the reason of each faster backend that was rejected
    faster: tuple[str, ...] = ()  # what the user could do so that a faster one is taken

    def __str__(self) -> str:
        hints = f"; faster: {'; '.join(self.faster)}" if self.faster else ""
        return f"{self.name} ({self.reason}{hints})"


def select_backend(
    model: Any,
    cache: KVCache,
    attention_options: dict[int, dict[str, Any]],
    forward: Forward,
    *,
    compiled: bool,
    long_rope_threshold: int | None,
    disagreement: Callable[[Backend], str | None],
) -> tuple[Backend | None, BackendChoice]:
    """The first candidate that supports the model and has no `disagreement` with its own forward;
    None: transformers. `attention_options`: see llama_spec_of. The choice is logged."""

    def cpu_kernels() -> Backend:
        return CpuDecoder(llama_spec_of(model, cache, attention_options), cache)

    def cuda_kernels() -> Backend:
        return CudaDecoder(llama_spec_of(model, cache, attention_options), cache)

    def cuda_graphs() -> Backend:
        # A graph does not choose rotary frequencies again.
        require(long_rope_threshold is None, "rotary frequencies depend on the sequence's length")
        return GraphedForward(model, forward, cache, compiled=compiled)

    candidates: dict[str, Callable[[], Backend]] = {CPU_KERNELS: cpu_kernels}
    if device_of(cache.keys[0].device).is_gpu:
        candidates = {CUDA_KERNELS: cuda_kernels, CUDA_GRAPHS: cuda_graphs}
    name, backend = TRANSFORMERS, None
    rejected: list[str] = []
    faster: list[str] = []
    for candidate, make in candidates.items():
        try:
            _require_own_code(model)
            made = make()
            if problem := disagreement(made):
                raise UnsupportedSpecError(problem)
            name, backend = candidate, made
            break
        except UnsupportedSpecError as unsupported:
            rejected.append(f"no {candidate}: {unsupported}")
            faster += [unsupported.faster] if unsupported.faster else []
    choice = BackendChoice(name, "; ".join(rejected) or WHY[name], tuple(faster))
    logger.info("%s runs by %s", type(model).__name__, choice)
    return backend, choice


def _require_own_code(model: Any) -> None:
    """Kernels compute what transformers' own code does, and a CUDA graph does not run Python
    again: code of the user's would be left out."""
    foreign = foreign_code(model)
    require(foreign is None, str(foreign))
    require(autocast_of(model.device.type) is None, "torch.autocast is on")
