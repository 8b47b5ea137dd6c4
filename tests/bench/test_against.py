"""`draftahead bench --against` a server, from the command line to the JSON report."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import run
from draftahead.bench.llama_server import LlamaServer
from draftahead.loader import hub
from fake_llama_server import executable


@pytest.fixture
def arguments(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`bench` of a .gguf file, which is loaded from a folder instead."""
    load = hub.load
    monkeypatch.setattr(hub, "load", lambda model, **options: load(model_folder, **options))
    model, prompts = tmp_path / "model.gguf", tmp_path / "prompts.jsonl"
    model.touch()
    prompts.write_text('{"text": "w5 w6 w7"}')
    chosen = ["--model", str(model), "--prompts", str(prompts), "--drafter", "lookup"]
    return ["bench", *chosen, "--max-tokens", "8", "--repeats", "2"]


def test_a_server_is_measured_beside_ours(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, program, model = tmp_path / "out.json", executable(tmp_path), tmp_path / "model.gguf"
    arguments += ["--against", f"fake={program} --fault log", "--json", str(out)]
    arguments += ["--against", f"other={program} --fault 'other suffix'"]
    arguments += ["--against-modes", "draft,suffix", "--draft-model", str(model)]
    assert run(*arguments) == 0
    report, shown = json.loads(out.read_text()), " ".join(capsys.readouterr().out.split())
    overall = {r["name"]: r for r in report["other_engines"] if r["task"] == "overall"}
    modes = [f"{name}{mode}" for name in ("fake", "other") for mode in ("", ", draft", ", suffix")]
    assert list(overall) == modes
    for name, row in overall.items():
        assert row["identical_to_own"] == (0 if name == "other, suffix" else 1)
        assert row["identical"] == 0 and row["tokens"] == 8
        assert row["mean_acceptance_length"] == (2 if "," in name else 1)
        assert row["prompt_tokens_per_second"] == pytest.approx(3 / 2e-3)
        assert row["decode_tokens_per_second"] == pytest.approx(7 / 1e-2)  # the prefill gave one
        assert len(row["speedup_interval"]) == 2
    assert [engine["version"] for engine in report["engines"]] == ["version: 7 (fake)"] * 2
    assert {(c["name"], c["other"]) for c in report["comparisons"]} == {
        (own, other) for own in ("none", "lookup") for other in overall
    }
    kept = [row for row in report["repetitions"] if not row["dropped"]]
    assert len(kept) == 2 * (2 + 6)
    known = report["disturbances"][0]["known"]
    assert known == (sys.platform == "linux")
    assert all((row["foreign_share"] is not None) == known for row in kept)
    assert report["disturbances"][0]["limit"] == 0.05
    assert "to its own plain" in shown and "beside other engines" in shown
    starts = (tmp_path / "model.gguf.log").read_text().splitlines()
    pids = {int(line.split()[0]) for line in starts}
    dropped = [r["name"] for r in report["repetitions"] if r["dropped"] and "fake" in r["name"]]
    assert len(pids) >= 3 * (1 + 2) + len(dropped)  # a new server each time, warm-up too
    assert not any(map(psutil.pid_exists, pids))
    command = starts[0]
    assert '"-c", "384"' in command and '"-t", "1"' in command and '"-np", "1"' in command


def test_an_engine_that_fails_leaves_the_results_of_the_others(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, program = tmp_path / "out.json", executable(tmp_path)
    arguments += ["--against", f"fake={program} --fault 'start suffix'", "--json", str(out)]
    assert run(*arguments) == 1
    shown = capsys.readouterr().err
    assert shown.count("error: fake, suffix ended with code 1 while loading: error: cannot") == 1
    report = json.loads(out.read_text())
    assert list(report["failed"]) == ["fake, suffix"]
    assert {row["name"] for row in report["other_engines"]} == {"fake", "fake, ngram-mod"}
    assert {row["name"] for row in report["results"]} == {"none", "lookup"}


def test_ctrl_c_kills_the_server(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaServer, "run", interrupted)
    before = psutil.Process().children(recursive=True)
    log = f"{executable(tmp_path)} --fault log"
    assert run(*arguments, "--against", log) == 130
    assert "interrupted" in capsys.readouterr().err
    (start,) = (tmp_path / "model.gguf.log").read_text().splitlines()
    assert not psutil.pid_exists(int(start.split()[0]))
    assert psutil.Process().children(recursive=True) == before


def test_checks_are_quick() -> None:
    """What is refused waits for no import of torch."""
    code = "import sys, draftahead.bench.against; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_refusals_come_before_anything_is_loaded(
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hub, "load", lambda *args, **options: pytest.fail("a model is loaded"))
    (tmp_path / "x.gguf").touch()
    gguf, program = str(tmp_path / "x.gguf"), str(executable(tmp_path))
    if importlib.util.find_spec("xllamacpp") is None:
        assert run("bench", "--model", gguf, "--against", "llama.cpp") == 1
        assert "pip install xllamacpp" in capsys.readouterr().err
    for more, message in (
        (("--model", model_folder, "--against", program), "is no .gguf file"),
        (("--model", gguf, "--against", program, "--against-modes", "x"), "--against-modes must"),
        (("--model", gguf, "--against", str(tmp_path / "no")), "there is no file"),
        (("--model", gguf, "--draft-model", gguf, "--drafter", "suffix"), "none of suffix drafts"),
    ):
        assert run("bench", *more) == 1
        assert message in capsys.readouterr().err
