"""Draws docs/demo.svg: the terminal at the end of a real run of the demo."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from draftahead.cli import demo, options


class NoUpdates:
    """In place of rich's Live, whose every frame would be recorded."""

    def update(self, picture: Any) -> None:
        pass


if __name__ == "__main__":
    console = Console(record=True, width=112, force_terminal=True, file=sys.stderr)
    with (
        mock.patch.object(options, "output_console", lambda: console),
        mock.patch.object(demo, "Live", lambda **_: contextlib.nullcontext(NoUpdates())),
        mock.patch.object(demo, "KINDS", ("code_edit", "summary", "chat")),
    ):
        demo.demo(max_tokens=96)
    target = Path(__file__).parent.parent / "docs" / "demo.svg"
    target.write_text(console.export_svg(title="draftahead demo"), "utf-8")
