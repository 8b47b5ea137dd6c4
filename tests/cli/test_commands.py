"""Errors in one line, clean interrupts, and the small commands."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import run

BAD: list[tuple[tuple[str, ...], str]] = [
    (("generate", "x", "--model", "smolm2"), "did you mean 'smollm2'"),
    (("generate", ""), "the prompt is empty"),
    (("generate", "w1", "--drafter", "lokup"), "did you mean 'lookup'"),
    (("generate", "w1", "--temperature", "-1"), "error: --temperature must be 0 (greedy) or a number"),
    (("generate", "w1", "--top-p", "7"), "error: --top-p must be a number from 1e-06 to 1"),
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


def test_help_of_every_command_has_no_unexplained_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("demo", "generate", "chat", "models", "bench", "tune"):
        assert run(command, "--help") == 0
        assert "--" in capsys.readouterr().out
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("draftahead ")


def test_models_check_names_the_backend(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "--check", model_folder, "--device", "cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("backend" in line for line in lines), lines
    assert run("models", model_folder) == 1
    assert "add --check" in capsys.readouterr().err


def test_verbose_logs_decisions(
    model_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("draftahead")
    monkeypatch.setattr(logger, "level", logger.level)
    prompt = ("generate", "w5", "--model", model_folder, "--max-tokens", "1", "--raw")
    assert run("--verbose", *prompt) == 0
    assert f"loading {model_folder}" in caplog.text
