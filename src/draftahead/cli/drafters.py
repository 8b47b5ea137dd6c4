"""`draftahead drafters`: the names that --drafter takes, and the keys of their configurations."""

from __future__ import annotations

from typing import Any

import typer

from draftahead.cli import command


@command.grouped
def drafters() -> None:
    """List the drafters, with the keys of --speculative-config."""
    from draftahead.drafters import registry

    def shown(default: Any) -> str:
        if default is registry.REQUIRED_OPTION:
            return "required"
        return "unset" if default is None else str(default)

    for name in registry.names():
        title = typer.style(name, bold=True)
        synonyms = ", ".join(registry.synonyms_of(name))
        typer.echo(f"{title}{synonyms and f' (or {synonyms})'}: {registry.summary_of(name)}")
        for key, default in registry.options_of(name).items():
            typer.echo(f"    {key}: {shown(default)}")
