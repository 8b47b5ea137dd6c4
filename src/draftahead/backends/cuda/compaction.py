"""KV compaction on a GPU as one CUDA graph: its few kernels are launch-bound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from draftahead.backends.cuda.graphs import GraphPool, Inputs
from draftahead.backends.cuda.layers import next_power_of_two
from draftahead.kv.cache import KVCache, Move, copy_entries

MIN_MOVES = 8  # fewest moves of a graph; more are powers of two


class CompactionInputs(Inputs):
    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__([(3, count)], device)
        self.slots, self.to, self.source = self.parts[0]


class GraphedCompaction:
    """Moves KV entries in all layers of a cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.graphs = GraphPool(cache.keys[0].device, "the KV cache")

    def run(self, moves: Sequence[Move]) -> bool:
        """Returns False if it cannot be captured."""
        if not self.graphs.can_capture:
            return False
        count = max(MIN_MOVES, next_power_of_two(len(moves)))
        last = self._cache.num_entries - 1
        padded = [*moves, *[(0, last, last)] * (count - len(moves))]  # no-op moves

        def write(inputs: CompactionInputs) -> None:
            inputs.words[:] = [number for part in zip(*padded, strict=True) for number in part]

        device, stored = self._cache.keys[0].device, self._cache.tensors()
        key = (count, *(tensor.data_ptr() for tensor in stored))

        def body(inputs: CompactionInputs) -> tuple[Tensor | None, ...]:
            copy_entries(stored, inputs.slots, inputs.to, inputs.source)
            return ()

        make = partial(CompactionInputs, count, device)
        return self.graphs.run(key, body, make, write, once=True) is not None
