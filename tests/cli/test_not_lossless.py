"""`--not-lossless` is reported by every command that takes it, in red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from command_line import run
from draftahead.bench.report import results_table

RED = "\x1b[31m"


def test_generate_reports_it(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    common = ("generate", "w5 w6", "--model", model_folder, "--max-tokens", "4")
    common = (*common, "--drafter", "lookup")
    for extra in ((), ("--stats",), ("--json",), ("--explain",)):
        assert run(*common, *extra) == 0
        assert "not lossless" not in capsys.readouterr().err
        assert run(*common, *extra, "--not-lossless") == 0
        out, err = capsys.readouterr()
        assert err.count(f"{RED}not lossless") == 1, extra
        if "--json" in extra:
            assert json.loads(out)["lossless"] is False
    assert run(*common, "--not-lossless", "--exact", "replay") == 1
    assert "exclude each other" in capsys.readouterr().err


def test_bench_reports_it(
    model_folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    common = ("bench", "--model", model_folder, "--drafter", "lookup", "--limit", "1")
    common = (*common, "--repeats", "1")
    more = ("--max-tokens", "4", "--prompts", "random", "--json", str(file))
    assert run(*common, *more, "--not-lossless", "--plot", str(picture)) == 0
    assert "lookup, not lossless" in capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    flags = {row["drafter"]: row["lossless"] for row in results}
    assert flags == {"none": True, "lookup": False}  # plain decoding accepts nothing
    console = Console(force_terminal=True, color_system="standard", width=140)
    with console.capture() as shown:
        console.print(results_table(results, "title"))
    assert f"{RED}lookup, not lossless" in shown.get()
    assert run(*common, *more) == 0
    assert "not lossless" not in capsys.readouterr().out
    assert run("bench", "--shape", "llama-8b", "--not-lossless") == 1
    assert "--not-lossless says nothing with --shape" in capsys.readouterr().err
