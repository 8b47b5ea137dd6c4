"""The terminal: consoles, and what is read from standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from draftahead.bench.prompts import decoded
from draftahead.errors import PromptError
from draftahead.loader.progress import is_quiet

HISTORY_LINES = 1000
FENCE = '"""'  # around a message of several lines


def output_console() -> Console:
    """For tables: as wide as the terminal, or 140 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def print_table(console: Console, table: Table) -> None:
    """With less space between the columns where the terminal is too narrow for it."""
    unlimited = console.options.update(width=10_000)
    if table.__rich_measure__(console, unlimited).maximum > console.width:
        table.box, table.show_edge, table.padding = box.SIMPLE_HEAD, False, (0, 0)
    console.print(table)


def error_console() -> Console:
    """For what was asked for beside the output, and errors, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def notes_console(*, quiet: bool = False) -> Console:
    """The same for messages that --quiet switches off."""
    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet or is_quiet())


def read_input() -> str:
    """All of standard input."""
    if sys.stdin.isatty():
        notes_console().print("type the prompt; Ctrl-D on an empty line ends it", style="dim")
    raw = getattr(sys.stdin, "buffer", None)  # whatever the locale says
    text = sys.stdin.read() if raw is None else decoded(raw.read(), "standard input")
    return text.replace("\r\n", "\n")


# ------------------------------------------------------------------------------ conversations


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def line_editing(history: Path) -> Iterator[None]:
    """Lines that `input` reads can be edited, and recalled from a file of earlier ones."""
    try:
        import readline
    except ImportError:  # on Windows, where the terminal itself edits lines
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    readline.set_history_length(HISTORY_LINES)
    readline.clear_history()
    with suppress(OSError):
        readline.read_history_file(history)
    try:
        yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)


@dataclass(frozen=True)
class Message:
    text: str
    is_command: bool = False


def read_message() -> Message | None:
    """A line, or the lines between two FENCEs; None at the end of input. Ctrl-C passes through."""
    line = _read_line("> ")
    if line is None:
        return None
    if not line.startswith(FENCE):
        # Pasted lines come as one, with their line ends.
        return Message(line, is_command=line.startswith("/") and "\n" not in line)
    lines = [line.removeprefix(FENCE)]
    while not lines[-1].endswith(FENCE):
        if (line := _read_line("... ")) is None:
            break
        lines.append(line)
    lines[-1] = lines[-1].removesuffix(FENCE)
    return Message("\n".join(lines).strip("\n"))


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt if is_interactive() else "").removeprefix("\ufeff").rstrip()
    except EOFError:
        if is_interactive():
            print()
        return None
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text ({error})") from None
