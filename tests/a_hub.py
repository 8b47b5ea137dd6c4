"""A folder in the place of a repository on the hub."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftahead.loader import sources


def put_on_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, only_cached: bool = False
) -> list[list[str]]:
    """`org/name` is this folder: files are fetched into `cache`. Gives the files of each fetch."""
    fetched: list[list[str]] = []

    def fetch(
        source: str,
        *,
        revision: Any,
        allow_patterns: Any,
        ignore_patterns: Any,
        local_files_only: bool,
    ) -> str:
        assert (source, revision, local_files_only) == ("org/name", "v2", only_cached)
        cache.mkdir(exist_ok=True)
        names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        wanted = [n for n in names if any(fnmatch.fnmatch(n, p) for p in allow_patterns)]
        wanted = [n for n in wanted if not any(fnmatch.fnmatch(n, p) for p in ignore_patterns)]
        for name in wanted:
            (cache / name).parent.mkdir(exist_ok=True)
            shutil.copy(folder / name, cache / name)
        fetched.append(sorted(wanted))
        return str(cache)

    monkeypatch.setattr(sources, "snapshot_download", fetch)
    return fetched
