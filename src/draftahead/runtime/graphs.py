"""CUDA graphs by the shape of a pass, recorded when first needed and bounded in number.

Launching the hundreds of kernels of a pass one by one takes the host longer than the GPU needs to
run them. A graph launches them all at once; it can be replayed because everything that changes
from pass to pass lies in one small block of integers, which the graph itself fetches: to the host
a pass is some numbers written to memory and one launch.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from draftahead import tree

MOST_GRAPHS = 64


class Inputs:
    """Of a pass over [texts, nodes]: a block of int64 on the host, its copy on the device, and the
    parts of that. Tokens come along, or are on the device already."""

    def __init__(self, texts: int, nodes: int, device: torch.device, *, with_tokens: bool) -> None:
        count = texts * nodes
        sizes = [1, texts, count, count, count]
        self._block = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.real, self.lengths, *parts = torch.split(self._block, sizes)
        self.depths, self.ancestors, self.tokens = (part.view(texts, nodes) for part in parts)
        sent = len(self._block) - (0 if with_tokens else count)
        self._here = _pinned(self, sent)
        self._words, self._with_tokens = self._here.numpy(), with_tokens
        chain = [*range(nodes)] * texts + tree.ancestor_bits(range(-1, nodes - 1)) * texts
        self._chain = chain  # depths and ancestors of a draft without branches

    def write(
        self, tokens: Tensor, lengths: Seq[int], parents: Seq[Seq[int]] | None, real: int
    ) -> None:
        shape = self._chain
        if parents is not None:
            shape = [depth for row in parents for depth in tree.depths(row)]
            shape += [word for row in parents for word in tree.ancestor_bits(row)]
        said = tokens.flatten().tolist() if self._with_tokens else ()
        self._words[:] = [real, *lengths, *shape, *said]
        if not self._with_tokens:
            self.tokens.copy_(tokens)

    def fetch(self) -> None:
        """The first thing a pass does."""
        self._block[: len(self._here)].copy_(self._here, non_blocking=True)


_SPARE: dict[int, list[Tensor]] = {}  # by length


def _pinned(owner: Inputs, length: int) -> Tensor:
    """Host memory that a device can read by itself, kept for the next owner. Freeing it would leave
    a mark on the stream that graphs are recorded on, and in whatever is being recorded there."""
    spare = _SPARE.setdefault(length, [])
    if spare:
        torch.cuda.synchronize()  # its last owner may have left a pass under way
    found = spare.pop() if spare else torch.zeros(length, dtype=torch.int64).pin_memory()
    weakref.finalize(owner, spare.append, found)
    return found


class Recording:
    """A graph with inputs of its own, so that others of its shape may be under way meanwhile."""

    def __init__(self, inputs: Inputs, body: Callable[[Inputs], tuple[Tensor, ...]], pool: Any):
        self.inputs, self._body, self._pool = inputs, body, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: tuple[Tensor, ...] = ()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def is_free(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def run(self) -> tuple[Tensor, ...]:
        """The output's memory belongs to the graph: good until its next run."""
        if self._graph is None:
            self._pass()  # compiles kernels and makes workspaces: neither may be recorded
            torch.cuda.synchronize()
            self._graph = self._recorded()
        self._graph.replay()
        self._done.record()
        return self._output

    def _recorded(self) -> torch.cuda.CUDAGraph:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # somebody else's memory must not be freed into the recording
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._output = self._pass()
        finally:
            if collects:
                gc.enable()
        return graph

    def _pass(self) -> tuple[Tensor, ...]:
        self.inputs.fetch()
        return self._body(self.inputs)


class Graphs:
    def __init__(self, device: torch.device, most: int = MOST_GRAPHS) -> None:
        self._device, self._most = device, most
        self._pool = torch.cuda.graph_pool_handle()
        self._kept: OrderedDict[Hashable, list[Recording]] = OrderedDict()

    def run(
        self,
        key: Hashable,
        body: Callable[[Inputs], tuple[Tensor, ...]],
        tokens: Tensor,
        lengths: Seq[int],
        parents: Seq[Seq[int]] | None,
        real: int,
    ) -> tuple[Tensor, ...]:
        """One pass, by a recording of its shape that is not under way; made if there is none."""
        texts, nodes = tokens.shape
        with_tokens = tokens.device.type == "cpu"
        key = (key, texts, nodes, with_tokens)
        found = self._kept.pop(key, [])
        self._kept[key] = found  # as the one used last
        recording = next((one for one in found if one.is_free()), None)
        if recording is None:
            if len(self) >= self._most:
                self._drop_oldest()
            inputs = Inputs(texts, nodes, self._device, with_tokens=with_tokens)
            recording = Recording(inputs, body, self._pool)
            found.append(recording)
        recording.inputs.write(tokens, lengths, parents, real)
        return recording.run()

    def _drop_oldest(self) -> None:
        torch.cuda.synchronize()
        oldest = next(iter(self._kept.values()))
        if len(self._kept) > 1:
            self._kept.popitem(last=False)
        else:
            oldest.pop(0)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))
