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

# The C++ runtime is linked in: the machine's own may be older than the compiler's. That of C is
# not: its functions for exceptions must be those of the process.
LINKED = ["-static-libstdc++", "-s"]
# What every Linux with glibc has.
ALLOWED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1"}
ALLOWED |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


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
        linked = compiler.compile_library(command, folder, list(compiler.ISAS[machine]), LINKED)
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
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", description))
    versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", description)
    if needed - ALLOWED or not versions:
        raise CannotCompileError(f"it needs {', '.join(sorted(needed - ALLOWED)) or 'no glibc'}")
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return f"manylinux_{major}_{max(minor, 17)}_{machine}"  # 2.17 is the oldest that pip knows


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
