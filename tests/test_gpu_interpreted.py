"""Runs tests/interpreted in processes of their own: Triton must be told before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: see the extra gpu-check")

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("test_*.py")))
def test_kernels_in_the_interpreter(name: str) -> None:
    """`name`: a file of that folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
