"""The cache of tokenizers of GGUF files: the same tokenizer as without it, made again where it
differs or is damaged."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers

import tiny_gguf
from draftahead.loader import embedded, gguf_tokenizer, hub
from draftahead.loader.embedded import ALIASES

TEXTS = ("abc a", "Hello\n\n 123 — ½", "</s><s>abc", "", " ", "x5x7ab")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "tiny.gguf")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each tokenizer that transformers makes of a file."""
    found: list[str] = []
    made = gguf_tokenizer._made

    def counted(path: Path, config: Any, kind: Any) -> Any:
        found.append(path.name)
        return made(path, config, kind)

    monkeypatch.setattr(gguf_tokenizer, "_made", counted)
    return found


def load(path: Path) -> Any:
    tokenizer = hub.load_tokenizer(path)
    for thread in threading.enumerate():
        if thread.name == gguf_tokenizer.THREAD:
            thread.join()
    return tokenizer


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert one.get_vocab() == other.get_vocab()
    assert one.special_tokens_map == other.special_tokens_map
    assert one.chat_template == other.chat_template
    assert one.name_or_path == other.name_or_path
    assert len(one) == len(other) and one.all_special_ids == other.all_special_ids
    for text in TEXTS:
        for special in (True, False):
            ids = one(text, add_special_tokens=special).input_ids
            assert other(text, add_special_tokens=special).input_ids == ids
            assert one.decode(ids) == other.decode(ids)
    messages = [{"role": "user", "content": "abc"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    shown = one.apply_chat_template(messages, **options)
    assert other.apply_chat_template(messages, **options) == shown


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3moe"])
def test_a_tokenizer_from_the_cache_is_the_one_that_transformers_makes(
    architecture: str, tmp_path: Path, cache: Path, conversions: list[str]
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", architecture=architecture)
    made = load(path)
    assert len(list(cache.iterdir())) == 1
    kept = load(path)
    assert conversions == ["m.gguf"]
    assert_same(made, kept)


def test_that_of_smollm2_too(
    monkeypatch: pytest.MonkeyPatch, cache: Path, conversions: list[str]
) -> None:
    monkeypatch.delenv("DRAFTAHEAD_CACHE")
    file = ALIASES["smollm2"].gguf
    embedded.ensure(ALIASES["smollm2"])
    monkeypatch.setattr(gguf_tokenizer, "cache_root", lambda: cache.parent)
    made, kept = load(file), load(file)
    assert conversions == [file.name]
    assert_same(made, kept)


def test_a_model_and_a_tokenizer_alone_share_it(model: Path, conversions: list[str]) -> None:
    load(model)
    assert hub.load(model, device="cpu")[1]("abc").input_ids == [31]
    assert conversions == ["tiny.gguf"]


def test_other_metadata_versions_and_files_beside_it_make_another(
    model: Path, tmp_path: Path, cache: Path, conversions: list[str], monkeypatch: Any
) -> None:
    load(model)
    assert len(conversions) == len(list(cache.iterdir())) == 1
    tiny_gguf.write(model, keys={"some.key": 1})  # the same name and size of data
    load(model)
    assert len(conversions) == len(list(cache.iterdir())) == 2
    monkeypatch.setattr(gguf_tokenizer.transformers, "__version__", "99.0")
    load(model)
    assert len(conversions) == len(list(cache.iterdir())) == 3
    monkeypatch.setattr(gguf_tokenizer, "FORMAT", 99)
    load(model)
    assert len(conversions) == len(list(cache.iterdir())) == 4
    other = tiny_gguf.write(tmp_path / "weights.gguf", "Q8_0", keys={"some.key": 1})
    load(other)  # other weights, the same metadata
    assert len(conversions) == 4
    (tmp_path / "tokenizer_config.json").write_text("{}")
    load(model)  # the file beside it counts, so nothing is kept
    assert len(conversions) == 5 and len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("name", [gguf_tokenizer.VOCABULARY, gguf_tokenizer.SETTINGS])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "another letter", "no object"])
def test_a_damaged_one_is_made_again(
    name: str,
    damage: str,
    model: Path,
    cache: Path,
    conversions: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = load(model)
    (folder,) = cache.iterdir()
    file = folder / name
    text = file.read_text("utf-8")
    if damage == "gone":
        file.unlink()
    else:
        changed = {"empty": "", "cut": text[: len(text) // 2], "no object": "[1]"}
        changed["another letter"] = text.replace("abc", "abd").replace("content", "CONTENT")
        assert changed[damage] != text
        file.write_text(changed[damage], "utf-8")
    with caplog.at_level(logging.WARNING, "draftahead"):
        assert_same(made, load(model))
    assert "is damaged, and is made again" in caplog.text
    assert len(conversions) == 2
    assert_same(made, load(model))
    assert len(conversions) == 2


def test_one_that_would_come_back_otherwise_is_not_kept(
    model: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = gguf_tokenizer._read

    def otherwise(*given: Any) -> Any:
        found = read(*given)
        found.chat_template = "another"
        return found

    monkeypatch.setattr(gguf_tokenizer, "_read", otherwise)
    assert load(model).chat_template == load(model).chat_template == tiny_gguf.TEMPLATE
    assert len(conversions) == 2
    assert not list(cache.iterdir())


def test_arguments_that_are_no_json_are_not_kept(
    model: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gguf_tokenizer._made

    def with_an_object(*given: Any) -> Any:
        found = made(*given)
        found.init_kwargs["a_token"] = transformers.AddedToken("abc")
        return found

    monkeypatch.setattr(gguf_tokenizer, "_made", with_an_object)
    assert load(model)("abc").input_ids
    assert not cache.exists()


def test_changes_of_the_tokenizer_reach_no_other_load(model: Path) -> None:
    tokenizer = hub.load_tokenizer(model)
    tokenizer.chat_template = "changed"
    tokenizer.add_tokens(["new"])
    load(model)
    again = load(model)
    assert again.chat_template == tiny_gguf.TEMPLATE and "new" not in again.get_vocab()


def test_without_a_place_to_keep_it_the_tokenizer_is_made(
    model: Path, cache: Path, conversions: list[str]
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    for _ in range(2):
        assert load(model)("abc").input_ids == [31]
    assert len(conversions) == 2


def test_those_used_least_recently_leave_the_cache(
    tmp_path: Path, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tokenizer, "MAX_KEPT", 2)
    one, two, three = (
        tiny_gguf.write(tmp_path / f"{i}.gguf", keys={"some.key": i}) for i in range(3)
    )
    for path in (one, two, one, three):
        load(path)
    assert len(list(cache.iterdir())) == 2
    assert conversions == ["0.gguf", "1.gguf", "2.gguf"]
    load(one)
    assert len(conversions) == 3
    load(two)
    assert len(conversions) == 4


def test_what_is_kept_holds_no_path_of_this_machine(model: Path, cache: Path) -> None:
    """A file that was moved finds it, and knows its own place."""
    load(model)
    (folder,) = cache.iterdir()
    settings = json.loads((folder / gguf_tokenizer.SETTINGS).read_text("utf-8"))
    assert set(settings) == {"digest", "arguments"}
    (model.parent / "elsewhere").mkdir()
    moved = model.rename(model.parent / "elsewhere" / "other.gguf")
    assert load(moved).name_or_path == str(moved.parent)
