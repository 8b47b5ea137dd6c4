"""Progress of long operations: drawn on a terminal, silent elsewhere."""

from __future__ import annotations

import functools
import logging as stdlib_logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class ProgressCallback(Protocol):
    """Receives a message and the fraction done; a fraction of 1 means that the step is finished."""

    def __call__(self, message: str, fraction: float | None = None) -> None: ...


def no_progress(message: str, fraction: float | None = None) -> None:
    """Shows nothing."""


@contextmanager
def terminal_progress(console: Console | None = None) -> Iterator[ProgressCallback]:
    """Draws on stderr if it is a terminal: the current step in place, a line per finished step."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield no_progress
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


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """The same for work of known size: yields a function that advances the bar by one."""
    console = Console(stderr=True)
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off the progress bars and warnings of transformers and huggingface_hub."""
    import transformers.modeling_gguf_pytorch_utils as gguf_loader
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    with ExitStack() as restored:
        for library in (logging, hub_logging):
            restored.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity(stdlib_logging.ERROR)
        if logging.is_progress_bar_enabled():
            restored.callback(logging.enable_progress_bar)
        with warnings.catch_warnings():
            # It warns where HF_HUB_DISABLE_PROGRESS_BARS=0 keeps the bars on.
            warnings.simplefilter("ignore")
            logging.disable_progress_bar()
        if bar := getattr(gguf_loader, "tqdm", None):  # this bar ignores the setting above
            restored.callback(setattr, gguf_loader, "tqdm", bar)
            gguf_loader.tqdm = functools.partial(bar, disable=True)
        yield
