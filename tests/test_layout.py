"""The architecture, held by reading the imports: a file imports only from lines above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import draftahead

ROOT = Path(draftahead.__file__).parent
ORDER = [
    "errors",
    "stats",
    "drafts",
    "types",
    "sampling",
    "tree",
    "verify",
    "kvcache",
    "attention",
    "hub",
    "runtime",
    "support",
    "parts",
    "passes",
    "target",
    "growth",
    "heads",
    "rates",
    "promises",
    "suffixes",
    "selfdraft",
    "drafters",
    "policy",
    "text",
    "scheduler",
    "engine",
    "presets",
    "llm",
    "prompts",
    "bench",
    "train",
    "cli",
    "__main__",
]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            yield name, path


def runtime_imports(path: Path) -> Iterator[str]:
    """What a file imports of this package, but for the types it only names."""
    tree = ast.parse(path.read_text("utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftahead"):
            base = (node.module or "").removeprefix("draftahead").removeprefix(".")
            if base:
                yield base
            else:
                yield from (name.name for name in node.names if not name.name.startswith("__"))
        elif isinstance(node, ast.Import):
            for name in node.names:
                assert not name.name.startswith("draftahead."), f"{path}: use from-imports"


def test_a_file_imports_only_from_lines_above_it() -> None:
    for name, path in modules():
        own = name.split(".")[0]
        assert own in ORDER, f"{name} has no place in the order"
        for imported in runtime_imports(path):
            other = imported.split(".")[0]
            assert ORDER.index(other) <= ORDER.index(own), f"{name} imports {imported}"


def test_drafters_know_neither_each_other_nor_the_target() -> None:
    for name, path in modules():
        if name.startswith("drafters."):
            for imported in runtime_imports(path):
                assert imported not in ("target", "verify", "engine", "llm"), (name, imported)
                assert not imported.startswith("drafters."), (name, imported)


def test_files_stay_readable() -> None:
    for name, path in modules():
        assert len(path.read_text("utf-8").splitlines()) <= 400, f"{name} is too long"


def test_what_is_exported_is_there() -> None:
    assert sorted(draftahead.__all__) == sorted(set(draftahead.__all__))
    for name in draftahead.__all__:
        assert getattr(draftahead, name) is not None
