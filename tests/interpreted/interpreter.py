"""Triton's interpreter, corrected and made quicker, as triton 3.7.1 has it.

- bfloat16: numpy has none, so the interpreter holds its bits as uint16, and computes with those:
  sums, products and casts are wrong without an error. Here they are widened to float32 first.
- The programs of a grid run in shuffled order: a GPU runs them in any.
- `triton.language` is patched once, and not again at each call of each function.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as base

from draftahead.backends.cuda import kernels
from emulated_gpu import EmulatedGpu

Builder = base.InterpreterBuilder
Handle = base.TensorHandle
_ORDER = random.Random(0)
_devices: list[EmulatedGpu] = []  # that launches are recorded for; the last one


@contextmanager
def on(device: EmulatedGpu) -> Iterator[None]:
    _devices.append(device)
    try:
        yield
    finally:
        _devices.remove(device)


# --------------------------------------------------------------------------------- bfloat16


def widened(handle: Any) -> np.ndarray[Any, Any]:
    """The numbers of a handle, float32 for bfloat16."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data  # type: ignore[no-any-return]
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def bits_of(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As bfloat16, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _cast(self: Any, source: Any, to: Any, rounding: Any = None) -> Any:
    kind, numbers = to.scalar, widened(source)
    if kind == source.dtype.scalar:
        return Handle(source.data, kind)
    if kind == tl.bfloat16:
        return Handle(bits_of(numbers.astype(np.float32)), kind)
    return Handle(numbers.astype(base._get_np_dtype(to)), kind)


_binary_op, _dot = Builder.binary_op, Builder.create_dot


def _binary(self: Any, one: Any, other: Any, op: Any) -> Any:
    if one.dtype.scalar != tl.bfloat16:
        return _binary_op(self, one, other, op)
    found = op(widened(one), widened(other))
    return Handle(found if found.dtype == bool else bits_of(found), one.dtype.scalar)


def _dot_of(self: Any, one: Any, other: Any, to: Any, *_: Any) -> Any:
    found = np.matmul(widened(one), widened(other), dtype=np.float32)
    return Handle(found + to.data, to.dtype.scalar)


# --------------------------------------------------------------------------------- launches


class _NoScope:
    def restore(self) -> None: ...


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """One launch: of the device that is emulated, if one is."""
    if _devices:
        _devices[-1].launch(_run_programs, self, args, grid, options)
    else:
        _run_programs(self, args, grid, options)


def _run_programs(kernel: Any, args: tuple[Any, ...], grid: Any, options: Any) -> None:
    function = kernel.rewrite()
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    values = inspect.getcallargs(function, *args, **named)
    fixed = base.GridExecutor(function, kernel.arg_names, grid).constexprs
    values = {k: v if k in fixed else base._implicit_cvt(v) for k, v in values.items()}
    grid = (*grid, 1, 1)[:3]
    base.interpreter_builder.set_grid_dim(*grid)
    programs = list(itertools.product(*map(range, grid)))
    _ORDER.shuffle(programs)
    with np.errstate(all="ignore"):
        for program in programs:
            base.interpreter_builder.set_grid_idx(*program)
            function(**values)


def _install() -> None:
    Builder.cast_impl = Builder.create_fp_to_fp = _cast
    Builder.binary_op, Builder.create_dot = _binary, _dot_of
    base._patch_lang(kernels.linear.fn)  # what our functions see
    base._patch_lang(tl.sum.fn)  # and what the language's own do
    base._patch_lang = lambda _: _NoScope()
    base.InterpretedFunction.run = _run


_install()
