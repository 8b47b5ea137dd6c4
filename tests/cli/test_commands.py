"""Errors in one line, clean interrupts, and the small commands."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import typer
from rich.console import Console

from command_line import run
from draftahead import cli
from draftahead.bench.report import results_table
from draftahead.cli import app
from draftahead.cli.terminal import print_table
from draftahead.drafters import registry
from draftahead.loader import progress

BAD: list[tuple[tuple[str, ...], str]] = [
    (("generate", "x", "--model", "smolm2"), "did you mean 'smollm2'"),
    (("generate", ""), "the prompt is empty"),
    (("generate", "w1", "--drafter", "lokup"), "did you mean 'lookup'"),
    (
        ("generate", "w1", "--temperature", "-1"),
        "error: --temperature must be a number from 0 (greedy)",
    ),
    (("generate", "w1", "--top-p", "7"), "error: --top-p must be a number from 0 to 1"),
    (("generate", "w1", "--speculative-config", "{"), "not JSON"),
    (("generate", "w1", "--speculative-config", '{"methd": "x"}'), "has no option 'methd'"),
    (("generate", "w1", "--max-tokens", "5000"), "exceed the context"),
    (("generate", "w1 " * 300), "shorten it"),
    (("generate", "w1", "--exact", "reply"), "did you mean 'replay'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    if "--model" not in arguments:
        arguments = (*arguments, "--model", model_folder, "--raw")
    assert run(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_option_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "x", "--temprature", "1") == 2
    assert "--temperature" in capsys.readouterr().err


def test_models_lists_the_alias(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path))
    assert run("models") == 0
    shown = capsys.readouterr().out
    assert "smollm2" in shown
    assert "not downloaded yet" in shown


def test_ctrl_c_ends_a_process_without_a_traceback(model_folder: str) -> None:
    """SIGINT to a process that is generating."""
    arguments = [model_folder, "--max-tokens", "100", "--raw"]
    slow = (
        "import time; from draftahead import cli; from draftahead.engine import engine\n"
        "real = engine.Engine.step\n"
        "def step(self): time.sleep(0.2); return real(self)\n"
        "engine.Engine.step = step; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "generate", "w5 w6", "--model", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A background process may have inherited that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.read(4)  # the text has begun
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in error


def test_a_closed_pipe_is_not_an_error(model_folder: str) -> None:
    command = f"{sys.executable} -m draftahead generate 'w5 w6' --model {model_folder} --raw"
    done = subprocess.run(
        ["bash", "-c", f"{command} --max-tokens 90 | head -c 1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("w", "")


COMMANDS = ["demo", "generate", "chat", "models", "drafters", "bench", "tune", "train"]
TRAINING = [f"train {name}" for name in ("data", "eagle", "medusa", "exit", "distill", "export")]


@pytest.mark.parametrize("command", ["", *COMMANDS, *TRAINING])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_cut_nowhere_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert run(*command.split(), option) == 0
    shown = capsys.readouterr().out
    assert "..." not in shown.replace("COMMAND [ARGS]...", "") and "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "--help" in shown


def test_tables_are_cut_nowhere_at_80_columns() -> None:
    """Names are folded, numbers stay whole."""
    names = "none", "transformers prompt look-up", "ngram(num_speculative_tokens=3)"
    numbers = {"tokens_per_second": 1234.5, "speedup": 1.61, "speedup_interval": (1.55, 1.67)}
    numbers |= {"decode_speedup": 1.83, "mean_acceptance_length": 3.25, "identical": 1.0}
    row = {"task": "question_with_context", "batch": 16, **numbers}
    table = results_table([{**row, "name": name, "drafter": name} for name in names], "title")
    console = Console(width=80)
    with console.capture() as shown:
        print_table(console, table)
    lines = shown.get().splitlines()
    assert "\u2026" not in shown.get() and max(map(len, lines)) <= 80
    whole = "1234.5 1.61x 1.55-1.67 1.83x 3.25 100%"
    assert sum(" ".join(line.split()).endswith(whole) for line in lines) == len(names)


def test_every_option_says_what_it_does() -> None:
    """And every command has a summary that fits the list of commands."""
    group = typer.main.get_command(app)
    assert set(group.commands) == set(COMMANDS)  # type: ignore[attr-defined]
    commands = {**group.commands, **group.commands["train"].commands}  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert command.get_short_help_str(64)[-3:] != "...", name
        for parameter in command.params:
            assert parameter.help, f"{name}: {parameter.name}"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("draftahead ")


def test_drafters_are_listed_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("drafters") == 0
    shown = capsys.readouterr().out
    assert "lookup (or ngram): Drafts what followed the same n-gram" in shown
    assert "    prompt_lookup_max: 3\n" in shown
    for name in registry.names():
        assert re.search(rf"^{name}( \(or \w+\))?: \w", shown, re.MULTILINE), name


def test_models_lists_what_the_hub_cache_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "datasets--org--data" / "snapshots").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert run("models") == 0
    shown = capsys.readouterr().out
    assert f"org/name: 3 MB, {snapshot.parents[1]}\n" in shown
    assert "org/data" not in shown
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "missing"))
    assert run("models") == 0


def test_models_check_names_the_backend(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "--check", model_folder, "--device", "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("backend" in line for line in lines), lines
    assert run("models", model_folder) == 1
    assert "add --check" in capsys.readouterr().err


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("option", ["--verbose", "-v"])
def test_verbose_logs_decisions(
    model_folder: str, caplog: pytest.LogCaptureFixture, option: str, before: bool
) -> None:
    prompt = ("generate", "w5", "--model", model_folder, "--max-tokens", "1", "--raw")
    assert run(*((option, *prompt) if before else (*prompt, option))) == 0
    assert f"loading {model_folder}" in caplog.text


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_quiet_says_only_errors(
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.001)
    prompt = ("generate", "w5", "--model", model_folder, "--max-tokens", "9", "--raw")
    assert run(*prompt) == 0
    assert "s)" in capsys.readouterr().err
    assert run(*prompt, option) == 0
    shown = capsys.readouterr()
    assert shown.out and not shown.err
    assert run(*prompt, option, "--top-p", "7") == 1
    assert "error: " in capsys.readouterr().err


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x.json")

    monkeypatch.setattr(cli.terminal, "output_console", full)
    assert run("bench", "--shape", "tiny", "--max-tokens", "2", "--limit", "1") == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'x.json'\n"
