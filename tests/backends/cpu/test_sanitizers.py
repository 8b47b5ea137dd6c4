"""The kernels' tests again with kernels that check themselves: a build by AddressSanitizer and
UndefinedBehaviorSanitizer finds reads and writes beside memory, and what C++ does not define."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftahead.backends.cpu import build, compiler
from llama_shaped import needs_kernels

pytestmark = needs_kernels
TESTS = Path(__file__).parents[2]
# -O0: a quarter of the time to compile, and no access is optimized away.
FLAGS = "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
# Not of leaks: Python and torch keep memory until the process ends.
OPTIONS = "detect_leaks=0:verify_asan_link_order=0"


@functools.cache
def runtimes() -> tuple[str, ...]:
    """The sanitizers' libraries, which must be loaded first; empty if the compiler has none."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*compiler.find(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        found.append(path)
    return tuple(found) if all(map(os.path.isabs, found)) else ()


needs_sanitizers = pytest.mark.skipif(
    build.library() is not None and not runtimes(), reason="the compiler has no sanitizers"
)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that compiles and runs kernels with sanitizers."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DRAFTAHEAD_CACHE": str(tmp_path_factory.mktemp("sanitized")),
        "DRAFTAHEAD_KERNEL_FLAGS": FLAGS,
        "LD_PRELOAD": " ".join(runtimes()),
        "ASAN_OPTIONS": OPTIONS,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


BESIDE = """
import ctypes, torch
from draftahead.backends.cpu import build
from draftahead.backends.cpu.addresses import Addresses
from draftahead.backends.cpu.linear import weights_of
library, layer, kept = build.library(), torch.nn.Linear(64, 40), Addresses()
assert library, build.problem()
weights, x, y = weights_of(layer, kept, "it"), torch.zeros(1, 64), torch.zeros(1, {outputs})
pointer = ctypes.byref(weights)
library.draftahead_linear(pointer, x.data_ptr(), 1, y.data_ptr(), 1, None)
print("it returned")
"""


@needs_sanitizers
def test_a_write_beside_memory_is_found(sanitized: dict[str, str]) -> None:
    """Otherwise the test below could not fail."""
    done = run(["-c", BESIDE.format(outputs=40)], sanitized)
    assert (done.returncode, done.stdout) == (0, "it returned\n"), done.stderr[-3000:]
    done = run(["-c", BESIDE.format(outputs=39)], sanitized)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert done.stdout == ""


@needs_sanitizers
def test_the_tests_of_the_kernels_pass_with_sanitizers(sanitized: dict[str, str]) -> None:
    """Linear layers, forwards over chains and trees, heads' trees, screening; odd sizes, no rows,
    threads."""
    kernels, heads = TESTS / "backends" / "cpu", TESTS / "drafters" / "eagle"
    files = [
        *(kernels / f"test_{name}.py" for name in ("linear", "stored_kernels", "topk")),
        *(kernels / f"test_{name}.py" for name in ("addresses", "kv_rows")),
        *(kernels / f"test_{name}.py" for name in ("tree_attention", "lower_layers", "threads")),
        *(heads / f"test_{name}.py" for name in ("cpu_trees", "screening")),
    ]
    quiet = ["-q", "-s", "-n", "0", "-p", "no:cacheprovider", "-p", "no:cov"]
    quiet += ["-k", "not restored_after_generating"]  # of drafters that mostly run by torch
    done = run(["-m", "pytest", *quiet, *map(str, files)], sanitized)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
