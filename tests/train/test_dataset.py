"""Training data: generation resumes, shards give the same files, mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.bench.prompts import load_prompts
from draftahead.errors import ConfigError, PromptError
from draftahead.train import dataset
from draftahead.train.dataset import SETTINGS, encode_prompts, generate_data, read_data

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=6)


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.tiny("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(model: Any) -> LLM:
    return LLM(model, "none", tokenizer=zoo.tokenizer(), max_batch=2, max_context=64)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "BATCHES_PER_FILE", 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_interrupted_generation_resumes(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = zoo.ragged_prompts(18)
    whole = generate_data(llm, prompts, tmp_path / "whole", params=PARAMS)
    assert len(whole) == 18
    asked = sorted(tuple(whole.text(i)[: int(whole.prompt_lengths[i])].tolist()) for i in range(18))
    assert asked == sorted(map(tuple, prompts))
    for index in range(18):
        text, at = whole.text(index).tolist(), int(whole.prompt_lengths[index])
        assert text[at:] == llm.generate(text[:at], PARAMS)[0].token_ids
    calls = 0
    real = llm.generate

    def failing(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # of the third file
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(llm, "generate", failing)
    part = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        generate_data(llm, prompts, part, params=PARAMS)
    assert sorted(contents(part)) == [
        "answers-00000.safetensors",
        "answers-00001.safetensors",
        SETTINGS,
    ]
    calls, lines = 100, list[str]()
    found = generate_data(llm, prompts, part, params=PARAMS, report=lines.append)
    assert calls == 100 + 3  # finished files are not generated again
    assert [line.partition(",")[0] for line in lines] == [f"{i} of 5 files" for i in range(1, 6)]
    assert contents(part) == contents(tmp_path / "whole")
    assert torch.equal(found.tokens, whole.tokens)


def test_shards_write_the_files_of_one_process(llm: LLM, tmp_path: Path) -> None:
    prompts = zoo.ragged_prompts(18)
    generate_data(llm, prompts, tmp_path / "one", params=PARAMS)
    for number in (2, 1, 3):
        generate_data(llm, prompts, tmp_path / "three", params=PARAMS, shard=(number, 3))
    assert contents(tmp_path / "three") == contents(tmp_path / "one")


def test_generation_resumes_with_another_batch_size(llm: LLM, model: Any, tmp_path: Path) -> None:
    """For example after one that was too large for the memory."""
    prompts = zoo.ragged_prompts(18)
    generate_data(llm, prompts, tmp_path / "one", params=PARAMS)
    generate_data(llm, prompts, tmp_path / "two", params=PARAMS, shard=(1, 3))
    small = LLM(model, "none", tokenizer=zoo.tokenizer(), max_batch=1, max_context=64)
    found = generate_data(small, prompts, tmp_path / "two", params=PARAMS)
    assert len(found) == 18
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_data_of_other_settings_is_refused(llm: LLM, tmp_path: Path) -> None:
    prompts = zoo.ragged_prompts(6)
    generate_data(llm, prompts, tmp_path, params=PARAMS)
    other = LLM(zoo.tiny("llama", dtype=torch.float32, seed=1), "none", max_batch=2, max_context=64)
    for which, requests, params in (
        (llm, prompts[:5], PARAMS),
        (llm, prompts, SamplingParams(temperature=0.7, seed=5, max_tokens=6)),
        (llm, prompts, SamplingParams(temperature=0.8, seed=5, max_tokens=7)),
        (other, prompts, PARAMS),
    ):
        with pytest.raises(ConfigError, match="name another folder, or delete that one"):
            generate_data(which, requests, tmp_path, params=params)
    assert len(generate_data(llm, prompts, tmp_path, params=PARAMS)) == 6
    (tmp_path / SETTINGS).write_text("{")
    with pytest.raises(ConfigError, match="name another folder, or delete that one"):
        generate_data(llm, prompts, tmp_path, params=PARAMS)


def test_long_prompts_are_left_out(llm: LLM, tmp_path: Path) -> None:
    prompts = zoo.ragged_prompts(8)
    found = generate_data(llm, prompts, tmp_path / "a", params=PARAMS, max_length=9)
    assert len(found) == sum(len(prompt) <= 9 for prompt in prompts)
    with pytest.raises(ConfigError, match="no prompt has at most 2 tokens"):
        generate_data(llm, prompts, tmp_path / "b", params=PARAMS, max_length=2)
    with pytest.raises(ConfigError, match="no room for prompts in a context of 64"):
        generate_data(llm, prompts, tmp_path / "c", params=SamplingParams(max_tokens=64))


def test_damaged_files_are_named(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no training data: `draftahead train data`"):
        read_data(tmp_path)
    generate_data(llm, zoo.ragged_prompts(6), tmp_path, params=PARAMS)
    file = tmp_path / "answers-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"answers-00001.safetensors is damaged"):
        read_data(tmp_path)


def test_prompts_are_read_in_every_form(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "w3 w4"}\n\n{"turns": ["w5", "w6"]}\n'
        '{"messages": [{"role": "user", "content": "w7"}]}\n{"text": "w8\u2028w9 w10"}\n',
        "utf-8",
    )
    prompts, whole = encode_prompts(load_prompts(file), llm)
    assert prompts == [[3, 4, 1], [5, 1], [7, 1]]  # through the template
    assert whole is not None
    assert (whole.text(0).tolist(), whole.prompt_lengths.tolist()) == ([8, 9, 10], [1])


def test_a_prompt_that_cannot_be_encoded_is_named(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1"}\n{"id": "second", "messages": [{"role": "user"}]}')
    with pytest.raises(PromptError, match="prompt second: "):
        encode_prompts(load_prompts(file), llm)
