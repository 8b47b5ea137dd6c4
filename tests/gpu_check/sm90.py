"""Triton kernels compiled for sm_90 on any machine, in place of every launch.

Triton asks a driver object for the device that it compiles for; ours answers sm_90 and launches
nothing. Each `kernel[grid](...)` is then compiled for its real arguments, and noted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

SHARED_MEMORY = 227 * 1024  # bytes that one block may use on sm_90


class Sm90Driver:
    """What Triton's compiler asks of a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Launch:
    kernel: str
    grid: tuple[int, ...]
    constexprs: list[Any]  # in the order of the signature
    arguments: list[Any]  # the others, in the order of the signature
    options: dict[str, Any]  # num_warps, num_stages
    ptx: str  # hash of the normalised PTX
    shared: int  # bytes of shared memory


@contextmanager
def compiled_launches() -> Iterator[list[Launch]]:
    """Within, a launch compiles its kernel and is appended to the list; nothing runs."""
    launches: list[Launch] = []
    run = jit.JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launches.append(_launch(self, kernel, args, grid, options))
        return kernel

    before = driver._active  # reading `active` would look for a real device
    driver.set_active(Sm90Driver())  # type: ignore[arg-type]
    try:
        with (
            mock.patch.object(jit.JITFunction, "run", compiled),
            mock.patch.object(knobs.compilation, "disable_line_info", True),
        ):
            yield launches
    finally:
        driver._active = before


def _launch(
    function: Any, kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]
) -> Launch:
    names = {param.name for param in function.params}
    bound = function.signature.bind(*args, **{k: v for k, v in options.items() if k in names})
    values = [(param, bound.arguments[param.name]) for param in function.params]
    return Launch(
        kernel=function.fn.__name__,
        grid=tuple(grid),
        constexprs=[value for param, value in values if param.is_constexpr],
        arguments=[value for param, value in values if not param.is_constexpr],
        options={k: v for k, v in sorted(options.items()) if k not in names},
        ptx=hashed(kernel.asm["ptx"], function.fn.__name__),
        shared=kernel.metadata.shared,
    )


@cache
def hashed(ptx: str, name: str) -> str:
    """Of the code alone: without comments, debug sections, line numbers and the kernel's name, from
    which the names of its parameters are derived."""
    ptx = re.split(r"^\s*\.section", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    ptx = re.sub(rf"\b{re.escape(name)}(?=\b|_param_)", "kernel", ptx)
    lines = (line.split("//")[0].strip() for line in ptx.splitlines())
    code = [line for line in lines if line and not line.startswith((".loc", ".file"))]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]
