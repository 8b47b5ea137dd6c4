"""A GPU emulated on the CPU: what is captured is recorded, and replayed into the same tensors.

A CUDA graph repeats kernels with the arguments that they had when it was captured. So does this
one, by a TorchDispatchMode: it notes ATen operations and kernel launches, and a replay runs them
again into the tensors of the first time. What the host computed meanwhile stays as it was, and what
would wait for the device raises. So tests find values that were frozen into a graph, keys of graphs
that lack something, and waits; they find no races and nothing about streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftahead.core import device as devices
from draftahead.core.device import Device

aten = torch.ops.aten
# Operations whose result the host needs, or whose result's shape depends on values.
WAITING = (
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
)
READING = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")


class Call(NamedTuple):
    run: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[Tensor]  # of the first time, that each replay writes to


class WaitRefusing(TorchDispatchMode):
    """Refuses operations that wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):  # it may hide an operation that waits
            with self:
                return func.decompose(*args, **kwargs)
        refuse(func, args)
        found = func(*args, **kwargs)
        self.note(func, args, kwargs, found)
        return found

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Any) -> None: ...


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is made of others; in inference mode it arrives in one piece."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Of arguments or results, also in lists."""
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def refuse(func: Any, args: tuple[Any, ...]) -> None:
    waits = func.overloadpacket in WAITING
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        waits = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if func.overloadpacket is aten.repeat_interleave:
        waits = len(args) < 2 or args[1] is None
    if waits:
        raise RuntimeError(f"{func} waits for the device, which a capture does not allow")


class CapturedGraph(WaitRefusing):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Any) -> None:
        if func._schema.is_mutable:
            self.calls.append(Call(func, args, kwargs, []))
            return
        given = {_place(tensor) for tensor in tensors_in((args, *kwargs.values()))}
        made = list(tensors_in(found))
        if any(_place(tensor) not in given for tensor in made):  # else it is a view, and stays one
            self.calls.append(Call(func, args, kwargs, made))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class EmulatedGraph:
    def __init__(self, output: Any, calls: list[Call]) -> None:
        self.output, self._calls = output, calls

    def replay(self) -> None:
        for call in self._calls:
            found = call.run(*call.args, **call.options)
            if call.outputs:
                for old, new in zip(call.outputs, tensors_in(found), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class EmulatedEvent:
    """Passed at the second look: the device takes some time for everything."""

    def __init__(self) -> None:
        self._is_under_way = False
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self._is_under_way, self.at = True, time.perf_counter()

    def query(self) -> bool:
        was_under_way, self._is_under_way = self._is_under_way, False
        return not was_under_way

    def synchronize(self) -> None:
        self._is_under_way = False

    def elapsed_time(self, end: EmulatedEvent) -> float:
        return 1e3 * (end.at - self.at)


class EmulatedGpu(Device):
    is_gpu = True
    is_cpu = False

    def __init__(self, device: torch.device, *, tokens_on_device: bool = False) -> None:
        super().__init__(device)
        self.tokens_on_device = tokens_on_device
        self.capturing: CapturedGraph | None = None
        self.refuses_to_wait = False  # whether waiting is refused
        self.captures = self.waits = 0

    def is_on_host(self, tensor: Tensor) -> bool:
        return not self.tokens_on_device

    def synchronize(self) -> None:
        self._require_waiting_allowed("synchronize")
        self.waits += 1

    def pinned(self, values: Tensor) -> Tensor:
        self._require_waiting_allowed("pinned memory")
        return values

    def small_tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        if self.capturing is not None:
            raise RuntimeError("values of the host would be frozen into the graph")
        return torch.tensor(values, dtype=dtype, device=self.device)

    def event(self, *, timing: bool = False) -> Any:
        return EmulatedEvent()

    def record(self, event: Any) -> None:
        event.record()

    def shared_memory(self) -> int | None:
        return 227 * 1024

    def graph_memory(self) -> EmulatedGpu:
        return self

    def reset_pool(self) -> None: ...

    def forbid_sync(self) -> AbstractContextManager[None]:
        return self._refusing(WaitRefusing())

    def capture(self, body: Callable[[], Any]) -> EmulatedGraph:
        recording = CapturedGraph()
        self.captures += 1
        self.capturing = recording
        try:
            with self._refusing(recording):
                output = body()
        finally:
            self.capturing = None
        return EmulatedGraph(output, recording.calls)

    def launch(self, run: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Runs a kernel, and again at every replay."""
        if self.capturing is not None:
            self.capturing.calls.append(Call(run, args, options, []))
        run(*args, **options)

    @contextmanager
    def _refusing(self, mode: TorchDispatchMode) -> Iterator[None]:
        """Also reads that torch does without an operation."""

        def refused(tensor: Tensor, *_: Any, **__: Any) -> Any:
            raise RuntimeError("a tensor is read while that may not wait for the device")

        before, self.refuses_to_wait = self.refuses_to_wait, True
        try:
            with mock.patch.multiple(Tensor, **dict.fromkeys(READING, refused)), mode:
                yield
        finally:
            self.refuses_to_wait = before

    def _require_waiting_allowed(self, what: str) -> None:
        if self.refuses_to_wait:
            raise RuntimeError(f"{what} while a graph is captured")


@contextmanager
def emulated_gpu(**options: Any) -> Iterator[EmulatedGpu]:
    """Within, the CPU is a GPU to draftahead."""
    gpu = EmulatedGpu(torch.device("cpu"), **options)
    with (
        mock.patch.dict(devices.FACTORIES, {"cpu": lambda _: gpu}),
        mock.patch.dict(devices._devices, clear=True),
    ):
        yield gpu
