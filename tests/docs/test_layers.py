"""The layers of the packages: pyproject.toml says which may import which."""

from __future__ import annotations

from importlinter.cli import lint_imports


def test_packages_import_only_from_lower_layers() -> None:
    assert lint_imports(no_cache=True) == 0  # it prints the broken contracts
