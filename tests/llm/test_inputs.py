"""What may be passed as a prompt, and what is said of the rest."""

from __future__ import annotations

import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import ConfigError, ContextLengthError, DraftaheadError, PromptError
from draftahead.inputs import as_conversations, as_prompts

FOUR = SamplingParams(temperature=0, max_tokens=4)
IDS = [5, 7, 9]
USER = {"role": "user", "content": "w5 w7"}
# Each means the three tokens of IDS.
ONE_PROMPT: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "deque": deque(IDS),
    "range": range(5, 10, 2),
    "array": array.array("q", IDS),
    "numpy": np.array(IDS, np.int32),
    "numpy numbers": [np.int64(i) for i in IDS],
    "torch": torch.tensor(IDS),
    "text": "w5 w7 w9",
    "numpy text": np.str_("w5 w7 w9"),
    "vLLM's ids": {"prompt_token_ids": IDS},
    "vLLM's ids and text": {"prompt_token_ids": np.array(IDS), "prompt": "whatever"},
    "vLLM's text": {"prompt": "w5 w7 w9", "multi_modal_data": None},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(zoo.tiny("llama"), "none", tokenizer=zoo.tokenizer(), max_context=64)


@pytest.mark.parametrize("name", ONE_PROMPT)
def test_one_prompt_in_every_form(llm: LLM, name: str) -> None:
    (out,) = llm.generate(ONE_PROMPT[name], FOUR)
    assert out.prompt_token_ids == IDS
    assert all(type(i) is int for i in out.prompt_token_ids)


def test_several_prompts_in_every_form(llm: LLM) -> None:
    outs = llm.generate(list(ONE_PROMPT.values()), FOUR)
    assert [out.prompt_token_ids for out in outs] == [IDS] * len(ONE_PROMPT)
    for several in (np.array([IDS, IDS]), torch.tensor([IDS, IDS]), [torch.tensor(IDS)] * 2):
        outs = llm.generate(several, FOUR)  # type: ignore[arg-type]
        assert [out.prompt_token_ids for out in outs] == [IDS, IDS]
    words = llm.generate(np.array(["w5", "w7"]), FOUR)  # type: ignore[arg-type]
    assert [out.prompt_token_ids for out in words] == [[5], [7]]
    assert llm.generate([]) == []


