"""The command line, run within the test's process."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from draftahead import cli


def run(*arguments: str) -> int:
    """The exit code of `draftahead ARGUMENTS`."""
    argv = mock.patch.object(sys, "argv", ["draftahead", *arguments])
    with argv, pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)
