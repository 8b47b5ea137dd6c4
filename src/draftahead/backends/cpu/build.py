"""The compiled kernels: from the package, where a wheel has brought them; else compiled for this
CPU at first use (20 to 40 seconds) and kept in the user's cache.

Without either, or if a library does not load or has other structs than abi.py, `library()` is None
and everything runs by torch; `problem()` says why, and so does one line in the log.
"""

from __future__ import annotations

import ctypes
import functools
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

from draftahead.backends.cpu import abi, compiler
from draftahead.loader.embedded import cache_root

PACKAGED = Path(__file__).with_name("compiled")  # the library of a wheel: see hatch_build.py
BUILD_FOLDER = "building-"  # prefix of the folders in which libraries are compiled

NO_COMPILER = "no C++ compiler (g++ or clang++) is installed"

logger = logging.getLogger("draftahead")


class _Loaded(NamedTuple):
    library: abi.Library | None
    problem: str | None


class _UnusableError(Exception):
    """Why there are no kernels, in one line."""


class _NoIsaError(_UnusableError):
    """No library would help: it is the CPU, or what the user chose."""


def library() -> abi.Library | None:
    """The compiled kernels for this CPU's best instruction set, or None."""
    return _load().library


def problem() -> str | None:
    """Why there are none, in one line."""
    return _load().problem


def is_without_compiler() -> bool:
    """Whether installing a compiler would give kernels."""
    return problem() == NO_COMPILER


def reload() -> None:
    """Makes the next call look for a library and a compiler again."""
    _load.cache_clear()


@functools.cache
def _load() -> _Loaded:
    if os.environ.get("DRAFTAHEAD_KERNELS") == "0":
        return _Loaded(None, "switched off by DRAFTAHEAD_KERNELS=0")
    try:
        return _Loaded(_packaged() or _compiled(), None)
    except _UnusableError as unusable:
        logger.warning("models on the CPU run by torch alone, several times slower: %s", unusable)
        return _Loaded(None, str(unusable))


def _packaged() -> abi.Library | None:
    """The library of a wheel, if it was made from these very sources."""
    if os.environ.get("DRAFTAHEAD_KERNEL_FLAGS"):
        return None
    found, damaged = compiler.whole(PACKAGED, compiler.sources_digest())
    for file in damaged:
        logger.warning("%s is damaged: the kernels are compiled instead", file)
    try:
        return _opened(found) if found else None
    except _NoIsaError:
        raise
    except _UnusableError as unusable:
        logger.warning("%s is not used: %s", found, unusable)
        return None


def _compiled() -> abi.Library:
    try:
        command = compiler.find()
        if not command:
            raise _UnusableError(NO_COMPILER)
        return _opened(_library_file(command))
    except subprocess.CalledProcessError as failed:
        lines = failed.stderr.decode(errors="replace").strip().splitlines()
        raise _UnusableError(f"{command[0]} failed: {lines[0] if lines else failed}") from None
    except subprocess.TimeoutExpired:
        seconds = compiler.COMPILE_SECONDS
        raise _UnusableError(f"{command[0]} did not finish within {seconds} seconds") from None
    except (OSError, ValueError) as failed:  # ValueError: a quote without its end
        raise _UnusableError(f"the kernels cannot be compiled: {failed}") from None


def _opened(file: Path) -> abi.Library:
    """The functions of a library for the instruction set that is used here."""
    compiled = _cdll(file)
    try:
        library = abi.Library(compiled, _isa(compiled))
        difference = abi.mismatch(library)
    except AttributeError as missing:
        difference = str(missing)
    if difference is not None:
        raise _UnusableError(f"the compiled kernels have another interface: {difference}")
    return library


def _isa(compiled: ctypes.CDLL) -> str:
    """The fastest instruction set of this CPU, or the one that the user chose."""
    compiled.draftahead_isas.restype = ctypes.c_char_p
    supported = compiled.draftahead_isas().decode().split()
    chosen = os.environ.get("DRAFTAHEAD_KERNEL_ISA")
    if not supported:
        raise _NoIsaError("our kernels need a CPU with AVX2 or NEON")
    if chosen and chosen not in supported:
        names = ", ".join(supported)
        raise _NoIsaError(f"DRAFTAHEAD_KERNEL_ISA={chosen}: this CPU has {names}")
    return chosen or supported[0]


def _library_file(command: Sequence[str]) -> Path:
    """The library for these sources, compiler and CPU; compiled if the cache has no whole one."""
    flags = shlex.split(os.environ.get("DRAFTAHEAD_KERNEL_FLAGS", ""))
    settings = [
        compiler.sources_digest(),
        compiler.output_of([*command, "--version"]),
        " ".join([*compiler.FLAGS, *flags]),
        os.environ.get("DRAFTAHEAD_KERNEL_ISA", ""),
        _cpu_features(),
    ]
    key = compiler.digest(*(setting.encode() for setting in settings))
    folder = cache_root() / "kernels"
    found, damaged = compiler.whole(folder, key)
    for file in damaged:
        file.unlink(missing_ok=True)
        logger.warning("%s is damaged: the kernels are compiled again", file)
    if found:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=BUILD_FOLDER) as name:
        building = Path(name)
        isa = _isa(_cdll(compiler.compile_cpu(command, building, flags)))
        linked = compiler.compile_library(command, building, [isa], flags)
        return linked.replace(folder / compiler.named(key, linked))  # atomic: two may compile


def _cdll(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as failed:
        raise _UnusableError(f"the compiled kernels do not load: {failed}") from None


def _remove_abandoned(folder: Path) -> None:
    """What processes that were killed while they compiled have left."""
    for building in folder.glob(f"{BUILD_FOLDER}*"):
        with suppress(FileNotFoundError):
            if time.time() - building.stat().st_mtime > 2 * compiler.COMPILE_SECONDS:
                shutil.rmtree(building, ignore_errors=True)


def _cpu_features() -> str:
    """By which the instruction set is chosen: machines of other CPUs may share the cache."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        flags = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
        return flags[0] if flags else platform.machine()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
