"""CUDA graphs by the shape of a pass, captured when first needed and bounded in number.

Launching the hundreds of kernels of a pass one by one takes the host longer than the GPU needs to
run them. A graph launches them all at once; it can be replayed because everything that changes
from pass to pass lies in one small block of integers (`Inputs`) that travels in one copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from draftahead import tree

MOST_GRAPHS = 64
LETTERS = 8


class Inputs:
    """Of a pass over [texts, nodes]: one int64 block on the device, and its parts."""

    def __init__(self, texts: int, nodes: int, device: torch.device) -> None:
        count = texts * nodes
        self.block = torch.zeros(1 + texts + 3 * count, dtype=torch.int64, device=device)
        sizes = [1, texts, count, count, count]
        self.real, self.lengths, *parts = torch.split(self.block, sizes)
        self.tokens, self.depths, self.ancestors = (part.view(texts, nodes) for part in parts)
        # Several, so that passes can be sent one after another before the first has run.
        self._letters = [Letter(len(self.block)) for _ in range(LETTERS)]
        self._sent = 0
        self._nodes, self._chain = nodes, tree.ancestor_bits(range(-1, nodes - 1))

    def fill(
        self,
        tokens: Tensor,
        lengths: Seq[int],
        parents: Seq[Seq[int]] | None,
        real: int,
    ) -> None:
        """Sends everything, without waiting for the device. Tokens may be there already."""
        at_hand = tokens.device.type == "cpu"
        texts = len(lengths)
        if parents is None:
            depths, ancestors = list(range(self._nodes)) * texts, self._chain * texts
        else:
            depths = [depth for row in parents for depth in tree.depths(row)]
            ancestors = [word for row in parents for word in tree.ancestor_bits(row)]
        said = tokens.flatten().tolist() if at_hand else [0] * tokens.numel()
        letter = self._letters[self._sent % LETTERS]
        self._sent += 1
        letter.send([real, *lengths, *said, *depths, *ancestors], self.block)
        if not at_hand:
            self.tokens.copy_(tokens)


class Letter:
    """Pinned memory for one copy to the device. Written again only when that copy is done."""

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.int64).pin_memory()
        self._words = self._memory.numpy()
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, words: list[int], to: Tensor) -> None:
        self._sent.synchronize()
        self._words[:] = words
        to.copy_(self._memory, non_blocking=True)
        self._sent.record()


class Graph:
    """One shape of pass. Its first run records it."""

    def __init__(
        self, inputs: Inputs, body: Callable[[Inputs], tuple[Tensor, ...]], pool: Any
    ) -> None:
        self.inputs, self._body, self._pool = inputs, body, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: tuple[Tensor, ...] = ()

    def run(self) -> tuple[Tensor, ...]:
        """The output's memory belongs to the graph: good until its next run."""
        if self._graph is None:
            self._body(
                self.inputs
            )  # compiles kernels and makes workspaces: neither may be recorded
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._output = self._body(self.inputs)
            self._graph = graph
        self._graph.replay()
        return self._output


class Graphs:
    def __init__(self, device: torch.device, most: int = MOST_GRAPHS) -> None:
        self._device, self._most = device, most
        self._pool = torch.cuda.graph_pool_handle()
        self._kept: OrderedDict[Hashable, Graph] = OrderedDict()

    def get(
        self, key: Hashable, texts: int, nodes: int, body: Callable[[Inputs], tuple[Tensor, ...]]
    ) -> Graph:
        """The graph for a key; the one least lately used makes room for a new one."""
        graph = self._kept.pop(key, None)
        if graph is None:
            if len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            graph = Graph(Inputs(texts, nodes, self._device), body, self._pool)
        self._kept[key] = graph
        return graph

    def __len__(self) -> int:
        return len(self._kept)
