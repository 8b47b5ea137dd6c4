"""The embedded model is the published one: tokenizer, template, weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftahead.loader import hub
from draftahead.loader.embedded import ALIASES
from draftahead.loader.gguf import smollm_tokenizer

pytestmark = pytest.mark.model


GREETING = [{"role": "user", "content": "Hi"}]


GREETING_TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


def test_the_tokenizer_is_the_published_one(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]
    assert tokenizer.tokenize("in 123.4") == ["in", "Ġ", "1", "2", "3", ".", "4"]
    text = "Don't panic: 3 naïve cafés, 漢字, 🙂\n\n    x = 10\t# ok  "
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 1, 2]
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert ids == (1, 2, 2)
    assert tokenizer.unk_token_id == 0
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer) == 49152


def test_the_chat_template_is_kept(smollm2: tuple[Any, Any]) -> None:
    _, tokenizer = smollm2
    text = tokenizer.apply_chat_template(GREETING, add_generation_prompt=True, tokenize=False)
    assert text == GREETING_TEXT
    ids = tokenizer(text).input_ids
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("user\nHi\nassistant\n")


def test_it_answers_and_ends_with_its_end_token(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.do_sample is False
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=24)[0, prompt.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2


def test_the_weights_equal_those_of_the_gguf_file(smollm2: tuple[Any, Any]) -> None:
    model, _ = smollm2
    original, tokenizer = hub.load(ALIASES["smollm2"].gguf, device="cpu")
    assert tokenizer.eos_token_id == 2
    assert not hasattr(original.config, "quantization_config")
    weights, expected = model.state_dict(), original.state_dict()
    assert weights.keys() == expected.keys()
    assert model.dtype == torch.float32
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_conversion_builds_this_tokenizer(smollm2: tuple[Any, Any]) -> None:
    converted = smollm_tokenizer(ALIASES["smollm2"].gguf)
    assert converted.get_vocab() == smollm2[1].get_vocab()
    assert converted("in 123.4\n\n1").input_ids == smollm2[1]("in 123.4\n\n1").input_ids
    assert converted.chat_template == smollm2[1].chat_template
