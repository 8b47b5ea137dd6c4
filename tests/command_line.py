"""The command line, run within the test's process."""

from __future__ import annotations

import logging
import sys
import warnings
from unittest import mock

import pytest

from draftahead import cli


def run(*arguments: str) -> int:
    """The exit code of `draftahead ARGUMENTS`."""
    argv = mock.patch.object(sys, "argv", ["draftahead", *arguments])
    logger, shown = logging.getLogger("draftahead"), warnings.showwarning
    level = logger.level
    try:
        with argv, pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        logger.setLevel(level)
        warnings.showwarning = shown
    return int(end.value.code or 0)
