"""The command line. One file a command; this one joins them and says errors in one line."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from draftahead import __version__
from draftahead.cli import bench, chat, demo, generate, models, train, tune
from draftahead.errors import DraftaheadError

app = typer.Typer(
    name="draftahead",
    help="Makes a large language model generate faster, with provably the same output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("models")(models.models)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.add_typer(train.app, name="train")


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftahead {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


def _one_line(message: object, category: type[Warning], *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    warnings.showwarning = _one_line
    try:
        app()  # ends by SystemExit; mistyped options and Ctrl-C (130) are its own affair
    except DraftaheadError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # `draftahead generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
