"""`draftahead models`: what is known by a short name, and where it lies."""

from __future__ import annotations

from rich.table import Table

from draftahead.cli.options import output_console
from draftahead.loader import hub


def models() -> None:
    """List the aliases, where they are cached, and their sizes."""
    table = Table("alias", "model", "cached in", "size")
    for entry in hub.catalogue():
        where = str(entry.path) if entry.path else "not fetched yet"
        size = f"{entry.size / 1e6:.0f} MB" if entry.size else "-"
        table.add_row(entry.alias, entry.title, where, size)
    console = output_console()
    console.print(table)
    console.print(
        "Any other model: a hub id (org/name), a folder, or a .gguf file.", highlight=False
    )
