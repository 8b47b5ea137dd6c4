"""Keys of accepted nodes moved up on a GPU, as one recording: its handful of kernels take the host
longer to launch one by one than the device to run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from draftahead.backends.cuda.graphs import GraphPool, Inputs
from draftahead.backends.cuda.layers import power_of_two
from draftahead.kv.cache import KVCache, compact

FEWEST = 8  # moves of a recording; more are powers of two


class CompactionInputs(Inputs):
    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__([(3, count)], device)
        self.rows, self.to, self.come = self.parts[0]


class GraphedCompaction:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.graphs = GraphPool(cache.keys[0].device, "the cache")

    def run(self, moves: Sequence[tuple[int, int, int]]) -> bool:
        """(Row, to, from) of slots; False where that cannot be recorded."""
        if not self.graphs.works:
            return False
        count = max(FEWEST, power_of_two(len(moves)))
        # What fills it up moves a slot that no move is about to where it is.
        last = self._cache.num_entries - 1
        filled = [*moves, *[(0, last, last)] * (count - len(moves))]

        def write(inputs: CompactionInputs) -> None:
            inputs.words[:] = [number for part in zip(*filled, strict=True) for number in part]

        device, stored = self._cache.keys[0].device, self._cache.tensors()
        key = (count, *(tensor.data_ptr() for tensor in stored))

        def body(inputs: CompactionInputs) -> tuple[Tensor | None, ...]:
            compact(stored, inputs.rows, inputs.to, inputs.come)
            return ()

        make = partial(CompactionInputs, count, device)
        return self.graphs.run(key, body, make, write, once=True) is not None
