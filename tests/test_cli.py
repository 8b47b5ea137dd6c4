"""The command line, as a user sees it: output, errors in one line, clean interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import zoo
from draftahead import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer whose words are w0 to w96, and a chat template."""
    path = tmp_path_factory.mktemp("model")
    zoo.tiny("llama").float().save_pretrained(path)
    zoo.tokenizer().save_pretrained(path)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["draftahead", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_generate_says_the_same_with_every_drafter(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("generate", "w5 w6 w7 w5 w6", "--model", folder, "--max-tokens", "12", "--json")
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
    seen = []
    for extra in (
        ("--drafter", "none"),
        ("--drafter", "lookup", "-k", "3"),
        ("--speculative-config", config),
        ("--draft-model", folder, "-k", "4"),
        ("--explain",),
    ):
        assert run(monkeypatch, *common, *extra) == 0
        seen.append(json.loads(capsys.readouterr().out))
    assert len({tuple(out["token_ids"]) for out in seen}) == 1
    assert seen[0]["stats"]["drafted"] == 0
    assert seen[3]["stats"]["acceptance_rate"] == 1
    assert seen[0]["finish_reason"] == "length"


def test_generate_streams_text_and_reads_stdin(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    options = ("--model", folder, "--max-tokens", "6", "--raw", "--temperature", "0")
    assert run(monkeypatch, "generate", "w5 w6", *options, "--json") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6"))
    assert run(monkeypatch, "generate", "-", *options, "--stats") == 0
    shown = capsys.readouterr()
    assert shown.out.split() == text.split()
    assert "mean acceptance length" in shown.err
    # --chat goes through the template, which adds a word.
    assert run(monkeypatch, "generate", "w5 w6", *options[:4], "--chat", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 3


BAD: list[tuple[tuple[str, ...], str]] = [
    (("generate", "x", "--model", "smolm2"), "did you mean 'smollm2'"),
    (("generate", ""), "the prompt is empty"),
    (("generate", "w1", "--drafter", "lokup"), "did you mean 'lookup'"),
    (("generate", "w1", "--temperature", "-1"), "temperature must be 0"),
    (("generate", "w1", "--top-p", "7"), "top_p must be above 0"),
    (("generate", "w1", "--speculative-config", "{"), "no JSON"),
    (("generate", "w1", "--speculative-config", '{"methd": "x"}'), "has no option 'methd'"),
    (("generate", "w1", "--max-tokens", "5000"), "exceed the context"),
    (("generate", "w1 " * 300), "shorten it"),
    (("generate", "w1", "--exact", "reply"), "did you mean 'replay'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    if "--model" not in arguments:
        arguments = (*arguments, "--model", folder, "--raw")
    assert run(monkeypatch, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_unknown_option_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "x", "--temprature", "1") == 2
    assert "--temperature" in capsys.readouterr().err


def test_chat_keeps_its_cache_across_turns(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["w3 w4", "/stats", "", "w5", "/what", "/reset", "w3 w4", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    from draftahead.cli import chat

    seen: list[Any] = []
    real = chat.show_stream

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(chat, "show_stream", noting)
    options = ("--model", folder, "--max-tokens", "5", "--temperature", "0")
    assert run(monkeypatch, "chat", *options) == 0
    shown = capsys.readouterr()
    assert "mean acceptance length" in shown.err
    assert "/reset forgets" in shown.err
    first, second, again = (out.stats for out in seen)
    assert first.reused_tokens == 0
    # All of the first turn and its answer but the last token, whose keys were never needed.
    assert second.reused_tokens >= first.prompt_tokens + 5 - 1
    assert seen[2].token_ids == seen[0].token_ids
    assert again.reused_tokens == 2


def test_models_lists_the_alias(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path))
    assert run(monkeypatch, "models") == 0
    shown = capsys.readouterr().out
    assert "smollm2" in shown
    assert "not fetched yet" in shown


def test_demo_races_and_writes_its_table(
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from draftahead.bench.prompts import BenchPrompt
    from draftahead.cli import demo

    prompts = [BenchPrompt(kind, kind, ("w5 w6 w7 w5 w6",)) for kind in demo.KINDS]
    monkeypatch.setattr(demo, "load_prompts", lambda: prompts)
    file = tmp_path / "table.json"
    arguments = ("demo", "--model", folder, "--max-tokens", "10", "--json", str(file))
    assert run(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "overall" in shown
    table = json.loads(file.read_text())
    assert [row["task"] for row in table["rows"]] == list(demo.KINDS)
    assert table["overall"]["identical"] is True
    assert all(row["identical"] and row["speedup"] > 0 for row in table["rows"])


def test_interrupt_ends_cleanly(folder: str) -> None:
    """A real process, a real SIGINT, in the middle of a text."""
    arguments = [folder, "--max-tokens", "100", "--raw"]
    slow = (
        "import time; from draftahead import cli; from draftahead.engine import engine; real = engine.Engine.step\n"
        "def step(self): time.sleep(0.2); return real(self)\n"
        "engine.Engine.step = step; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "generate", "w5 w6", "--model", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Whoever runs the tests in the background may have had the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.read(4)  # the text has begun
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in error


def test_broken_pipe_is_no_error(folder: str) -> None:
    command = f"{sys.executable} -m draftahead generate 'w5 w6' --model {folder} --raw"
    done = subprocess.run(
        ["bash", "-c", f"{command} --max-tokens 90 | head -c 1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("w", "")
