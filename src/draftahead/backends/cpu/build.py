"""Compiles kernels/ for this very CPU, once, and keeps the library in the user's cache.

Takes about three seconds the first time. Where no compiler is found, or the compiled library does
not load, everything still works with torch's own kernels; `problem()` says why in one line.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch  # first: its OpenMP runtime is the one our library must share

from draftahead.loader.embedded import cache_root

SOURCES = Path(__file__).with_name("csrc")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None."""
    return _found()[0]


def problem() -> str | None:
    """Why there are none."""
    return _found()[1]


@functools.cache
def _found() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("DRAFTAHEAD_KERNELS") == "0":
        return None, "switched off by DRAFTAHEAD_KERNELS=0"
    compiler = os.environ.get("CXX") or next(
        (found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None
    )
    if compiler is None:
        return None, "no C++ compiler (g++ or clang++) is installed"
    try:
        return _declared(ctypes.CDLL(str(_compiled(compiler)))), None
    except subprocess.CalledProcessError as failed:
        lines = failed.stderr.decode(errors="replace").strip().splitlines()
        return None, f"{compiler} failed: {lines[0] if lines else failed}"
    except OSError as failed:
        return None, f"the compiled kernels do not load: {failed}"


def _compiled(compiler: str) -> Path:
    """The library for this source, compiler and CPU; made if it is not there yet."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
    parts = [*sources, version, " ".join(FLAGS).encode(), _cpu().encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    target = cache_root() / "kernels" / f"{digest}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        compile_ = [compiler, *FLAGS, "-c", str(SOURCES / "pass.cpp"), "-o", str(compiled)]
        subprocess.run(compile_, capture_output=True, check=True)
        # Linked without -fopenmp: its symbols come from the OpenMP runtime that torch has loaded.
        # Two runtimes in one process would keep two sets of threads, each spinning on our cores.
        link = [compiler, "-shared", str(compiled), "-o", str(linked)]
        subprocess.run(link, capture_output=True, check=True)
        linked.replace(target)  # whole or not at all, also when two processes do this at once
    return target


def _cpu() -> str:
    """What -march=native means here: a cache shared by different machines must tell them apart."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        flags = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
        return flags[0] if flags else platform.machine()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.draftahead_pass.argtypes = [pointer, pointer, number]
    found.draftahead_pass.restype = None
    found.draftahead_scratch.argtypes = [pointer, number, number]
    found.draftahead_scratch.restype = number
    found.draftahead_linear.argtypes = [pointer, pointer, number, pointer, number, *[pointer] * 3]
    found.draftahead_linear.restype = None
    found.draftahead_grow.argtypes = [pointer, pointer, number]
    found.draftahead_grow.restype = number
    found.draftahead_read.argtypes = [pointer, number, number]
    found.draftahead_read.restype = ctypes.c_float
    return found


def threads() -> int:
    """As torch has them: set from the cores that the process may use."""
    return torch.get_num_threads() if _usual is None else _usual


_usual: int | None = None  # threads, while torch's own operations have one


@contextmanager
def one_thread() -> Iterator[None]:
    """For torch's operations between our kernels. They are small; and where others use the cores
    too, waiting for a second thread takes a time slice of the system: 8 ms instead of 30 µs."""
    global _usual
    if _usual is not None:
        yield
        return
    _usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_usual)
        _usual = None
