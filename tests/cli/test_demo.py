"""`draftahead demo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run
from draftahead.bench.prompts import BenchPrompt
from draftahead.cli import demo


def test_demo_races_and_writes_its_table(
    model_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    prompts = [BenchPrompt(kind, kind, ("w5 w6 w7 w5 w6",)) for kind in demo.KINDS]
    monkeypatch.setattr(demo, "load_prompts", lambda: prompts)
    file = tmp_path / "table.json"
    arguments = ("demo", "--model", model_folder, "--max-tokens", "10", "--json", str(file))
    assert run(*arguments) == 0
    shown = capsys.readouterr().out
    assert "overall" in shown
    table = json.loads(file.read_text())
    assert [row["task"] for row in table["rows"]] == list(demo.KINDS)
    assert table["overall"]["identical"] is True
    assert all(row["identical"] and row["speedup"] > 0 for row in table["rows"])
