"""What is refused before anything is loaded, in the words that were typed; and what that leaves."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import typer

from command_line import run
from draftahead.cli import app
from draftahead.loader import hub
from draftahead.train.dataset import Dataset, write_texts
from draftahead.train.loop import CHECKPOINT
from pseudo_terminal import CTRL_D, in_terminal


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here comes as far as loading a model."""
    monkeypatch.setattr(hub, "load", lambda *args, **options: pytest.fail("a model is loaded"))


GENERATE, BENCH = ("generate", "Hello"), ("bench",)
TRAIN = ("train", "data", "--prompts", "p.jsonl", "--out", "data")
MEDUSA = ("train", "medusa", "--data", "texts", "--out", "head")
EAGLE = ("train", "eagle", *MEDUSA[2:])
EXPORT = ("train", "export", "--head", "texts", "--out", "exported")
NUMBER = '{"method": "lookup", "num_speculative_tokens": 2, "prompt_lookup_mi": 1}'


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with prompts, training data, and a training."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hello"}')
    (tmp_path / "empty").mkdir()
    write_texts(Dataset.of([([1], [2, 3])] * 3), tmp_path / "texts")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / CHECKPOINT).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GENERATE, "--drafter", "lokup"), "no drafter 'lokup'; did you mean 'lookup'?"),
        (("generate", "--prompts", "a\nb"), "a\\nb"),
        (("bench", "--drafter", "none,lokup"), "no drafter 'lokup'; did you mean 'lookup'?"),
        (("bench", "--speculative-config", '{"method": "lokup"}'), "no drafter 'lokup'"),
        (("tune", "--drafter", "lokup"), "no drafter 'lokup'"),
        (("demo", "--drafter", "lokup"), "no drafter 'lokup'"),
        ((*TRAIN, "--drafter", "lokup"), "no drafter 'lokup'"),
        ((*GENERATE, "--drafter", "lookup", "--draft-model", "x"), "'lookup' has no --draft-model"),
        ((*GENERATE, "--drafter", "none", "-k", "2"), "'none' has no --num-speculative-tokens"),
        ((*GENERATE, "--draft-model", "a", "--speculative-config", '{"model": "b"}'), "is a; --sp"),
        ((*GENERATE, "--top-p", "7"), "--top-p must be"),
        (("generate", "caf\udce9"), "the prompt is not UTF-8 text"),
        ((*GENERATE, "--system", "caf\udce9"), "--system is not UTF-8 text"),
        ((*GENERATE, "--not-lossless", "--exact", "replay"), "--not-lossless and --exact 'replay'"),
        ((*GENERATE, "--speculative-config", "[" * 100_000), "--speculative-config is not JSON"),
        ((*BENCH, "--prompts", "/no/file"), "cannot read the prompts in /no/file: No such file"),
        ((*BENCH, "--against", "llama.cpp", "--model", "a/b"), "is no .gguf file"),
        ((*BENCH, "--acceptance-rate", "0.5"), "--acceptance-rate says nothing without --shape"),
        ((*BENCH, "--shape", "tiny", "--batch", "2"), "--batch says nothing with --shape"),
        ((*BENCH, "--shape", "tiny", "--against", "llama.cpp"), "is no .gguf file"),
        ((*TRAIN, "--shard", "3/2"), "--shard 3/2: the first number"),
        ((*GENERATE, "--drafter", "draft_model"), "'draft_model' needs --draft-model: a name or"),
        ((*GENERATE, "--drafter", "medusa", "--draft-model", "no"), "needs --draft-model: 'no' is"),
        (("bench", "--drafter", "medusa"), "drafter 'medusa' needs --draft-model"),
        ((*GENERATE, "--speculative-config", '{"method": "medusa"}'), "'medusa' needs 'model'"),
        ((*GENERATE, "--speculative-config", NUMBER), "has no option 'prompt_lookup_mi'"),
        (("demo", "--speculative-config", '{"model": "no"}'), "needs 'model': 'no' is no folder"),
        ((*BENCH, "--plot", "x.foo"), "--plot x.foo: the name of a figure ends with .png, .svg"),
        ((*MEDUSA, "--plot", "x"), "--plot x: the name of a figure"),
        ((*MEDUSA, "--lr", "-1"), "--lr must be above 0"),
        ((*MEDUSA, "--eval-interval", "0"), "--eval-interval must be 1 or more"),
        ((*MEDUSA, "--data", "empty"), "empty holds no training data"),
        ((*MEDUSA, "--held-out", "empty"), "empty holds no training data"),
        ((*MEDUSA, "--out", "p.jsonl"), "cannot write to p.jsonl: Not a directory"),
        ((*MEDUSA, "--out", "trained"), "trained holds an unfinished or finished training"),
        ((*MEDUSA, "--hidden-states-folder", "x"), "needs --cache-hidden-states"),
        (
            (*MEDUSA, "--hidden-states-folder", "p.jsonl", "--cache-hidden-states", "1"),
            "cannot write to p.jsonl",
        ),
        ((*EAGLE, "--aux-layers", "1,x"), "--aux-layers takes whole numbers"),
        ((*TRAIN, "--temperature", "-1"), "--temperature must be"),
        ((*EXPORT, "--head", "nowhere"), "--head: 'nowhere' is no folder or file"),
        ((*EXPORT, "--out", "p.jsonl"), "cannot write to p.jsonl"),
        (("models", "--dtype", "float32"), "--dtype says nothing without --check"),
        (("models", "a/b"), "add --check to a/b"),
    ],
)
def test_a_mistake_is_one_line_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(work)
    before = sorted(work.rglob("*"))
    assert run(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert sorted(work.rglob("*")) == before


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("file", ["missing/x.png", "folder.png"])
def test_an_output_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    file: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    assert run("bench", option, file) == 1
    assert "error: cannot write" in capsys.readouterr().err
    assert run("train", "data", "--prompts", "p.jsonl", "--out", f"/dev/null/{file}") == 1
    assert "error: cannot write" in capsys.readouterr().err


def test_a_failed_run_leaves_no_files_and_keeps_those_there_were(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.png"
    old.write_text("old")
    assert run("bench", "--json", str(old), "--plot", str(new), "--batch", "x") == 1
    assert old.read_text() == "old"
    assert not new.exists()


def test_a_plot_without_matplotlib_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    for command in ("bench", "tune"):
        assert run(command, "--plot", "x.png") == 1
        assert "pip install 'draftahead[bench]'" in capsys.readouterr().err


RUNS = [
    GENERATE,
    ("generate", "--prompts", "p.jsonl", "--out", "out.jsonl"),
    ("chat", "--save", "out.jsonl"),
    ("demo", "--json", "out.json"),
    (*BENCH, "--json", "out.json", "--plot", "out.png"),
    ("tune", "--json", "out.json", "--plot", "out.png"),
    ("models", "--check"),
    TRAIN,
    (*MEDUSA, "--plot", "out.png"),
    EXPORT,
]


@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_ctrl_c_is_exit_code_130_and_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    work: Path,
    arguments: tuple[str, ...],
) -> None:
    def interrupted(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "load", interrupted)
    monkeypatch.chdir(work)
    before = sorted(work.rglob("*"))
    assert run(*arguments) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert sorted(work.rglob("*")) == before


@pytest.mark.parametrize("arguments", [*RUNS, (*BENCH, "--shape", "tiny")], ids=" ".join)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    work: Path,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.undo()  # `hub.load` itself, which looks for the device before the model
    monkeypatch.chdir(work)
    if "--shape" not in arguments:
        name = ["no-such-folder"] if arguments[0] == "models" else ["--model", "no-such-folder"]
        arguments = (*arguments, *name)
    assert run(*arguments, "--device", "cuda:99") == 1
    assert "error: --device cuda:99 does not exist" in capsys.readouterr().err


# What options mean that do not mean the same everywhere.
MEANINGS = {
    "--batch": ("sequences at once", "batch sizes to measure"),
    "--drafter": ("the drafter", "drafters to measure"),
    "--speculative-config": ("the drafter", "one more drafter"),
    "--num-speculative-tokens": ("drafted tokens", "numbers to measure"),
    "--prompts": ("a file", "a file, or built-in ones"),
    "--json": ("print", "write a report"),
    "--out": ("a file of completions", "a folder"),
    "--resume": ("a file of completions", "a training"),
    "--max-length": ("of prompts", "of training texts"),
    "--layers": ("of an EAGLE head", "of a Medusa head", "of a draft model"),
    "--depth": ("of training", "of evaluation"),
    "--seed": ("of texts", "of a training"),
}


def test_an_option_says_the_same_in_every_command() -> None:
    group = typer.main.get_command(app)
    commands = {**group.commands, **group.commands["train"].commands}  # type: ignore[attr-defined]
    said: dict[str, set[str]] = defaultdict(set)
    for command in commands.values():
        for option in command.params:
            if option.param_type_name == "option":
                # Some have a default in one command, and none in another.
                meaning = re.sub(r"; unset: .*", "", option.help).removesuffix(".")
                said[option.opts[0]].add(meaning)
    counts = {name: len(meanings) for name, meanings in said.items()}
    assert counts == dict.fromkeys(said, 1) | {name: len(m) for name, m in MEANINGS.items()}


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """With the script that --show-completion prints, in a real bash."""
    program = tmp_path / "draftahead"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m draftahead "$@"\n')
    program.chmod(0o755)
    script = """
        source <(draftahead --show-completion bash)
        complete_words() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            $(complete -p draftahead | sed 's/.*-F \\([^ ]*\\).*/\\1/') draftahead
            echo "${COMPREPLY[@]}"
        }
        complete_words draftahead ge
        complete_words draftahead train dis
        complete_words draftahead generate --max-
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SHELL": "/bin/bash"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stdout.splitlines() == ["generate", "distill", "--max-tokens --max-context"]


def test_a_prompt_is_typed_in_a_terminal() -> None:
    with in_terminal("from draftahead import cli; cli.main()", "generate", "-") as user:
        user.wait_for("type the prompt; Ctrl-D on an empty line ends it")
        user.type(CTRL_D)
        user.wait_for("error: the prompt is empty")
        assert user.exit_code() == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the prompt is empty"),
        (b"one\ncaf\xe9", "standard input, line 2: this is not UTF-8 text"),
    ],
)
def test_standard_input_is_checked_before_the_model(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    message: str,
) -> None:
    # The locale does not count.
    stdin = io.TextIOWrapper(io.BytesIO(content), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("generate", "-") == 1
    assert f"error: {message}" in capsys.readouterr().err
