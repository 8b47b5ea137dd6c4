"""What people type first: parameters by name, a dictionary of them, lists of conversations, and a
stream's completion."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import ConfigError, PromptError

PROMPTS = zoo.ragged_prompts(2)
THREE = SamplingParams(temperature=0, max_tokens=3)
CONVERSATION = [{"role": "user", "content": "w5 w7"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(zoo.tiny("llama"), "lookup", tokenizer=zoo.tokenizer(), max_batch=2, max_context=64)


def test_parameters_by_name_as_a_dictionary_and_as_an_object(llm: LLM) -> None:
    expected = [out.token_ids for out in llm.generate(PROMPTS, THREE)]
    named: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
    for outs in (
        llm.generate(PROMPTS, **named),
        llm.generate(PROMPTS, named),
        llm.generate(PROMPTS, sampling_params=[named, THREE]),
        [llm.generate(prompt, **named)[0] for prompt in PROMPTS],
    ):
        assert [out.token_ids for out in outs] == expected
    for stream in (llm.stream(PROMPTS[0], **named), llm.stream(PROMPTS[0], named)):
        assert [token for chunk in stream for token in chunk.token_ids] == expected[0]
    for answer in (llm.chat(CONVERSATION, **named), llm.chat(CONVERSATION, named)):
        assert answer.token_ids == llm.generate(CONVERSATION, THREE)[0].token_ids


def test_a_name_of_another_library_is_answered_by_every_method(llm: LLM) -> None:
    for call in (llm.generate, llm.stream, llm.chat):
        with pytest.raises(ConfigError, match="'max_new_tokens': write max_tokens"):
            call("w5", max_new_tokens=3)
        with pytest.raises(ConfigError, match="did you mean 'temperature'"):
            call("w5", temprature=3)
        with pytest.raises(ConfigError, match="give sampling_params or n=, not both"):
            call("w5", THREE, n=2)


def test_a_conversation_gets_an_answer_and_a_list_of_them_a_list(llm: LLM) -> None:
    one = llm.chat(CONVERSATION, THREE)
    assert one.prompt_token_ids == [5, 7, 1]  # the template adds w1 to each message
    assert llm.chat("w5 w7", THREE).token_ids == one.token_ids
    other = [{"role": "user", "content": [{"type": "text", "text": "w9"}]}]
    outs = llm.chat([CONVERSATION, other, "w5 w7"], [THREE, None, {"max_tokens": 2}])
    assert [out.prompt_token_ids for out in outs] == [[5, 7, 1], [9, 1], [5, 7, 1]]
    assert [out.index for out in outs] == [0, 1, 2]
    assert (outs[0].token_ids, outs[2].token_ids) == (one.token_ids, one.token_ids[:2])
    assert [out.token_ids for out in llm.chat([CONVERSATION], THREE)] == [one.token_ids]


def test_chat_takes_conversations_only(llm: LLM) -> None:
    for wrong in ([5, 7], {"prompt": "w5"}, [], None, b"w5"):
        with pytest.raises(PromptError):
            llm.chat(wrong)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="chat gives one answer"):
        llm.chat(CONVERSATION, n=2)


def test_a_stream_that_has_ended_has_its_completion(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], THREE)
    assert (stream.completion, repr(stream)) == (None, "Stream(running or closed)")
    text = "".join(chunk.text for chunk in stream)
    assert stream.completion is not None
    assert (stream.completion.text, stream.completion.stats.tokens) == (text, 3)
    assert list(stream) == []  # it stays ended, and keeps its completion
    assert stream.completion.stats.tokens == 3
    assert repr(stream) == f"Stream({stream.completion!r})"


def test_a_stream_that_is_closed_has_none(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], THREE)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.completion is None
    assert not llm.engine.scheduler.running


def test_a_bad_prompt_is_refused_when_the_stream_is_made(llm: LLM) -> None:
    with pytest.raises(PromptError):
        llm.stream("")
    with pytest.raises(ConfigError, match="stream gives one text"):
        llm.stream("w5", n=2)


NOT_TEXT: list[Any] = [5, "", b"ann", ["ann"], {"a": 1}, True]


@pytest.mark.parametrize("namespace", NOT_TEXT)
def test_a_namespace_is_text(llm: LLM, namespace: Any) -> None:
    with pytest.raises(ConfigError, match="namespace must be text that is not empty"):
        llm.generate("w5", namespace=namespace)
    with pytest.raises(ConfigError, match="reuse must be True or False"):
        llm.stream("w5", reuse=1)  # type: ignore[arg-type]
