"""Progress of long operations on a terminal and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from draftahead.loader.progress import terminal_progress


def test_finished_steps_keep_their_line_on_a_terminal() -> None:
    drawn = io.StringIO()
    with terminal_progress(Console(file=drawn, force_terminal=True, width=80)) as progress:
        progress("downloading", 0.5)
        progress("half [brackets] done", 1.0)
        progress("converting")
    last_screen = drawn.getvalue()
    assert "half [brackets] done\n" in last_screen
    assert "converting" in last_screen


def test_nothing_is_drawn_without_a_terminal() -> None:
    drawn = io.StringIO()
    with terminal_progress(Console(file=drawn, force_terminal=False)) as progress:
        progress("downloading", 0.5)
        progress("downloaded", 1.0)
    assert drawn.getvalue() == ""
