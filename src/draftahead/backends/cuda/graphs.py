"""CUDA graphs by the shape of a pass, recorded when first needed and bounded in number.

Launching the hundreds of kernels of a pass one by one takes the host longer than the GPU needs to
run them. A graph launches them all at once; it can be replayed because everything that changes
from pass to pass lies in one small block of integers, which the graph itself fetches: to the host
a pass is some numbers written to memory and one launch.
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

MOST_GRAPHS = 256
MOST_ALIKE = 8  # recordings of one shape: so many passes of it can be under way

# What the host knows of a pass: all, all but the tokens, or neither the tokens nor the trees.
Known = Literal["all", "shape", "roots"]


class Inputs:
    """What changes from pass to pass: a block of int64 on the host, its copy on the device, and the
    parts of that, of which the first `sent` come from the host."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, sent: int | None = None
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._block = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = zip(torch.split(self._block, sizes), shapes, strict=True)
        self.parts = [part.view(shape) for part, shape in parts]
        self._here = _pinned(self, sum(sizes[:sent]), device_of(device))
        self.words = self._here.numpy()

    def fetch(self) -> None:
        """The first thing a pass does."""
        self._block[: len(self._here)].copy_(self._here, non_blocking=True)


class NodeInputs(Inputs):
    """Of a pass over [texts, nodes]."""

    def __init__(self, texts: int, nodes: int, device: torch.device, known: Known) -> None:
        each = (texts, nodes)
        shapes = [(1,), (texts,), (texts,), each, each, each, (texts, 2, nodes)]
        super().__init__(shapes, device, {"all": 6, "shape": 5, "roots": 3}[known])
        self.known = known
        self.real, self.lengths, self.roots, *parts = self.parts
        # Of trees (tokens and parents) that are under way the pass itself finds the others.
        self.depths, self.ancestors, self.tokens, self.trees = parts
        chain = [*range(nodes)] * texts + tree.ancestor_bits(range(-1, nodes - 1)) * texts
        self._chain = chain  # depths and ancestors of a draft without branches

    def write(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        real: int,
    ) -> None:
        start = [real, *lengths]
        if isinstance(parents, DeviceTree):
            self.words[:] = [*start, *parents.roots]
            self.trees.copy_(parents.trees[:, :2])
        else:
            shape = self._chain
            if parents is not None:
                shape = [depth for row in parents for depth in tree.depths(row)]
                shape += [word for row in parents for word in tree.ancestor_bits(row)]
            said = tokens.flatten().tolist() if self.known == "all" else ()
            self.words[:] = [*start, *[0] * len(lengths), *shape, *said]
        if self.known == "shape":
            self.tokens.copy_(tokens)


_SPARE: dict[tuple[torch.device, int], list[Tensor]] = {}  # by device and length


def _pinned(owner: Inputs, length: int, device: Device) -> Tensor:
    """Host memory that a device can read by itself, kept for the next owner. Freeing it would leave
    a mark on the stream that graphs are recorded on, and in whatever is being recorded there."""
    spare = _SPARE.setdefault((device.device, length), [])
    if spare:
        device.synchronize()  # its last owner may have left a pass under way
    found = spare.pop() if spare else device.pinned(torch.zeros(length, dtype=torch.int64))
    weakref.finalize(owner, spare.append, found)
    return found


Output = tuple[Tensor | None, ...]
Body = Callable[[Any], Output]  # given its Inputs


