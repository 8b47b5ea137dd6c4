"""Compiles csrc/ for this CPU, once, and keeps the library in the user's cache.

Compiling takes 3 to 20 seconds. Without a compiler, or if the library does not load or has other
structs than abi.py, `library()` is None and everything runs by torch; `problem()` says why.

A file that was cut short or has flipped bits kills the process that loads it, or the first call. So
the name of a library holds a checksum of its bytes, which is compared before it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
    "-pthread",
    "-fPIC",
]

COMPILE_SECONDS = 300  # then the compiler is given up
BUILD_FOLDER = "building-"  # prefix of the folders in which libraries are compiled

NO_COMPILER = "no C++ compiler (g++ or clang++) is installed"

logger = logging.getLogger("draftahead")


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
    try:
        compiler = _compiler()
        if not compiler:
            return _Loaded(None, NO_COMPILER)
        file = _library_file(compiler)
    except subprocess.CalledProcessError as failed:
        lines = failed.stderr.decode(errors="replace").strip().splitlines()
        return _Loaded(None, f"{compiler[0]} failed: {lines[0] if lines else failed}")
    except subprocess.TimeoutExpired:
        return _Loaded(None, f"{compiler[0]} did not finish within {COMPILE_SECONDS} seconds")
    except (OSError, ValueError) as failed:  # ValueError: a quote without its end
        return _Loaded(None, f"the kernels cannot be compiled: {failed}")
    try:
        return _checked(ctypes.CDLL(str(file)))
    except OSError as failed:
        return _Loaded(None, f"the compiled kernels do not load: {failed}")


def _compiler() -> list[str]:
    """The command that compiles C++, or nothing."""
    found = (path for name in ("g++", "clang++", "c++") if (path := shutil.which(name)))
    return shlex.split(os.environ.get("CXX", "")) or [*found][:1]


def _checked(library: ctypes.CDLL) -> _Loaded:
    try:
        abi.declare(library)
        difference = abi.mismatch(library)
    except AttributeError as missing:
        difference = str(missing)
    if difference is not None:
        return _Loaded(None, f"the compiled kernels have another interface: {difference}")
    return _Loaded(library, None)


def _library_file(compiler: Sequence[str]) -> Path:
    """The library for these sources, compiler and CPU; compiled if the cache has no whole one."""
    flags = shlex.split(os.environ.get("DRAFTAHEAD_KERNEL_FLAGS", ""))
    sources = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
    settings = [_output_of([*compiler, "--version"]), " ".join([*FLAGS, *flags]), _cpu_features()]
    key = _digest(b"\0".join([*sources, *(part.encode() for part in settings)]))
    folder = cache_root() / "kernels"
    for found in folder.glob(f"{key}.*.so"):
        with suppress(FileNotFoundError):  # another process may have removed it
            if found.name == _name(key, found):
                return found
            found.unlink()
            logger.warning("%s is damaged: the kernels are compiled again", found)
    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=BUILD_FOLDER) as building:
        compiled, linked = Path(building) / "kernels.o", Path(building) / "kernels.so"
        source = str(SOURCES / "kernels.cpp")
        _output_of([*compiler, *FLAGS, *flags, "-c", source, "-o", str(compiled)])
        _output_of([*compiler, *flags, "-pthread", "-shared", str(compiled), "-o", str(linked)])
        return linked.replace(folder / _name(key, linked))  # atomic: two processes may compile


def _output_of(command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=COMPILE_SECONDS,
    )
    return done.stdout.decode(errors="replace")


def _name(key: str, library: Path) -> str:
    return f"{key}.{_digest(library.read_bytes())}.so"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _remove_abandoned(folder: Path) -> None:
    """What processes that were killed while they compiled have left."""
    for building in folder.glob(f"{BUILD_FOLDER}*"):
        with suppress(FileNotFoundError):
            if time.time() - building.stat().st_mtime > 2 * COMPILE_SECONDS:
                shutil.rmtree(building, ignore_errors=True)


def _cpu_features() -> str:
    """The features that -march=native selects: machines of other CPUs may share the cache."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        flags = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
        return flags[0] if flags else platform.machine()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
