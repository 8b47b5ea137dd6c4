"""The command line: one file per command, joined here; errors are printed as one line."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from draftahead import __version__
from draftahead.cli import bench, chat, command, demo, drafters, generate, models, train, tune
from draftahead.errors import DraftaheadError
from draftahead.loader.progress import is_quiet

app = typer.Typer(
    name="draftahead",
    help="Makes a large language model generate faster, with provably the same output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # in plain text, no option is cut at the width of a terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (
    demo.demo,
    generate.generate,
    chat.chat,
    models.models,
    drafters.drafters,
    bench.bench,
    tune.tune,
):
    app.command()(function)
app.add_typer(train.app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftahead {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    verbose: command.Verbose = False,
    quiet: command.Quiet = False,
) -> None: ...


def _show_warning(message: object, category: type[Warning], *_: object, **__: object) -> None:
    if not is_quiet():
        print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    warnings.showwarning = _show_warning
    try:
        # Raises SystemExit; typer handles mistyped options, closed pipes, Ctrl-C (exit code 130).
        # The name is given for `python -m draftahead`: completion is for a command of one word.
        app(prog_name="draftahead")
    except (DraftaheadError, OSError) as error:  # OSError: a disk that is full, a file that is gone
        message = "\\n".join(str(error).split("\n"))  # a file may be named so
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(1) from None
