"""Tokenizers by name, and of models that are passed as objects."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import zoo
from a_hub import put_on_hub
from damaged_models import gguf_files
from draftahead import LLM, SamplingParams
from draftahead.errors import ConfigError, ModelNotFoundError
from draftahead.loader import hub

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def alone(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder with a tokenizer and nothing else."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, tmp_path / name)
    return tmp_path


def test_a_tokenizer_is_taken_by_its_path(alone: Path, tiny_folder: Path) -> None:
    for model in (tiny_folder, AutoModelForCausalLM.from_pretrained(tiny_folder).float()):
        for name in (alone, str(alone)):
            llm = LLM(model, "none", tokenizer=name)
            assert llm.tokenizer.name_or_path == str(alone)
            assert llm.encode("w5 w7") == [5, 7]


def test_a_misspelt_tokenizer_is_refused_before_the_model_loads(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(ModelNotFoundError, match=r"no model 'smolm2'.*did you mean 'smollm2'"):
        LLM(tiny_folder, tokenizer="smolm2")


def test_a_folder_without_one_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="has no tokenizer: its files are not there"):
        LLM(tiny_folder, tokenizer=tmp_path)


def test_a_model_that_knows_its_folder_brings_its_tokenizer(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).float()
    llm = LLM(model, "none")
    assert llm.encode("w5 w7") == [5, 7]
    assert llm.generate("w5 w7", GREEDY)[0].text
    own = AutoTokenizer.from_pretrained(tiny_folder)
    assert LLM(model, "none", tokenizer=own).tokenizer is own


def test_a_model_that_was_loaded_here_brings_its_tokenizer(
    tiny_folder: Path, tmp_path: Path
) -> None:
    gguf_files(tmp_path)
    for source, text, ids in ((tiny_folder, "w5", [5]), (tmp_path / "f32.gguf", "abc", [31])):
        model, _ = hub.load(source, device="cpu")
        assert LLM(model, "none").encode(text) == ids


def test_a_model_of_a_hub_brings_the_tokenizer_of_its_commit_from_the_cache(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).float()
    model.name_or_path = model.config.name_or_path = "org/name"
    model.config._commit_hash = "v2"
    put_on_hub(tiny_folder, monkeypatch, tmp_path / "cache", only_cached=True)
    assert LLM(model, "none").encode("w5 w7") == [5, 7]


@pytest.mark.parametrize("name", ["", "org/absent", "/nowhere", "x" * 300])
def test_a_model_without_files_here_takes_token_ids(name: str) -> None:
    model = zoo.tiny("llama").to(torch.float32)
    model.name_or_path = model.config.name_or_path = name
    llm = LLM(model, "none")
    assert llm.tokenizer is None
    assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) > 0
    with pytest.raises(ConfigError, match="takes token ids; pass tokenizer="):
        llm.generate("text", GREEDY)
