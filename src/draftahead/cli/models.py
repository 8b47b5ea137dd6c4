"""`draftahead models`: the known aliases; and how a model would run on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from draftahead.cli import options
from draftahead.errors import ConfigError
from draftahead.loader.embedded import ALIASES


def models(
    model: Annotated[str | None, Argument(help="For --check; unset: smollm2.")] = None,
    check: Annotated[
        bool, Option("--check", help="Load MODEL and print which backend runs it, and why.")
    ] = False,
    dtype: Annotated[str | None, Option(help="For --check: float32, bfloat16 ...")] = None,
    device: Annotated[str | None, Option(help="For --check: cpu, cuda ...")] = None,
    quantize: Annotated[str | None, Option(help="For --check: int8.")] = None,
) -> None:
    """List aliases, cache folders and sizes; or check how a model would run."""
    if check:
        chosen = options.LLMOptions(model or "smollm2", dtype, device, quantize)
        typer.echo("\n".join(chosen.build("none").describe()))
        return
    if model is not None:
        raise ConfigError(f"to check how {model} would run, add --check")
    table = Table("alias", "model", "cached in", "size")
    for alias in ALIASES.values():
        where = str(alias.folder) if alias.is_complete() else "not downloaded yet"
        size = f"{alias.bytes_on_disk / 1e6:.0f} MB" if alias.bytes_on_disk else "-"
        table.add_row(alias.name, alias.title, where, size)
    options.output_console().print(table)
    typer.echo("Any other model: a hub id (org/name), a folder, or a .gguf file.")
