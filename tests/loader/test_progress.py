"""Progress of long operations on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from draftahead.loader import progress as progress_module
from draftahead.loader.progress import progress_bar, terminal_progress


def test_finished_steps_keep_their_line_on_a_terminal() -> None:
    drawn = io.StringIO()
    with terminal_progress(Console(file=drawn, force_terminal=True, width=80)) as progress:
        progress("downloading", 0.5)
        progress("half [brackets] done", 1.0)
        progress("converting")
    last_screen = drawn.getvalue()
    assert "half [brackets] done\n" in last_screen
    assert "converting" in last_screen


def test_a_short_step_says_nothing_without_a_terminal() -> None:
    drawn = io.StringIO()
    with terminal_progress(Console(file=drawn, force_terminal=False)) as progress:
        progress("downloading", 0.5)
        progress("downloaded", 1.0)
    assert drawn.getvalue() == ""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "INTERVAL", 0.01)


@pytest.fixture
def quiet() -> Iterator[None]:
    logger = logging.getLogger("draftahead")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def wait_for(text: str, drawn: io.StringIO) -> None:
    deadline = time.monotonic() + 10
    while text not in drawn.getvalue():
        assert time.monotonic() < deadline, drawn.getvalue()
        time.sleep(0.01)


@pytest.mark.usefixtures("impatient")
def test_a_long_step_says_every_so_often_that_it_goes_on() -> None:
    drawn = io.StringIO()
    with terminal_progress(Console(file=drawn, force_terminal=False, width=20)) as progress:
        progress("loading a model with [brackets]")
        wait_for("loading a model with [brackets] (0 s)\n", drawn)
    written = drawn.getvalue()
    time.sleep(0.05)
    assert drawn.getvalue() == written  # it ends with the step


@pytest.mark.usefixtures("impatient")
def test_work_of_known_size_counts_in_these_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr("sys.stderr", drawn)
    with progress_bar("latency", 5) as step:
        wait_for("latency: 0 of 5", drawn)
        step()
        step()
        wait_for("latency: 2 of 5", drawn)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.usefixtures("impatient", "quiet")
def test_a_quiet_run_shows_no_progress(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr("sys.stderr", drawn)
    with terminal_progress(Console(file=drawn, force_terminal=terminal)) as progress:
        progress("loading", 1.0)
        time.sleep(0.05)
    with progress_bar("latency", 5) as step:
        step()
        time.sleep(0.05)
    assert drawn.getvalue() == ""
