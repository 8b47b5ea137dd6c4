"""`draftahead generate` and `chat`, as a user sees them: output, statistics, streams."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from command_line import run
from draftahead.cli import chat


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


def test_chat_keeps_its_kv_cache_across_turns(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["w3 w4", "/stats", "", "w5", "/what", "/reset", "w3 w4", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    seen: list[Any] = []
    real = chat.show_stream

    def recording(*args: Any, **kwargs: Any) -> Any:
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(chat, "show_stream", recording)
    options = ("--model", model_folder, "--max-tokens", "5", "--temperature", "0")
    assert run("chat", *options) == 0
    shown = capsys.readouterr()
    assert "mean acceptance length" in shown.err
    assert "/reset clears" in shown.err
    first, second, again = (out.stats for out in seen)
    assert first.reused_tokens == 0
    # The first turn and its answer, but for the last token, whose KV was never computed.
    assert second.reused_tokens >= first.prompt_tokens + 5 - 1
    assert seen[2].token_ids == seen[0].token_ids
    assert again.reused_tokens == 2
