"""Draws docs/demo.svg: a real run of the demo, as its terminal shows it at the end."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from draftahead.cli import demo, options


class Still:
    """In place of the live picture, whose every frame would be recorded."""

    def update(self, picture: Any) -> None:
        pass


if __name__ == "__main__":
    console = Console(record=True, width=112, force_terminal=True, file=sys.stderr)
    with (
        mock.patch.object(options, "output_console", lambda: console),
        mock.patch.object(demo, "Live", lambda **_: contextlib.nullcontext(Still())),
        mock.patch.object(demo, "KINDS", ("code_edit", "summary", "chat")),
    ):
        demo.demo(max_tokens=96)
    target = Path(__file__).parent.parent / "docs" / "demo.svg"
    target.write_text(console.export_svg(title="draftahead demo"), "utf-8")
