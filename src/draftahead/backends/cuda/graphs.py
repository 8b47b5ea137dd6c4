"""CUDA graphs by the shape of a forward, captured when first needed and bounded in number.

Launching the hundreds of kernels of a forward one by one takes the host longer than the GPU needs
to run them. A graph launches them all at once. Everything that changes from one forward to the next
lies in one small buffer of integers, which the graph copies to the device: the host only writes
these numbers and launches the graph.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from draftahead.backends.base import DeviceTree
from draftahead.core import tree
from draftahead.core.device import Captured, Device, GraphMemory, device_of
from draftahead.core.draft import DeviceTimer
from draftahead.core.stats import CompileTime

logger = logging.getLogger("draftahead")

# Graphs of a pool. More hold more memory; with fewer, more shapes are captured again.
MAX_GRAPHS = 256
MAX_IN_FLIGHT = 8  # graphs of one shape, so that several of its forwards can be in flight

# What the host writes of a forward's nodes: all, all but the token ids, or the roots only.
Known = Literal["all", "shape", "roots"]


class Inputs:
    """What changes from one forward to the next: a buffer of int64 in host memory and its copy on
    the device, divided into `parts`. The host writes the first `num_sent` of them."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, num_sent: int | None = None
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._block = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = zip(torch.split(self._block, sizes), shapes, strict=True)
        self.parts = [part.view(shape) for part, shape in parts]
        self._host = _pinned(self, sum(sizes[:num_sent]), device_of(device))
        self.words = self._host.numpy()

    def copy_to_device(self) -> None:
        """The first operation of a captured forward."""
        self._block[: len(self._host)].copy_(self._host, non_blocking=True)


class ForwardInputs(Inputs):
    """Inputs of a forward over nodes [B, N]."""

    def __init__(self, batch: int, num_nodes: int, device: torch.device, known: Known) -> None:
        size = (batch, num_nodes)
        shapes = [(1,), (batch,), (batch,), size, size, size, (batch, 2, num_nodes)]
        super().__init__(shapes, device, {"all": 6, "shape": 5, "roots": 3}[known])
        self.known = known
        self.num_context_tokens, self.num_cached, self.roots, *parts = self.parts
        # Of device drafts the host writes none of these; the forward computes them from `trees`.
        self.depths, self.ancestors, self.tokens, self.trees = parts
        self._chain = [*range(num_nodes)] * batch  # depths and ancestors of chains
        self._chain += tree.ancestor_bits(range(-1, num_nodes - 1)) * batch

    def write(
        self,
        tokens: Tensor,
        num_cached: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        num_context_tokens: int,
    ) -> None:
        start = [num_context_tokens, *num_cached]
        if isinstance(parents, DeviceTree):
            self.words[:] = [*start, *parents.roots]
            self.trees.copy_(parents.trees[:, :2])
            return
        shape = self._chain
        if parents is not None:
            shape = [depth for one in parents for depth in tree.depths(one)]
            shape += [word for one in parents for word in tree.ancestor_bits(one)]
        known_tokens = tokens.flatten().tolist() if self.known == "all" else ()
        self.words[:] = [*start, *[0] * len(num_cached), *shape, *known_tokens]
        if self.known == "shape":
            self.tokens.copy_(tokens)


_unused_pinned: dict[tuple[torch.device, int], list[Tensor]] = {}  # by device and length


def _pinned(owner: Inputs, length: int, device: Device) -> Tensor:
    """Pinned host memory, which is pooled: freeing it records an event in the capture stream,
    which would abort a capture."""
    unused = _unused_pinned.setdefault((device.device, length), [])
    if unused:
        device.synchronize()  # a forward of its last owner may still read it
    found = unused.pop() if unused else device.pinned(torch.zeros(length, dtype=torch.int64))
    weakref.finalize(owner, unused.append, found)
    return found


Output = tuple[Tensor | None, ...]
Body = Callable[[Any], Output]  # given its Inputs


