"""Compiles csrc/ for this CPU, once, and keeps the library in the user's cache.

Compiling takes 3 to 20 seconds. Without a compiler, or if the library does not load or has other
structs than abi.py, `library()` is None and everything runs by torch; `problem()` says why.
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
from pathlib import Path
from typing import NamedTuple

import torch  # noqa: F401  first: its OpenMP runtime is the one our library must share

from draftahead.backends.cpu import abi
from draftahead.loader.embedded import cache_root

SOURCES = Path(__file__).with_name("csrc")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # sums are fused where the source says so: see multiply_add in vectors.h
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
]


NO_COMPILER = "no C++ compiler (g++ or clang++) is installed"


class _Loaded(NamedTuple):
    library: ctypes.CDLL | None
    problem: str | None


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None."""
    return _load().library


def problem() -> str | None:
    """Why there are none, in one line."""
    return _load().problem


def is_without_compiler() -> bool:
    """Whether installing a compiler would give kernels."""
    return problem() == NO_COMPILER


def reload() -> None:
    """Makes the next call look for a compiler and load the library again."""
    _load.cache_clear()


@functools.cache
def _load() -> _Loaded:
    if os.environ.get("DRAFTAHEAD_KERNELS") == "0":
        return _Loaded(None, "switched off by DRAFTAHEAD_KERNELS=0")
    compiler = os.environ.get("CXX") or next(
        (found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None
    )
    if compiler is None:
        return _Loaded(None, NO_COMPILER)
    try:
        return _checked(ctypes.CDLL(str(_compiled(compiler))))
    except subprocess.CalledProcessError as failed:
        lines = failed.stderr.decode(errors="replace").strip().splitlines()
        return _Loaded(None, f"{compiler} failed: {lines[0] if lines else failed}")
    except OSError as failed:
        return _Loaded(None, f"the compiled kernels do not load: {failed}")


def _checked(library: ctypes.CDLL) -> _Loaded:
    try:
        abi.declare(library)
        difference = abi.mismatch(library)
    except AttributeError as missing:
        difference = str(missing)
    if difference is not None:
        return _Loaded(None, f"the compiled kernels have another interface: {difference}")
    return _Loaded(library, None)


def _compiled(compiler: str) -> Path:
    """The library for these sources, compiler and CPU; compiled if it is not in the cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
    parts = [*sources, version, " ".join(FLAGS).encode(), _cpu_features().encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    target = cache_root() / "kernels" / f"{digest}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        compile_ = [compiler, *FLAGS, "-c", str(SOURCES / "kernels.cpp"), "-o", str(compiled)]
        subprocess.run(compile_, capture_output=True, check=True)
        # Linked without -fopenmp: its symbols come from the OpenMP runtime that torch has loaded.
        # Two runtimes in one process would keep two sets of threads, each spinning on our cores.
        link = [compiler, "-shared", str(compiled), "-o", str(linked)]
        subprocess.run(link, capture_output=True, check=True)
        linked.replace(target)  # atomic, also when two processes compile at once
    return target


def _cpu_features() -> str:
    """The features that -march=native selects: machines of other CPUs may share the cache."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        flags = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
        return flags[0] if flags else platform.machine()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
