from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftahead.loader.embedded import Alias
from fake_model import alias_of, write_wheel


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTAHEAD_CACHE", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "tiny_model-1.0-py3-none-any.whl")


@pytest.fixture
def alias(wheel: Path) -> Alias:
    return alias_of(wheel)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand weights with its tokenizer, stored as bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w2").save_pretrained(folder)
    return folder
