"""Progress of long operations: drawn on a terminal, silent elsewhere."""

from __future__ import annotations

import functools
import logging as stdlib_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class ProgressCallback(Protocol):
    """Receives a message and the fraction done; a fraction of 1 means that the step is finished."""

    def __call__(self, message: str, fraction: float | None = None) -> None: ...


def no_progress(message: str, fraction: float | None = None) -> None:
    """Shows nothing."""


@contextmanager
def terminal_progress(console: Console | None = None) -> Iterator[ProgressCallback]:
    """Draws on stderr if it is a terminal: the current step in place, a line per finished step."""
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    console = console or RichConsole(stderr=True)
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
def quiet_transformers() -> Iterator[None]:
    """Turns off the progress bars and warnings of transformers and huggingface_hub."""
    import transformers.modeling_gguf_pytorch_utils as gguf_loader
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    levels = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    gguf_bar = getattr(gguf_loader, "tqdm", None)
    logging.set_verbosity_error()
    hub_logging.set_verbosity(stdlib_logging.ERROR)
    with warnings.catch_warnings():
        # It warns where HF_HUB_DISABLE_PROGRESS_BARS=0 keeps the bars on.
        warnings.simplefilter("ignore")
        logging.disable_progress_bar()
    if gguf_bar is not None:  # this bar ignores the setting above
        gguf_loader.tqdm = functools.partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub_logging.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()
        if gguf_bar is not None:
            gguf_loader.tqdm = gguf_bar
