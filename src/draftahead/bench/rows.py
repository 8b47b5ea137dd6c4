"""T(rows): what a pass costs by the number of nodes it scores, beside the limit of memory.

This is the fact that speculation lives on: reading the weights costs the same for one row and
for eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from draftahead.bench.machine import reader, timed
from draftahead.models.runner import ModelRunner

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
TREE = 16  # nodes of a tree, each with two children, timed beside the chains
LOW = 10  # percentile: what the machine can do when nobody disturbs it


def weight_bytes(model: Any) -> int:
    """Bytes that a pass must read: all weights but an embedding that is only looked up in."""
    seen: dict[int, int] = {}
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight.data_ptr() == embedding.data_ptr()
    for tensor in [*model.parameters(), *model.buffers()]:
        seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    if not tied:
        seen.pop(embedding.data_ptr(), None)
    return sum(seen.values())


def between(rows: Sequence[dict[str, Any]], key: str = "median_ms") -> Callable[[int], float]:
    """The usual time of a pass in ms for any number of rows, from the ones that were measured."""
    known = [row["rows"] for row in rows]
    times = [row[key] for row in rows]
    return lambda count: float(np.interp(count, known, times))


def measure_rows(
    passes: ModelRunner,
    *,
    rows: Sequence[int] = ROWS,
    context: int = 256,
    repeats: int = 15,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Passes of each size and plain reads of as many bytes, turn by turn."""
    size = weight_bytes(passes.model)
    device, read = passes.device, reader(weight_bytes(passes.model), passes.device)
    context = max(1, min(context, passes.max_context - max(rows)))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, passes.vocab_size, (context,), generator=generator).tolist()
    passes.prefill(0, text)
    blocks = {n: torch.randint(0, passes.vocab_size, (1, n), generator=generator) for n in rows}
    jobs: dict[Any, Callable[[], Any]] = {n: partial(passes.forward, blocks[n]) for n in rows}
    jobs["read"] = read
    if passes.max_context - context >= TREE:
        nodes = torch.randint(0, passes.vocab_size, (1, TREE), generator=generator)
        bushy = torch.tensor([[-1, *((node - 1) // 2 for node in range(1, TREE))]])
        jobs["tree"] = partial(passes.forward, nodes, parents=bushy)
    spent: dict[Any, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 2):
        for name, job in jobs.items():
            spent[name].append(timed(job, device))
            if turn < 2:  # the first ones warm up
                spent[name].clear()
        progress()
    passes.cache.tokens_in[0].clear()

    def low(name: Any) -> float:
        return float(np.percentile(spent[name], LOW))

    tree = None
    if "tree" in jobs:
        tree = {"nodes": TREE, "ms": low("tree"), "over_one_row": low("tree") / low(rows[0])}
    return {
        "weight_bytes": size,
        "context": context,
        "memory_limit_ms": low("read"),
        "bandwidth_gb_per_s": size / low("read") / 1e6,
        "tree": tree,
        "rows": [
            {
                "rows": n,
                "ms": low(n),
                "median_ms": float(np.median(spent[n])),
                "over_limit": low(n) / low("read"),
                "over_one_row": low(n) / low(rows[0]),
            }
            for n in rows
        ],
    }
