"""Only where Triton interprets: see __init__.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[object]:
    """The CPU as a GPU whose kernels are interpreted."""
    from emulated_gpu import emulated_gpu
    from interpreted import interpreter

    with emulated_gpu() as found, interpreter.on(found):
        yield found
