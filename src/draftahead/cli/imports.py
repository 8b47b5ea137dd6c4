"""How commands import what takes seconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """For imports of torch and transformers: a quarter of their time is Python's collector, which
    looks for garbage among the million objects that they make. It never looks at these again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