class CapturedGraph:
    """A graph with its own inputs: other graphs of the same shape may be in flight."""

    def __init__(self, inputs: Inputs, body: Body, device: Device, memory: GraphMemory) -> None:
        self.inputs, self._body, self._device, self._memory = inputs, body, device, memory
        self._graph: Captured | None = None
        self.done = device.event()

    def capture(self) -> Captured:
        """Captures the graph unless it is captured. Runs the body several times on its inputs."""
        if self._graph is None:
            with CompileTime.counted():
                self._forward()  # compiles kernels and allocates workspaces before the capture
                # A capture that fails leaves torch's allocators in disorder, so a body that waits
                # for the device, which cannot be captured, is detected before.
                with self._device.forbid_sync():
                    self._forward()
                self._device.synchronize()
                self._graph = self._memory.capture(self._forward)
                self._graph.replay()  # the first takes longer
                self._device.synchronize()
        return self._graph

    def run(self, timer: DeviceTimer | None = None) -> Output:
        """Replays the graph. The next run overwrites the output."""
        graph = self.capture()
        if timer is not None:
            timer.mark()
        graph.replay()
        if timer is not None:
            timer.mark()
        self.done.record()
        output: Output = graph.output
        return output

    def _forward(self) -> Output:
        self.inputs.copy_to_device()
        return self._body(self.inputs)


class GraphPool:
    """Graphs by key; the least recently used one is dropped for a new one."""

    def __init__(self, device: torch.device, owner: str) -> None:
        self._device, self._owner, self.max_graphs = device_of(device), owner, MAX_GRAPHS
        self._graphs: OrderedDict[Hashable, list[CapturedGraph]] = OrderedDict()
        self.can_capture = True
        self._memory = self._device.graph_memory()

    def run_nodes(
        self,
        key: Hashable,
        body: Body,
        tokens: Tensor,
        num_cached: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        num_context_tokens: int,
    ) -> Output | None:
        """A forward over nodes [B, N]."""
        batch, num_nodes = tokens.shape
        on_host: Known = "all" if self._device.is_on_host(tokens) else "shape"
        known: Known = "roots" if isinstance(parents, DeviceTree) else on_host
        return self.run(
            (key, batch, num_nodes, known),
            body,
            lambda: ForwardInputs(batch, num_nodes, self._device.device, known),
            lambda inputs: inputs.write(tokens, num_cached, parents, num_context_tokens),
        )

    def run(
        self,
        key: Hashable,
        body: Body,
        make: Callable[[], Any],
        write: Callable[[Any], None],
        timer: DeviceTimer | None = None,
        *,
        once: bool = False,
    ) -> Output | None:
        """Replays the graph of `body`, which is captured first if needed. `make` allocates its
        Inputs, and `write` fills them each time. Returns None, with one warning, if `body` cannot
        be captured or its kernels do not compile. `once`: the body is not idempotent, so it is
        captured on zeros, for which it does nothing."""
        with self._device.as_current():
            graph = self._idle_graph(key, body, make)
            if once:
                graph.inputs.words[:] = 0
            else:
                write(graph.inputs)
            try:
                graph.capture()
            except self._device.capture_errors as failure:
                self._give_up(failure)
                return None
            if once:
                write(graph.inputs)
            return graph.run(timer)

    def _give_up(self, failure: Exception) -> None:
        """Drops all graphs and disables the pool, with one warning."""
        self.can_capture = False
        self.forget()
        reason = str(failure).strip().splitlines() or [type(failure).__name__]
        message = (
            f"forwards of {self._owner} cannot be captured as a CUDA graph, so they run eagerly, "
            f"which is slower: {reason[0]}"
        )
        logger.debug("capture failed", exc_info=failure)
        warnings.warn(message, stacklevel=3)

    def _idle_graph(self, key: Hashable, body: Body, make: Callable[[], Any]) -> CapturedGraph:
        """A graph of this key that is not in flight; a new one if there is none."""
        found = self._graphs.pop(key, [])
        self._graphs[key] = found  # now the most recently used
        graph = next((one for one in found if one.done.query()), None)
        if graph is None and len(found) >= MAX_IN_FLIGHT:
            graph = found[0]
            graph.done.synchronize()
        if graph is not None:
            found.remove(graph)
        else:
            if len(self) >= self.max_graphs:
                self._drop_oldest()
            graph = CapturedGraph(make(), body, self._device, self._memory)
        found.append(graph)
        return graph

    def forget(self) -> None:
        """Drops all graphs, after what they captured has changed."""
        if self._graphs:
            self._device.synchronize()
            self._graphs.clear()
            self._memory.reset_pool()

    def _drop_oldest(self) -> None:
        self._device.synchronize()
        oldest = next(key for key, found in self._graphs.items() if found)
        self._graphs[oldest].pop(0)
        if not self._graphs[oldest]:
            del self._graphs[oldest]

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))
