"""The kernels' tests again with each other instruction set that this CPU has. Bits may differ
between them; within one they never do, which the same tests show for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftahead.backends.cpu import build
from llama_shaped import needs_kernels

pytestmark = needs_kernels
TESTS = Path(__file__).parents[2]


def other_isas() -> list[str]:
    library = build.library()
    if library is None:
        return []
    return [
        isa for isa in library.compiled.draftahead_isas().decode().split() if isa != library.isa
    ]


def run(isa: str, files: list[Path]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DRAFTAHEAD_KERNEL_ISA": isa,
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:cov"]
        + [str(file) for file in files],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("isa", other_isas())
def test_the_products_of_each_instruction_set(isa: str) -> None:
    """What its intrinsics compute: linear layers of all kinds, top tokens, trees in the cache."""
    kernels = TESTS / "backends" / "cpu"
    run(isa, [kernels / f"test_{name}.py" for name in ("linear", "topk", "tree_attention")])


@pytest.mark.slow
@pytest.mark.parametrize("isa", other_isas())
def test_all_tests_of_the_kernels_with_each_instruction_set(isa: str) -> None:
    kernels, heads = TESTS / "backends" / "cpu", TESTS / "drafters" / "eagle"
    left_out = {"test_isas.py", "test_build.py", "test_sanitizers.py"}  # they choose for themselves
    left_out |= {"test_wheel.py", "test_neon.py"}
    files = [file for file in sorted(kernels.glob("test_*.py")) if file.name not in left_out]
    run(isa, [*files, heads / "test_cpu_trees.py", heads / "test_screening.py"])
