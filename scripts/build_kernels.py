"""Compiles the CPU kernels for a wheel: for all instruction sets of a machine, in one library.

    python3 scripts/build_kernels.py FOLDER

The machine is the one that the compiler ($CXX, or one in the path) compiles for. Prints the library
and the platform tag that holds for it. No imports but Python's own: hatch_build.py runs this where
nothing else is installed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

COMPILER = Path(__file__).resolve().parent.parent / "src/draftahead/backends/cpu/compiler.py"

FLAGS = ["-DFOR_OLD_GLIBC", "-s"]  # see csrc/threads.h; without symbols of functions
# What torch needs, and so is there: the runtimes of C and C++, in versions checked below.
ALLOWED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
ALLOWED |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# By the newest symbols of the C++ runtime: the glibc of systems that have such a runtime.
GLIBC_OF_GLIBCXX = [((3, 4, 19), (2, 17)), ((3, 4, 24), (2, 27)), ((3, 4, 28), (2, 31))]
GLIBC_OF_GLIBCXX += [((3, 4, 29), (2, 34)), ((3, 4, 30), (2, 35)), ((3, 4, 33), (2, 39))]


class CannotCompileError(Exception):
    """Why a wheel has no compiled kernels, in one line."""


def compile_kernels(folder: Path) -> tuple[Path, str]:
    """The library, named as build.py looks for it, and the platform tag of its wheel."""
    compiler = compiler_module()
    try:
        command = compiler.find()
        if not command:
            raise CannotCompileError("no C++ compiler (g++ or clang++) is installed")
        target = compiler.output_of([*command, "-dumpmachine"]).strip()
        machine = target.split("-")[0]
        if "linux-gnu" not in target or machine not in compiler.ISAS:
            raise CannotCompileError(f"there are no compiled kernels for {target}")
        linked = compiler.compile_library(command, folder, list(compiler.ISAS[machine]), FLAGS)
        library = linked.rename(folder / compiler.named(compiler.sources_digest(), linked))
        readelf = compiler.output_of([*command, "-print-prog-name=readelf"]).strip()
        description = compiler.output_of([readelf, "-V", "-d", str(library)])
    except subprocess.CalledProcessError as failed:
        lines = failed.stderr.decode(errors="replace").strip().splitlines()
        raise CannotCompileError(f"{failed.cmd[0]}: {lines[0] if lines else failed}") from failed
    except (OSError, ValueError, subprocess.TimeoutExpired) as failed:
        raise CannotCompileError(str(failed)) from failed
    return library, platform_tag(machine, description)


def platform_tag(machine: str, description: str) -> str:
    """The manylinux tag, by the newest glibc that the library needs: by `readelf -V -d`."""
    if missing := set(re.findall(r"\(NEEDED\).*\[(.*)\]", description)) - ALLOWED:
        raise CannotCompileError(f"the library needs {', '.join(sorted(missing))}")
    glibc = max(_versions("GLIBC", description), default=(2, 17))
    if glibcxx := max(_versions("GLIBCXX", description), default=None):
        systems = [system for newest, system in GLIBC_OF_GLIBCXX if glibcxx <= newest]
        if not systems:
            raise CannotCompileError("the compiler's C++ runtime is newer than any that is known")
        glibc = max(glibc, systems[0])
    major, minor, *_ = max(glibc, (2, 17))  # the oldest that pip knows
    return f"manylinux_{major}_{minor}_{machine}"


def _versions(name: str, description: str) -> list[tuple[int, ...]]:
    found = re.findall(rf"Name: {name}_([\d.]+)", description)
    return [tuple(map(int, version.split("."))) for version in found]


def compiler_module() -> ModuleType:
    """compiler.py alone: the package around it imports torch."""
    spec = importlib.util.spec_from_file_location("draftahead_compiler", COMPILER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(*compile_kernels(folder))
