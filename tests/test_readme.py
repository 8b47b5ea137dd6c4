"""What the documents say runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zoo
from draftahead import LLM, SamplingParams
from draftahead.drafters import registry

ROOT = Path(__file__).parent.parent


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


def test_contributings_drafter_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    (block,) = python_blocks("CONTRIBUTING.md")
    exec(compile(block, "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})
    model = zoo.tiny("llama")
    llm = LLM(model, drafter={"method": "echo", "num_speculative_tokens": 3})
    out = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))[0]
    assert out.token_ids == zoo.reference(model, [1, 2, 3], 20)
    assert out.stats.drafted > 0


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
