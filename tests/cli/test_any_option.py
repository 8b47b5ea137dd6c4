"""Any text for any option of any command gives a result or one line that says why not; no option
is left out, as click's own list of them is walked."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import zoo
from any_value import examples, profiles
from command_line import run
from draftahead import cli
from draftahead.errors import DraftaheadError
from draftahead.loader import hub

# What a command needs besides the options under test.
NEEDED = {
    "prompt": "w5 w7",
    "prompts": "prompts.jsonl",
    "out": "out",
    "data": "data",
    "layer": "1",
    "num_layers": "1",
    "head": "head",
}
FILES = {
    "prompts.jsonl": '{"prompt": "w5 w7"}\n{"messages": [{"role": "user", "content": "w5"}]}\n',
    "latin.jsonl": '{"prompt": "\xe9"}',
    "text.jsonl": '{"text": 5}\n[]\nnull\n',
    "empty": "",
}
WORDS = (
    *("", " ", "-", "--", "-1", "0", "1", "2", "3", "0.5", "1e-9", "1e400", "nan", "inf", "-inf"),
    *("9" * 30, "9" * 5000, "x" * 5000, "1,2", "1,,2", "0,1", "1/1", "2/1", "1/0", "³", "٣", "1_0"),
    *("None", "true", "\udc80", "a\udcffb", "\n", "'", "{}", "[]", "null", '{"method": 5}', "{"),
    *('{"method": "lookup"}', '{"method": "lookup", "prompt_lookup_max": -1}', '{"model": null}'),
    *('{"method": "auto", "num_speculative_tokens": 1e99}', '{"method": "suffix", "x": NaN}'),
    *("smollm2", "org/name", "a/b/c", ".", "..", "lookup", "lookup,none", "auto", "eagle", "echo"),
    *("replay", "distribution", "int8", "float32", "bfloat16", "cpu", "cuda", "cuda:99", "meta"),
    *("transformers", "llama.cpp", "random", "builtin", "tiny", "llama-8b", "tiny,llama-8b"),
    *(*FILES, "folder", "missing/x", "missing", "/dev/null", "/proc/x", "~absent/x"),
)


def is_typed(text: str) -> bool:
    """Whether it can be an argument, and is no path outside of the test's folder."""
    return "\0" not in text and not text.startswith(("/", "~")) and ".." not in text


TYPED = st.one_of(
    st.sampled_from(WORDS),
    st.text(max_size=6).filter(is_typed).filter(lambda text: text.isprintable()),
    st.integers(-3, 200).map(str),
    st.floats().map(str),
)


def commands() -> dict[str, tuple[list[str], Any]]:
    """Every command, by its words. (click's classes are typer's own in some versions.)"""

    def walk(command: Any, words: list[str]) -> Iterator[tuple[str, tuple[list[str], Any]]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, [*words, name])
        if not hasattr(command, "commands"):
            yield " ".join(words), (words, command)

    return dict(walk(typer.main.get_command(cli.app), []))


COMMANDS = commands()


def arguments_of(data: st.DataObject, words: list[str], command: Any) -> list[str]:
    """A command with up to three of its options, each with any text, and what else it needs."""
    options = [one for one in command.params if one.name != "help"]
    chosen = data.draw(st.lists(st.sampled_from(options), max_size=3, unique=True))
    found, positional = list(words), []
    for option in options:
        value = NEEDED.get(option.name)
        if option in chosen:
            value = data.draw(TYPED)
        elif value is None or not (option.required or option.name == "prompt"):
            continue
        if option.param_type_name == "argument":
            positional.append(value)
        elif option.is_flag:
            found.append(data.draw(st.sampled_from([*option.opts, *option.secondary_opts])))
        else:
            found += [data.draw(st.sampled_from(option.opts)), value]
    return [*found, *positional]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, text in FILES.items():
        Path(name).write_text(text, "latin-1")
    Path("folder").mkdir()
    return tmp_path


def assert_ends_cleanly(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> int:
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # as it is
    code = run(*arguments)
    shown = capsys.readouterr()
    assert code in (0, 1, 2), arguments
    assert "Traceback" not in shown.out + shown.err, arguments
    if code == 1:
        errors = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, (arguments, shown.err)
        assert shown.err.endswith(errors[0] + "\n"), (arguments, shown.err)
    if code == 2:  # of click
        assert "Error: " in shown.err, arguments
    return code


def test_every_command_is_walked() -> None:
    assert {"generate", "chat", "bench", "train eagle", "train export"} <= {*COMMANDS}
    names = {option.name for _, command in COMMANDS.values() for option in command.params}
    assert {"prompt", "temperature", "num_speculative_tokens", "lr", "shape", "verbose"} <= names


class LoadedError(DraftaheadError):
    """The command has checked its options, and loads the model."""


@profiles()
def test_any_option_of_any_command_until_the_model_is_loaded(
    count: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise LoadedError("the model is loaded")

    monkeypatch.setattr(hub, "load", load)
    monkeypatch.setattr("draftahead.bench.shape.measure_shape", load)

    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        words, command = COMMANDS[data.draw(st.sampled_from(sorted(COMMANDS)))]
        monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w7\n"))
        assert_ends_cleanly(capsys, arguments_of(data, words, command))

    check()


@profiles()
@pytest.mark.parametrize("name", ["generate", "chat", "models"])
def test_any_option_with_a_model(
    name: str,
    count: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = zoo.tiny("llama"), zoo.tokenizer()
    loaded[0].generation_config.max_new_tokens = 3
    monkeypatch.setattr(hub, "load", lambda *_, **__: loaded)
    words, command = COMMANDS[name]
    codes = []

    @examples(count // 3)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w7\n/stats\n"))
        arguments = arguments_of(data, words, command)
        for flag in ("-n", "--n"):  # 16384 samples are allowed, and take long
            if flag in arguments and len(arguments[arguments.index(flag) + 1]) > 2:
                arguments[arguments.index(flag) + 1] = "3"
        codes.append(assert_ends_cleanly(capsys, arguments))

    check()
    assert len({*codes}) > 1  # some were accepted, and some refused
