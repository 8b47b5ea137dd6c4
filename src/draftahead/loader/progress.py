"""How long steps tell where they are: on a terminal, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Report(Protocol):
    """Takes what is going on; a fraction of 1 says that this step is finished."""

    def __call__(self, message: str, fraction: float | None = None) -> None: ...


def silent(message: str, fraction: float | None = None) -> None:
    """The report that shows nothing."""


@contextmanager
def terminal_report(console: Console | None = None) -> Iterator[Report]:
    """A report drawn on stderr, or nothing at all where stderr is no terminal.

    The step under way is drawn in place; a finished one (fraction 1) leaves its line.
    """
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    console = console or RichConsole(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)

        def show(message: str, fraction: float | None = None) -> None:
            if fraction is not None and fraction >= 1:
                progress.update(task, visible=False)
                console.print(message, markup=False, highlight=False)
                return
            total = None if fraction is None else 1.0
            progress.update(
                task, description=message, total=total, completed=fraction or 0.0, visible=True
            )

        yield show