CONVERSATIONS: list[Any] = [
    [USER],
    USER,
    [{"role": "user", "content": [{"type": "text", "text": "w5 w7"}]}],
    [{"role": "user", "content": [{"type": "text", "text": t} for t in ("w5", "w7")]}],
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations_go_through_the_template(llm: LLM, conversation: Any) -> None:
    """Which adds w1 to each message."""
    assert llm.generate(conversation, FOUR)[0].prompt_token_ids == [5, 7, 1]
    messages = [conversation] if isinstance(conversation, dict) else conversation
    two = llm.generate([messages, "w5"], FOUR)
    assert [out.prompt_token_ids for out in two] == [[5, 7, 1], [5]]


def test_the_prompt_of_a_completion_is_its_text(llm: LLM) -> None:
    given = ["w5 w7", {"prompt": "w5"}, {"prompt_token_ids": [5], "prompt": "five"}, [5], [USER]]
    outs = llm.generate(given, FOUR)
    assert [out.prompt for out in outs] == ["w5 w7", "w5", "five", None, "w5 w7 w1 "]


WHOLE, FORMS = "token ids are whole numbers, and", "a prompt is text, a list of token ids, a list"
BAD: dict[str, tuple[Any, str]] = {
    "bytes": (b"hello", r"b'hello' of type bytes is no prompt.*: " + FORMS),
    "bytearray": (bytearray(b"hello"), "of type bytearray is no prompt"),
    "memoryview": (memoryview(b"hello"), "of type memoryview is no prompt"),
    "bytes in a list": ([b"hello"], "of type bytes is no prompt"),
    "float": ([3.5], f"{WHOLE} 3.5 is none"),
    "whole float": ([3.0], f"{WHOLE} 3.0 is none"),
    "bool": ([True, 1], f"{WHOLE} True is none"),
    "numpy bools": (np.array([True]), f"{WHOLE} True is none"),
    "torch floats": (torch.tensor([1.0]), f"{WHOLE} 1.0 is none"),
    "text among ids": ([1, "a"], f"{WHOLE} 'a' is none"),
    "ids among texts": (["a", 1], "1 of type int is no prompt"),
    "nested": ([[[1]]], rf"{WHOLE} \[1\] is none"),
    "words": ([["a", "b"]], f"{WHOLE} 'a' is none"),
    "a number": (5, "5 of type int is no prompt"),
    "a scalar": (torch.tensor(5), "is no prompt"),
    "a number of 5,000 digits": ([10**5000], "token this int is outside the vocabulary"),
    "none": (None, "None of type NoneType is no prompt"),
    "none in a list": ([None], "None of type NoneType is no prompt"),
    "set": ({1, 2}, "is no prompt and no list of prompts"),
    "generator": ((i for i in IDS), "of type generator is no prompt"),
    "object": (object(), "of type object is no prompt"),
    "no values": (torch.empty(3, dtype=torch.long, device="meta"), "NotImplementedError"),
    "images": (
        {"prompt": "w5", "multi_modal_data": {}},
        "cannot have 'multi_modal_data': " + FORMS,
    ),
    "transformers' dict": ({"input_ids": IDS}, r"cannot have 'input_ids' \(.*give the ids alone"),
    "empty dict": ({}, "cannot have '{}'"),
    "ids as text": ({"prompt": IDS}, "give token ids as 'prompt_token_ids'"),
    "text as ids": ({"prompt_token_ids": "w5"}, "'prompt_token_ids' must be a list of token ids"),
    "bytes as ids": ({"prompt_token_ids": b"w5"}, "'prompt_token_ids' must be a list of token ids"),
    "half a character": ("w5\ud83d", r"the prompt has half a character at 2 \('.ud83d'\)"),
    "half a message": ([{"role": "user", "content": "\ud83d"}], "message has half a character"),
    "empty text": ("", "the prompt is empty"),
    "no role": ([{"content": "w5"}], "a message is {'role': name, 'content': text}, not"),
    "a number as role": ([{"role": 1, "content": "w5"}], "a message is"),
    "text as message": ([USER, "w5"], "a message is .*, not 'w5'"),
    "no content": ([{"role": "user"}], "content cannot be None"),
    "a number as content": ([{"role": "user", "content": 5}], "content cannot be 5"),
    "bytes as content": ([{"role": "user", "content": b"w5"}], "content cannot be b'w5'"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "'image_url' is not supported",
    ),
    "text as part": ([{"role": "user", "content": ["w5"]}], "'w5' is not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_prompt(llm: LLM, name: str) -> None:
    prompt, message = BAD[name]
    with pytest.raises(PromptError, match=message) as caught:
        llm.generate(prompt, FOUR)
    assert "\n" not in str(caught.value)


class Lying:
    """An object that raises when it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no")


def test_objects_that_raise_are_no_prompts(llm: LLM) -> None:
    with pytest.raises(DraftaheadError, match="RuntimeError: no"):
        llm.generate(Lying())  # type: ignore[arg-type]


def test_a_template_that_refuses_a_conversation_says_why(llm: LLM) -> None:
    tokenizer = zoo.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must\nalternate') }}"
    strict = LLM(llm.model, "none", tokenizer=tokenizer, max_context=64)
    with pytest.raises(PromptError, match=r"TemplateError: roles must alternate$"):
        strict.generate(USER)


@pytest.mark.parametrize("ids", [range(10**12), {"prompt_token_ids": range(10**12)}])
def test_a_prompt_of_any_length_is_refused_at_once(llm: LLM, ids: Any) -> None:
    with pytest.raises(ContextLengthError, match="1000000000000 tokens"):
        llm.generate(ids)


def test_sizes_that_no_machine_has_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="ask for at most 61"):
        llm.generate(IDS, SamplingParams(max_tokens=10**12))
    for name in ("logit_bias", "stop_token_ids"):
        given = {10**5000: 1.0} if name == "logit_bias" else [10**5000]
        with pytest.raises(ConfigError, match=f"{name}: token this int is outside"):
            llm.generate(IDS, {name: given})
    with pytest.raises(ContextLengthError, match="max_tokens=this int exceed"):
        llm.generate(IDS, max_tokens=10**5000)
    with pytest.raises(ConfigError, match="logprobs=98 is more than the vocabulary of 97"):
        llm.generate(IDS, SamplingParams(logprobs=98))


def test_one_conversation_and_a_list_of_them() -> None:
    one = [{"role": "user", "content": "w5"}]
    for given in ("w5", one, one[0], tuple(one)):
        assert as_conversations(given) == ([one], True)
    for several in (["w5"], [one], [tuple(one)]):
        assert as_conversations(several) == ([one], False)
    assert as_conversations(["w5", one]) == ([one, one], False)
    for bad in ([], [[]], [1], 5, b"w5", {"prompt": "w5"}, [{"prompt": "w5"}], [5, "w5"]):
        with pytest.raises(PromptError):
            as_conversations(bad)


def test_prompts_are_split_by_their_first_item() -> None:
    assert as_prompts([{"prompt": "a"}, "b"]) == [{"prompt": "a"}, "b"]
    assert as_prompts([[1], "b"]) == [[1], "b"]
    assert as_prompts([1, 2]) == [[1, 2]]
