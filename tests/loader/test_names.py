"""Names, folders and files that cannot be loaded: the error says why and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest

from draftahead.errors import DraftaheadError, ModelNotFoundError
from draftahead.loader import hub, sources


def test_an_unknown_name_suggests_the_nearest_alias_and_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        hub.load("smolm2")
    assert "did you mean 'smollm2'?" in str(caught.value)
    assert str(tmp_path / "smolm2") in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["", "./org/name", "../name", "a/b/c", "/nowhere/at/all", "~absent-at-all/x", "x" * 5000, " "],
)
def test_impossible_names_are_refused_without_the_network(
    name: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder)  # the empty name must not mean the folder we are in
    forbid_hub(monkeypatch)
    with pytest.raises(ModelNotFoundError):
        hub.load(name)


def forbid_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("went on to the hub")

    monkeypatch.setattr(sources, "snapshot_download", fail)


def test_a_path_is_never_a_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_hub(monkeypatch)
    with pytest.raises(ModelNotFoundError):
        hub.load(Path("absent-here/nothing"))


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="the hub cannot be reached") as caught:
        hub.load("absent-here/nothing")
    assert "\n" not in str(caught.value)
    assert "smollm2" in str(caught.value)


def hub_error(kind: str) -> OSError:
    """What transformers raises when the hub answers with this error."""
    error_class = getattr(huggingface_hub.errors, kind)
    cause = error_class.__new__(error_class)
    failure = OSError(f"{kind}\nand many lines more")
    failure.__cause__ = cause
    return failure


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (lambda: hub_error("RepositoryNotFoundError"), "not on the hub .*known: smollm2"),
        (lambda: hub_error("GatedRepoError"), "is gated: .*hf auth login"),
        (lambda: hub_error("LocalEntryNotFoundError"), "hub cannot be reached"),
        (lambda: OSError("disc on fire\nand more"), "cannot load org/name: disc on fire$"),
    ],
)
def test_each_error_of_the_hub_is_explained(
    monkeypatch: pytest.MonkeyPatch, failure: Any, message: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise failure()

    monkeypatch.setattr(sources, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        hub.load("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no config.json"),
        (["config.json"], "has no weights"),
        (["model.gguf"], "give the path of one of them"),
        (["model.safetensors"], "has no config.json"),
    ],
)
def test_folders_without_a_model_are_explained(
    tmp_path: Path, files: list[str], message: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=message):
        hub.load(tmp_path)


def test_damaged_files_are_explained(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="damaged"):
        hub.load(folder)
    (tmp_path / "broken.gguf").write_bytes(b"not a GGUF file at all")
    with pytest.raises(DraftaheadError, match=r"broken\.gguf is damaged or no GGUF file"):
        hub.load(tmp_path / "broken.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match=r"only \.gguf files"):
        hub.load(tmp_path / "notes.txt")
