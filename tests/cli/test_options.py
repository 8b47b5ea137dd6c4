"""What is refused before anything is loaded, in the words that were typed; and what that leaves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from command_line import run
from draftahead.loader import hub


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here comes as far as loading a model."""
    monkeypatch.setattr(hub, "load", lambda *args, **options: pytest.fail("a model is loaded"))


GENERATE, BENCH = ("generate", "Hello"), ("bench",)
TRAIN = ("train", "data", "--prompts", "p.jsonl", "--out", "data")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GENERATE, "--drafter", "lokup"), "no drafter 'lokup'; did you mean 'lookup'?"),
        (("bench", "--drafter", "none,lokup"), "no drafter 'lokup'; did you mean 'lookup'?"),
        (("bench", "--speculative-config", '{"method": "lokup"}'), "no drafter 'lokup'"),
        (("tune", "--drafter", "lokup"), "no drafter 'lokup'"),
        (("demo", "--drafter", "lokup"), "no drafter 'lokup'"),
        ((*TRAIN, "--drafter", "lokup"), "no drafter 'lokup'"),
        ((*GENERATE, "--drafter", "lookup", "--draft-model", "x"), "'lookup' has no --draft-model"),
        ((*GENERATE, "--drafter", "none", "-k", "2"), "'none' has no --num-speculative-tokens"),
        ((*GENERATE, "--draft-model", "a", "--speculative-config", '{"model": "b"}'), "is a; --sp"),
        ((*GENERATE, "--top-p", "7"), "--top-p must be"),
        ((*GENERATE, "--max-tokens", "0"), "--max-tokens must be"),
        ((*GENERATE, "--not-lossless", "--exact", "replay"), "--not-lossless and --exact 'replay'"),
        ((*GENERATE, "--speculative-config", "[" * 100_000), "--speculative-config is not JSON"),
        ((*BENCH, "--prompts", "/no/file"), "cannot read the prompts in /no/file: No such file"),
        ((*BENCH, "--against", "llama.cpp", "--model", "a/b"), "the embedded model's own GGUF"),
        ((*BENCH, "--acceptance-rate", "0.5"), "--acceptance-rate says nothing without --shape"),
        ((*BENCH, "--shape", "tiny", "--batch", "2"), "--batch says nothing with --shape"),
        ((*BENCH, "--shape", "tiny", "--against", "llama.cpp"), "the embedded model's own GGUF"),
        ((*BENCH, "--shape", "tiny", "--max-tokens", "1"), "--max-tokens must be 2 or more"),
        ((*TRAIN, "--shard", "3/2"), "--shard 3/2: the first number"),
        (("models", "--dtype", "float32"), "--dtype says nothing without --check"),
        (("models", "a/b"), "add --check to a/b"),
    ],
)
def test_a_mistake_is_one_line_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "Hello"}')
    assert run(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]


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
