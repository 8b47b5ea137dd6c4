"""What the documents say runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import zoo
from draftahead import LLM, SamplingParams, drafters
from draftahead.drafters import registry

ROOT = Path(__file__).parent.parent.parent


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)


@pytest.mark.model
def test_readme_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as a reader would type them."""
    space: dict[str, object] = {}
    blocks = python_blocks("README.md")
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), space)
    assert "Paris" in capsys.readouterr().out


def test_recipe_for_a_drafter_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of CONTRIBUTING.md, put where it says: found by name, and its options are known."""
    (block,) = python_blocks("CONTRIBUTING.md")
    (tmp_path / "echo.py").write_text(block, "utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    registry._load_all.cache_clear()
    try:
        model = zoo.tiny("llama")
        llm = LLM(model, drafter={"method": "echo", "num_speculative_tokens": 3})
        out = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))[0]
    finally:
        sys.modules.pop("draftahead.drafters.echo", None)
    assert out.token_ids == zoo.reference(model, [1, 2, 3], 20)
    assert max(out.stats.drafted_at) > 0 and len(out.stats.drafted_at) == 3


def test_architecture_names_every_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    package = ROOT / "src" / "draftahead"
    for path in package.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py") and path.parent.name != "cli":
            assert path.name in text, f"{path.name} is not in ARCHITECTURE.md"
    for command in (package / "cli").glob("*.py"):
        if command.stem not in ("__init__", "options"):
            assert command.stem in text


def test_drafter_table_is_complete() -> None:
    table = (ROOT / "README.md").read_text("utf-8")
    for name in registry.names():
        assert f"| `{name}`" in table
