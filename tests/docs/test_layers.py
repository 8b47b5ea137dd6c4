"""The layers of the packages: pyproject.toml says which may import which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own: it configures logging, and with that disables the loggers of others.
COMMAND = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def test_packages_import_only_from_lower_layers() -> None:
    root = Path(__file__).resolve().parents[2]
    checked = subprocess.run(
        [sys.executable, "-c", COMMAND], cwd=root, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