class CapturedGraph:
    """A graph with inputs of its own, so that others of its shape may be under way meanwhile."""

    def __init__(self, inputs: Inputs, body: Body, device: Device, memory: GraphMemory) -> None:
        self.inputs, self._body, self._device, self._memory = inputs, body, device, memory
        self._graph: Captured | None = None
        self.done = device.event()

    def is_free(self) -> bool:
        return self.done.query()

    def set_up(self) -> Captured:
        """What is done meanwhile is done several times, with the inputs as they are."""
        if self._graph is None:
            with CompileTime.counted():
                self._pass()  # compiles kernels and makes workspaces: neither may be recorded
                # A pass that waits for the device cannot be recorded, and to find that out by
                # recording leaves torch's allocators in disorder. So it is found out before.
                with self._device.refusing_to_wait():
                    self._pass()
                self._device.synchronize()
                self._graph = self._memory.capture(self._pass)
                self._graph.replay()  # the first takes longer
                self._device.synchronize()
        return self._graph

    def run(self, clock: DeviceTimer | None = None) -> Output:
        """The output's memory belongs to the graph: good until its next run."""
        graph = self.set_up()
        if clock is not None:
            clock.mark()
        graph.replay()
        if clock is not None:
            clock.mark()
        self.done.record()
        output: Output = graph.output
        return output

    def _pass(self) -> Output:
        self.inputs.fetch()
        return self._body(self.inputs)


class GraphPool:
    """Recordings by key, the one least lately used dropped for a new one."""

    def __init__(self, device: torch.device, owner: str) -> None:
        self._device, self._owner, self.most = device_of(device), owner, MOST_GRAPHS
        self._kept: OrderedDict[Hashable, list[CapturedGraph]] = OrderedDict()
        self.works = True
        self._memory = self._device.graph_memory()

    def over(
        self,
        key: Hashable,
        body: Body,
        tokens: Tensor,
        lengths: Sequence[int],
        parents: Sequence[Sequence[int]] | DeviceTree | None,
        real: int,
    ) -> Output | None:
        """One pass over nodes [B, N]."""
        texts, nodes = tokens.shape
        on_host: Known = "all" if self._device.is_on_host(tokens) else "shape"
        known: Known = "roots" if isinstance(parents, DeviceTree) else on_host
        return self.run(
            (key, texts, nodes, known),
            body,
            lambda: NodeInputs(texts, nodes, self._device.device, known),
            lambda inputs: inputs.write(tokens, lengths, parents, real),
        )

    def run(
        self,
        key: Hashable,
        body: Body,
        make: Callable[[], Any],
        write: Callable[[Any], None],
        clock: DeviceTimer | None = None,
        *,
        once: bool = False,
    ) -> Output | None:
        """One pass, with Inputs made for it once and written each time; None, and a warning, where
        passes cannot be recorded or kernels not be compiled. `once`: it may not be done twice, and
        is nothing with zeros for inputs."""
        with self._device.active():
            recording = self._free(key, body, make)
            if once:
                recording.inputs.words[:] = 0
            else:
                write(recording.inputs)
            try:
                recording.set_up()
            except self._device.capture_errors as failure:
                self._give_up(failure)
                return None
            if once:
                write(recording.inputs)
            return recording.run(clock)

    def _give_up(self, failure: Exception) -> None:
        """From now on passes run eagerly. Said once: afterwards `works` is False."""
        self.works = False
        self._kept.clear()
        said = str(failure).strip().splitlines() or [type(failure).__name__]
        message = (
            f"passes of {self._owner} cannot be recorded as a CUDA graph, so they run eagerly, "
            f"at the host's pace: {said[0]}"
        )
        logger.warning(message, exc_info=failure)
        warnings.warn(message, stacklevel=3)

    def _free(self, key: Hashable, body: Body, make: Callable[[], Any]) -> CapturedGraph:
        """A recording of this shape that is not under way; made if there is none."""
        found = self._kept.pop(key, [])
        self._kept[key] = found  # as the one used last
        recording = next((one for one in found if one.is_free()), None)
        if recording is None and len(found) >= MOST_ALIKE:
            recording = found[0]
            recording.done.synchronize()
        if recording is not None:
            found.remove(recording)
        else:
            if len(self) >= self.most:
                self._drop_oldest()
            recording = CapturedGraph(make(), body, self._device, self._memory)
        found.append(recording)
        return recording

    def forget(self) -> None:
        """What was recorded is not what a pass is from now on."""
        if self._kept:
            self._device.synchronize()
            self._kept.clear()
            self._memory.renew()

    def _drop_oldest(self) -> None:
        self._device.synchronize()
        oldest = next(key for key, found in self._kept.items() if found)
        self._kept[oldest].pop(0)
        if not self._kept[oldest]:
            del self._kept[oldest]

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))
