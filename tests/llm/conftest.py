"""A tiny model, its greedy outputs, and LLMs with and without drafting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import zoo
from draftahead import LLM, Completion, SamplingParams
from drafted import KnowsOutput

LENGTH = 40
PROMPTS = zoo.ragged_prompts(3)


@pytest.fixture(scope="package")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="package")
def outputs(target: Any) -> list[list[int]]:
    """Of each of `zoo.ragged_prompts(3)`, 40 tokens."""
    return [zoo.reference(target, prompt, LENGTH) for prompt in PROMPTS]


@pytest.fixture(scope="package")
def knows_output(outputs: list[list[int]]) -> Callable[[], KnowsOutput]:
    """A drafter of which about four guesses are accepted in a step."""
    answers = {tuple(p): output for p, output in zip(PROMPTS, outputs, strict=True)}
    return lambda: KnowsOutput(answers)


def tokenizer_of(words: dict[str, int]) -> Any:
    """Tokens read as these words, without anything between them."""
    raw = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.fixture(scope="package")
def tokenizer() -> Any:
    """Token i reads "<i>": stop strings can begin and end inside tokens."""
    return tokenizer_of({f"<{i}>": i for i in range(zoo.VOCABULARY)})


@pytest.fixture(scope="package")
def drafted(target: Any, tokenizer: Any, knows_output: Callable[[], KnowsOutput]) -> LLM:
    return LLM(target, drafter=knows_output(), tokenizer=tokenizer, max_batch=3)


@pytest.fixture(scope="package")
def plain(target: Any, tokenizer: Any) -> LLM:
    return LLM(target, drafter="none", tokenizer=tokenizer, max_batch=3)


@pytest.fixture
def both(drafted: LLM, plain: LLM) -> Callable[..., Completion]:
    """Continues the second prompt with and without drafting, greedily unless told otherwise; the
    outputs must be the same."""

    def generate(**params: Any) -> Completion:
        asked = SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **params})
        one = drafted.generate(PROMPTS[1], asked)[0]
        other = plain.generate(PROMPTS[1], asked)[0]
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        return one

    return generate


@pytest.fixture(scope="package", params=["none", "drafted"])
def one_character_tokens(request: Any, target: Any, knows_output: Callable[[], KnowsOutput]) -> LLM:
    """Token i reads as one character: chr(48 + i)."""
    drafter: Any = "none" if request.param == "none" else knows_output()
    tokenizer = tokenizer_of({chr(48 + i): i for i in range(zoo.VOCABULARY)})
    return LLM(target, drafter, tokenizer=tokenizer, max_batch=2)
