"""Greedy output is transformers' own, token by token, for every architecture we name."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

import zoo
from draftahead import LLM, SamplingParams
from draftahead.models import runner
from draftahead.models.support import TESTED

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
LOOKUP = {"method": "lookup", "prompt_lookup_min": 1}


def expected(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    if model.config.model_type == "phi3" and Version(transformers.__version__) < Version("5.22"):
        return zoo.greedy_by_prefixes(model, prompt, NEW_TOKENS)
    return zoo.reference(model, prompt, NEW_TOKENS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_greedy_output_equals_generate(name: str, dtype: torch.dtype) -> None:
    model = zoo.tiny(name, dtype=dtype)
    prompts = zoo.ragged_prompts(4)
    answers = [expected(model, prompt) for prompt in prompts]
    implementation = model.config._attn_implementation
    llm = LLM(model, drafter=LOOKUP, max_batch=4)
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts[:2]]
    together = [c.token_ids for c in llm.generate(prompts, GREEDY)]
    assert alone == answers[:2]
    assert together == answers
    # The user's model is as it was: same attention, same output by its own generate.
    assert model.config._attn_implementation == implementation
    assert expected(model, prompts[0]) == answers[0]


def test_every_architecture_called_tested_is_tested() -> None:
    assert {zoo.tiny(name).config.model_type for name in zoo.ARCHITECTURES} == TESTED


def test_a_long_prompt_is_prefilled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.tiny("gemma3")
    prompt = zoo.ragged_prompts(4)[3] * 3
    answer = zoo.reference(model, prompt, NEW_TOKENS)
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 7)
    assert LLM(model).generate(prompt, GREEDY)[0].token_ids == answer


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_the_context_can_be_filled_to_its_last_position(name: str) -> None:
    """Learned positions end there; drafted nodes and padding must not pass it."""
    model = zoo.tiny(name)
    prompt = zoo.ragged_prompts(1)[0]
    count = model.config.max_position_embeddings - len(prompt)
    llm = LLM(model, drafter=LOOKUP, max_batch=2)
    out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=count))[0]
    assert out.token_ids == zoo.reference(model, prompt, count)
