"""Compiles csrc/ for some instruction sets into one library. No imports but Python's own: the hook
that builds wheels (hatch_build.py) runs it where nothing else is installed."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # sums are fused where the source says so: see multiply_add in vectors.h
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-fPIC",
    "-Wno-psabi",  # passing vectors between functions: no other library calls ours
]
_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# By machine: instruction sets and what lets the compiler use them. csrc/cpu.cpp finds out which of
# them a CPU has. Between them the bits of a logit may differ; within one they never do.
ISAS: dict[str, dict[str, list[str]]] = {
    "x86_64": {"avx2": _AVX2, "avx512": _AVX512, "avx512vnni": [*_AVX512, "-mavx512vnni"]},
    "aarch64": {"neon": ["-march=armv8-a"], "dotprod": ["-march=armv8.2-a+dotprod"]},
}
FLAGS_OF = {isa: flags for isas in ISAS.values() for isa, flags in isas.items()}

# Then the compiler is given up. It takes a minute of a core; less time would fail where the machine
# is busy, more would let a compiler that hangs hold up the user.
COMPILE_SECONDS = 900


def find() -> list[str]:
    """The command that compiles C++: $CXX, or one in the path, or nothing."""
    found = (path for name in ("g++", "clang++", "c++") if (path := shutil.which(name)))
    return shlex.split(os.environ.get("CXX", "")) or [*found][:1]


def digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def sources_digest() -> str:
    return digest(*(file.read_bytes() for file in sorted(SOURCES.iterdir())))


def named(key: str, library: Path) -> str:
    """A library's file name: what it was made from, and a checksum of its bytes. A file that was
    cut short or has flipped bits kills the process that loads it, so the name is compared first."""
    return f"{key}.{digest(library.read_bytes())}.so"


def whole(folder: Path, key: str) -> tuple[Path | None, list[Path]]:
    """The undamaged library of this key in a folder, and the damaged ones."""
    damaged: list[Path] = []
    for found in folder.glob(f"{key}.*.so"):
        try:
            if found.name == named(key, found):
                return found, damaged
        except FileNotFoundError:  # another process may have removed it
            continue
        damaged.append(found)
    return None, damaged


def output_of(command: Sequence[str]) -> str:
    """What a command writes. One that takes too long is killed with the processes that it started:
    a compiler's driver leaves its compilers running."""
    pipe, own_group = subprocess.PIPE, os.name == "posix"
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        start_new_session=own_group,
    ) as process:
        try:
            output, errors = process.communicate(timeout=COMPILE_SECONDS)
        except BaseException:  # Ctrl-C too: the group is not the terminal's
            if own_group:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output.decode(errors="replace")


def compile_cpu(compiler: Sequence[str], folder: Path, flags: Sequence[str] = ()) -> Path:
    """A library that says which instruction sets this CPU has."""
    return link(compiler, folder / "cpu.so", [_cpu_object(compiler, folder, flags)], flags)


def compile_library(
    compiler: Sequence[str], folder: Path, isas: Sequence[str], flags: Sequence[str] = ()
) -> Path:
    """The kernels for each of `isas`, and what chooses among them."""
    objects = [_cpu_object(compiler, folder, flags)]
    is_gcc = "Free Software Foundation" in output_of([*compiler, "--version"])
    # GCC makes some symbols of templates unique in the process; those cannot be isolated.
    unique = ["-fno-gnu-unique"] if is_gcc and len(isas) > 1 else []
    for isa in isas:
        compiled = folder / f"{isa}.o"
        options = [*FLAGS, *FLAGS_OF[isa], *unique, *flags, f"-DKERNEL_ISA={isa}", "-c"]
        output_of([*compiler, *options, str(SOURCES / "kernels.cpp"), "-o", str(compiled)])
        objects.append(compiled if len(isas) == 1 else _isolated(compiler, compiled))
    return link(compiler, folder / "kernels.so", objects, flags)


def link(
    compiler: Sequence[str], library: Path, objects: Sequence[Path], flags: Sequence[str] = ()
) -> Path:
    options = [*flags, "-pthread", "-shared"]
    output_of([*compiler, *options, *map(str, objects), "-o", str(library)])
    return library


def _cpu_object(compiler: Sequence[str], folder: Path, flags: Sequence[str]) -> Path:
    compiled = folder / "cpu.o"
    source = str(SOURCES / "cpu.cpp")
    output_of([*compiler, *FLAGS, *flags, "-c", source, "-o", str(compiled)])
    return compiled


def _isolated(compiler: Sequence[str], compiled: Path) -> Path:
    """The object with no symbols but ours. A linker keeps one copy of a template of the standard
    library that several objects have; it may be one that this CPU cannot run."""
    isolated = compiled.with_suffix(".isolated.o")
    partial = ["-nostdlib", "-r", "-Wl,--force-group-allocation"]
    output_of([*compiler, *partial, str(compiled), "-o", str(isolated)])
    objcopy = output_of([*compiler, "-print-prog-name=objcopy"]).strip()
    keep = ["--wildcard", "--keep-global-symbol=draftahead_*"]
    output_of([objcopy, *keep, str(isolated)])
    return isolated
