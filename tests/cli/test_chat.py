"""`draftahead chat`: messages, commands, files, and a real terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import run
from draftahead.cli import chat
from draftahead.errors import NonFiniteLogitsError
from pseudo_terminal import CTRL_C, CTRL_D, LEFT, UP, in_terminal

Typed = Callable[..., None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Sets what standard input holds; not from a terminal."""
    return lambda *lines: monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))


@pytest.fixture
def common(model_folder: str) -> tuple[str, ...]:
    return ("chat", "--model", model_folder, "--max-tokens", "5", "--temperature", "0")


def messages_in(file: Path) -> list[tuple[str, str]]:
    found = json.loads(file.read_text("utf-8"))["messages"]
    return [(message["role"], message["content"]) for message in found]


def test_chat_keeps_its_kv_cache_across_turns(
    common: tuple[str, ...],
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed("w3 w4", "/stats", "", "w5", "/reset", "w3 w4", "/exit", "never")
    seen: list[Any] = []
    real = chat.show_stream

    def recording(*args: Any, **kwargs: Any) -> Any:
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(chat, "show_stream", recording)
    assert run(*common) == 0
    assert "mean acceptance length" in capsys.readouterr().err
    first, second, again = (out.stats for out in seen)
    assert first.reused_tokens == 0
    # The first turn and its answer, but for the last token, whose KV was never computed.
    assert second.reused_tokens >= first.prompt_tokens + 5 - 1
    assert seen[2].token_ids == seen[0].token_ids
    assert again.reused_tokens == 2


def test_a_conversation_is_saved_and_loaded(
    common: tuple[str, ...],
    typed: Typed,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    one, two, other = tmp_path / "one.jsonl", tmp_path / "two.jsonl", tmp_path / "other"
    other.write_text("notes")
    typed("w3 w4", f"/save {one}", "w5", f"/save {two}", f"/save {one}", f"/save {other}")
    assert run(*common, "--system", "w9") == 1  # not all of it was done
    shown = capsys.readouterr()
    assert f"{one} exists: load that conversation first" in shown.err
    assert other.read_text() == "notes"
    roles = [role for role, _ in messages_in(two)]
    assert roles == ["system", *["user", "assistant"] * 2]
    assert messages_in(two)[:3] == messages_in(one)
    answer = messages_in(two)[-1][1]
    # The same question after the same conversation has the same answer, however it is loaded.
    typed(f"/load {one}", "w5", f"/save {one}")
    assert run(*common) == 0
    assert answer in capsys.readouterr().out
    assert messages_in(one) == messages_in(two)
    typed("w6")
    assert run(*common, "--load", str(one), "--save", str(one)) == 0
    assert len(messages_in(one)) == 7
    # It is a file of prompts, too.
    assert run("generate", "--prompts", str(one), "--model", common[2], "--max-tokens", "1") == 0


def test_messages_of_several_lines(common: tuple[str, ...], typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    typed('"""w1', "", '/w2"""', '"""/w3"""', '"""', "w4", "w5")  # the last has no end
    assert run(*common, "--save", str(file)) == 0
    asked = [text for role, text in messages_in(file) if role == "user"]
    assert asked == ["w1\n\n/w2", "/w3", "w4\nw5"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sav", "no command '/sav'; did you mean '/save'? (/help lists them)"),
        ("/save", "/save needs the name of a file"),
        ("/save /dev/null/x", "cannot write /dev/null/x: Not a directory"),
        ("/load missing", "cannot read the prompts in missing: No such file"),
        (f"/load {__file__}", "line 1, column 3: a line is a JSON object"),
        ("w1 " * 300, "shorten it"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(
    common: tuple[str, ...],
    typed: Typed,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    typed(line, "w3")
    assert run(*common, "-q") == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and message in shown.err
    assert shown.err.count("\n") == 1
    assert len(shown.out.split()) == 5


def test_help_lists_every_command(
    common: tuple[str, ...], typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = ["/help", "/reset", "/save FILE", "/load FILE", "/stats", "/exit"]
    typed("/help")
    assert run(*common, "-q") == 0
    shown = capsys.readouterr().err
    assert all(f"{name} " in shown for name in commands)
    assert max(map(len, shown.splitlines())) < 80


@pytest.mark.parametrize("failure", [KeyboardInterrupt, NonFiniteLogitsError])
@pytest.mark.parametrize("shown_before", ["w7 w8", ""])
def test_what_was_shown_of_an_answer_stays(
    common: tuple[str, ...],
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    failure: type[BaseException],
    shown_before: str,
) -> None:
    def failing(*args: Any, shown: list[str], **options: Any) -> Any:
        shown += shown_before.split(" ") if shown_before else []
        raise failure

    monkeypatch.setattr(chat, "show_stream", failing)
    file = tmp_path / "c.jsonl"
    typed("w3", "/exit")
    assert run(*common, "--save", str(file)) == (130 if failure is KeyboardInterrupt else 1)
    if shown_before:
        assert messages_in(file) == [("user", "w3"), ("assistant", "w7w8")]
    else:
        assert not file.exists()


def test_what_does_not_go_together_is_refused(
    common: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "w1"}]}')
    for more, message in (
        (("--system", "x", "--load", str(file)), "--system is for a new conversation"),
        (("--save", str(file)), "exists: load that conversation first"),
        (("--save", str(tmp_path)), "cannot write"),
        (("--load", str(tmp_path)), "cannot read"),
    ):
        assert run("chat", "--model", "no/model", *more) == 1
        assert message in capsys.readouterr().err


SLOW = """
import time
from draftahead import cli
from draftahead.cli import generate
text = generate.Text
generate.Text = lambda *args, **options: (time.sleep(0.05), text(*args, **options))[1]
cli.main()
"""


def test_a_terminal(model_folder: str, tmp_path: Path) -> None:
    """Lines are edited and recalled, pasted lines are one message, Ctrl-C stops an answer."""
    file, state = tmp_path / "c.jsonl", tmp_path / "state"
    options = ("--model", model_folder, "--max-tokens", "30", "--temperature", "0")
    with in_terminal(SLOW, "chat", *options, XDG_STATE_HOME=str(state)) as user:
        user.wait_for("/help lists what can be typed")
        user.wait_for(r"\x1b\[\?2004h> ")  # pasted text is to be marked as such
        user.type(f"w5 6{LEFT}w\r")
        user.wait_for(r"\n.*w\d+.* ")  # the answer has begun
        user.type(CTRL_C)
        user.wait_for(r"\(interrupted: what there is of the answer stays")
        user.wait_for("> ")  # before that, the terminal itself echoes what is typed
        user.type("half a line")
        user.wait_for("half a line")
        user.interrupt_until("Ctrl-D ends")
        user.wait_for("> ")
        user.type("\x1b[200~w1\nw2\x1b[201~\r")
        user.wait_for("the answer was cut here")
        user.wait_for("> ")
        user.type(f"/save {file}\r")
        user.wait_for("saved to .*4 messages")
        user.wait_for("> ")
        user.type(f"{UP}\r")
        user.wait_for("saved to .*4 messages")
        user.wait_for("> ")
        user.type(CTRL_D)
        assert user.exit_code() == 0
    (_, first), (_, stopped), (_, pasted), (_, whole) = messages_in(file)
    assert first == "w5 w6" and pasted == "w1\nw2"
    assert 0 < len(stopped.split()) < len(whole.split()) == 30
    (history,) = state.rglob("chat_history")
    assert f"/save {file}" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
