"""Latency of a forward pass by its number of tokens, beside the memory-bandwidth bound.

Speculative decoding gains where a forward pass over eight tokens takes about as long as over one,
because both read every weight once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from draftahead.bench.machine import memory_read, timed
from draftahead.loader.progress import progress_bar
from draftahead.loader.stored import StoredEmbedding, StoredLinear
from draftahead.models.runner import ModelRunner

NUM_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # of the forward passes that are timed
TREE_NODES = 16  # of a binary draft tree, timed beside the chains
WARM_UP = 2  # repetitions that are not counted
PERCENTILE = 10  # the latency without disturbance by other processes


def measure_latency(
    runner: ModelRunner,
    *,
    num_tokens: Sequence[int] = NUM_TOKENS,
    context: int = 256,
    repeats: int = 15,
) -> dict[str, Any]:
    """Forward passes of each size, and reads of as many bytes as the weights have, interleaved."""
    size = weight_bytes(runner.model)
    context = max(1, min(context, runner.max_context - max(*num_tokens, TREE_NODES)))
    generator = torch.Generator().manual_seed(0)

    def random_tokens(count: int) -> torch.Tensor:
        return torch.randint(0, runner.vocab_size, (1, count), generator=generator)

    runner.prefill(0, random_tokens(context)[0].tolist())
    jobs: dict[Any, Callable[[], Any]] = {
        n: partial(runner.forward, random_tokens(n)) for n in num_tokens
    }
    parents = torch.tensor([[-1, *((node - 1) // 2 for node in range(1, TREE_NODES))]])
    jobs["tree"] = partial(runner.forward, random_tokens(TREE_NODES), parents=parents)
    jobs["read"] = memory_read(size, runner.device)
    times = _interleaved(jobs, repeats, runner.device)
    runner.cache.tokens_in[0].clear()
    low = {name: float(np.percentile(ms, PERCENTILE)) for name, ms in times.items()}
    bound = low["read"]

    def figures(name: Any) -> dict[str, float]:
        return {
            "ms": low[name],
            "median_ms": float(np.median(times[name])),
            "over_bound": low[name] / bound,
            "over_one_token": low[name] / low[num_tokens[0]],
        }

    return {
        "weight_bytes": size,
        "context": context,
        "memory_bound_ms": bound,
        "bandwidth_gb_per_s": size / bound / 1e6,
        "tree": {"nodes": TREE_NODES} | figures("tree"),
        "latency": [{"tokens": n} | figures(n) for n in num_tokens],
    }


def _interleaved(
    jobs: dict[Any, Callable[[], Any]], repeats: int, device: torch.device
) -> dict[Any, list[float]]:
    """Milliseconds of each repetition of each job."""
    times: dict[Any, list[float]] = {name: [] for name in jobs}
    with progress_bar("latency by number of tokens", WARM_UP + repeats) as step:
        for _ in range(WARM_UP + repeats):
            for name, job in jobs.items():
                times[name].append(timed(job, device))
            step()
    return {name: ms[WARM_UP:] for name, ms in times.items()}


def weight_bytes(model: Any) -> int:
    """Bytes that a forward pass must read: all weights but an embedding that is not the LM head."""
    tensors = [*model.parameters(), *model.buffers()]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or _address(head) != _address(embedding):
        sizes.pop(_address(embedding), None)
    return sum(sizes.values())


def _address(layer: Any) -> int:
    """Of its weights."""
    is_stored = isinstance(layer, StoredLinear | StoredEmbedding)
    return int((layer.rows if is_stored else layer.weight).data_ptr())


def interpolated(
    latency: Sequence[dict[str, Any]], key: str = "median_ms"
) -> Callable[[int], float]:
    """Milliseconds of a forward pass over any number of tokens, from the measured ones."""
    known = [row["tokens"] for row in latency]
    times = [row[key] for row in latency]
    return lambda tokens: float(np.interp(tokens, known, times))
