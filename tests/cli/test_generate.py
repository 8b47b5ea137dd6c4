"""`draftahead generate`, as a user sees them: output, statistics, streams."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from command_line import run
from draftahead import LLM, Stats
from draftahead.cli import rows
from draftahead.cli.generate import stats_table


def test_every_drafter_generates_the_same_text(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("generate", "w5 w6 w7 w5 w6", "--model", model_folder, "--max-tokens", "12", "--json")
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
    seen = []
    for extra in (
        ("--drafter", "none"),
        ("--drafter", "lookup", "-k", "3"),
        ("--speculative-config", config),
        ("--draft-model", model_folder, "-k", "4"),
        ("--explain",),
    ):
        assert run(*common, *extra) == 0
        seen.append(json.loads(capsys.readouterr().out))
    assert len({tuple(out["token_ids"]) for out in seen}) == 1
    assert seen[0]["stats"]["drafted"] == 0
    assert seen[3]["stats"]["acceptance_rate"] == 1
    assert seen[0]["finish_reason"] == "length"


def test_generate_streams_text_and_reads_stdin(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", model_folder, "--max-tokens", "6", "--raw", "--temperature", "0")
    assert run("generate", "w5 w6", *options, "--json") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6"))
    assert run("generate", "-", *options, "--stats") == 0
    shown = capsys.readouterr()
    assert shown.out.split() == text.split()
    assert "mean acceptance length" in shown.err
    assert "accepted/drafted at position" in shown.err
    # --chat goes through the template, which adds a word.
    assert run("generate", "w5 w6", *options[:4], "--chat", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 3


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "w5 w6"},
        {"id": "b", "turns": ["w7"]},
        {"text": "w5 w6 " * 100},  # too long
        {"messages": [{"role": "user", "content": "w8 w9"}]},
        {"id": 7, "text": "w5 w6"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_a_file_of_prompts_gives_a_line_for_each(
    model_folder: str, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--model", model_folder, "--max-tokens", "6", "--temperature", "0")
    many = ("generate", "--prompts", str(prompt_file), *options, "--batch", "2")
    assert run(*many, "--out", str(out), "--stats") == 1  # one of them failed
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "= 24/" in shown.err and "error: 1 of 5 prompts failed" in shown.err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in lines] == [1, "b", 3, 4, 7]
    assert "the prompt has 200 tokens" in lines[2]["error"] and "text" not in lines[2]
    for text, arguments in (("w5 w6", ["--raw"]), ("w8 w9", ["--chat"])):
        assert run("generate", text, *options, *arguments, "--json") == 0
        alone = json.loads(capsys.readouterr().out)
        line = lines[4] if arguments == ["--raw"] else lines[3]
        assert line["token_ids"] == alone["token_ids"]
    # A line each on standard output, where no file is named.
    assert run(*many) == 1
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [
        line["id"] for line in lines
    ]


def test_an_interrupted_file_is_resumed(
    model_folder: str,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", str(prompt_file), "--model", model_folder, "--batch", "1")
    arguments = (*arguments, "--max-tokens", "4", "--seed", "3", "--raw")
    monkeypatch.setattr(rows, "BATCHES_AT_ONCE", 1)
    assert run(*arguments, "--out", str(whole)) == 1

    def ids_of(file: Path) -> list[Any]:
        return [json.loads(line).get("token_ids") for line in file.read_text().splitlines()]

    real = LLM.generate

    def generate(self: LLM, prompts: Any, *args: Any, **options: Any) -> Any:
        if prompts[0] == "w7":
            raise KeyboardInterrupt
        return real(self, prompts, *args, **options)

    monkeypatch.setattr(LLM, "generate", generate)
    capsys.readouterr()
    assert run(*arguments, "--out", str(out), "--resume") == 130
    assert f"--resume goes on with {out}" in capsys.readouterr().err
    assert ids_of(out) == ids_of(whole)[:1]
    monkeypatch.setattr(LLM, "generate", real)
    assert run(*arguments, "--out", str(out)) == 1
    assert "exists: add --resume" in capsys.readouterr().err
    with out.open("a") as file:
        file.write('{"id": "b", "text"')  # killed within a line
    assert run(*arguments, "--out", str(out), "--resume") == 1
    assert ids_of(out) == ids_of(whole)
    prompt_file.write_text('{"id": "another", "prompt": "w1"}')
    capsys.readouterr()
    assert run(*arguments, "--out", str(out), "--resume") == 1
    assert "holds no lines of these prompts" in capsys.readouterr().err


def test_samples_logprobs_and_penalties(
    model_folder: str, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("generate", "w5 w6", "--model", model_folder, "--max-tokens", "4", "--seed", "1")
    sampled = (*common, "--temperature", "2")
    assert run(*sampled, "-n", "3", "--json", "--logprobs", "2", "--ignore-eos") == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert len(samples) == 3 and len({tuple(s["token_ids"]) for s in samples}) > 1
    first = samples[0]["logprobs"]
    assert [token["token_id"] for token in first] == samples[0]["token_ids"]
    assert all(len(token["top"]) == 2 for token in first)
    assert run(*common, "-n", "2") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("--- sample 1 ---\nw") and "\n--- sample 2 ---\nw" in shown
    texts = set()
    for penalty in ((), ("--repetition-penalty", "9"), ("--presence-penalty", "-9")):
        assert run(*common, "--max-tokens", "20", "--temperature", "0", *penalty) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 3


def test_a_system_message_opens_the_conversation(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    lines = {"prompt": "w5"}, {"text": "w5"}, {"messages": [{"role": "system", "content": "w1 w2"}]}
    file.write_text("\n".join(map(json.dumps, lines)))
    common = ("generate", "--model", model_folder, "--max-tokens", "1", "--system", "w3 w4")
    assert run(*common, "--prompts", str(file)) == 0
    counts = [json.loads(line)["prompt_tokens"] for line in capsys.readouterr().out.splitlines()]
    assert counts == [(2 + 1) + (1 + 1), 1, 2 + 1]  # the template adds a word to each
    assert run(*common, "w5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a prompt, or - for standard input, or --prompts FILE"),
        (
            ("w5", "--prompts", "in.jsonl"),
            "give a prompt, or - for standard input, or --prompts FILE",
        ),
        (("w5", "--out", "out.jsonl"), "--out is for --prompts"),
        (("w5", "--resume"), "--resume is for --prompts"),
        (("w5", "--logprobs", "2"), "--logprobs is for --json and --prompts"),
        (("w5", "--raw", "--system", "w1"), "--system needs the chat template"),
        (("w5", "--n", "0"), "--n must be a whole number"),
        (("w5", "--repetition-penalty", "0"), "--repetition-penalty must be a number"),
        (("--prompts", "missing.jsonl"), "cannot read the prompts in missing.jsonl"),
    ],
)
def test_what_does_not_go_together_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run("generate", *arguments) == 1
    assert f"error: {message}" in capsys.readouterr().err


def test_statistics_agree_with_each_other() -> None:
    """A text that ends with a drafted token: the target's own token after it is left out."""
    stats = Stats(tokens=29, steps=18, drafted=40, accepted=12)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(stats_table(stats))
    assert "1.61 = 29/18" in shown.get()
    assert "1.67 = 1 + 12/18" in shown.get()
