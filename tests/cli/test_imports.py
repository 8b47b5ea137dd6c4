"""Imports of torch and transformers without Python's collector."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from draftahead.cli.imports import importing


def test_the_collector_rests_while_modules_are_imported() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_it_does_not_look_at_them_later() -> None:
    gc.unfreeze()
    with importing():
        pass
    try:
        assert gc.get_freeze_count() > 10_000  # Python's own modules and pytest
    finally:
        gc.unfreeze()


def test_every_way_into_a_command_imports_so() -> None:
    """torch is imported by none of the command line's own modules, and with the collector at rest
    by what they call."""
    program = """
import gc, sys
seen = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            seen.append((name, gc.isenabled()))
sys.meta_path.insert(0, Finder())
import draftahead.cli
assert seen == [], seen
from draftahead.cli.options import DrafterOptions
DrafterOptions("none").config()
print(seen, gc.isenabled())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[('torch', False), ('transformers', False)] True\n", found.stderr
