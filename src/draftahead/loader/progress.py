"""Progress of long operations: drawn on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import functools
import itertools
import logging as stdlib_logging
import threading
import time
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

INTERVAL = 10.0  # seconds between lines where nothing can be drawn


def is_quiet() -> bool:
    """Whether warnings of draftahead are switched off, and progress with them."""
    return not stdlib_logging.getLogger("draftahead").isEnabledFor(stdlib_logging.WARNING)


class ProgressCallback(Protocol):
    """Receives a message and the fraction done; a fraction of 1 means that the step is finished."""

    def __call__(self, message: str, fraction: float | None = None) -> None: ...


def no_progress(message: str, fraction: float | None = None) -> None:
    """Shows nothing."""


@contextmanager
def terminal_progress(
    console: Console | None = None, *, shown: bool = True
) -> Iterator[ProgressCallback]:
    """Draws on stderr if it is a terminal: the current step in place, a line per finished step."""
    console = console or Console(stderr=True)
    if is_quiet() or not shown:
        yield no_progress
        return
    if not console.is_terminal:
        with _lines(console) as write:
            yield write
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
def progress_bar(title: str, total: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """The same for work of known size: yields a function that advances the bar by one."""
    if not shown:
        yield lambda: None
        return
    console = Console(stderr=True)
    if is_quiet() or not console.is_terminal:
        done = itertools.count()
        with terminal_progress(console) as write:

            def step() -> None:
                write(f"{title}: {next(done)} of {total}")

            step()
            yield step
        return
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _lines(console: Console) -> Iterator[ProgressCallback]:
    """Writes the latest message every INTERVAL seconds: from a thread, because what takes longest
    is often one call."""
    latest, start, ended = "", time.monotonic(), threading.Event()

    def note(message: str, fraction: float | None = None) -> None:
        nonlocal latest
        latest = message

    def write() -> None:
        while not ended.wait(INTERVAL):
            line = f"{latest} ({time.monotonic() - start:.0f} s)"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()


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
