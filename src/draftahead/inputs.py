"""What a user may pass as a prompt, and the request that is made of it."""

from __future__ import annotations

import secrets
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

from draftahead.core.checks import FLAG, TEXT, shown, whole
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Request
from draftahead.errors import ConfigError, ContextLengthError, DraftaheadError, PromptError
from draftahead.loader import generation_config
from draftahead.models.runner import ModelRunner

Message = Mapping[str, Any]
Conversation = Message | Sequence[Message]
# Text, token ids, a conversation, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]

ACCEPTED = (
    "a prompt is text, a list of token ids, a list of messages, {'prompt': text} or "
    "{'prompt_token_ids': ids}"
)
A_MESSAGE = "a message is {'role': name, 'content': text}"
BYTES = bytes | bytearray | memoryview


@dataclass(frozen=True)
class EncodedPrompt:
    ids: Sequence[int]
    text: str | None = None  # if it was text, or messages: as the chat template puts them


@dataclass(frozen=True)
class Inputs:
    """Makes requests for one model."""

    model: Any
    tokenizer: Any  # None if the user gave none
    runner: ModelRunner
    follow_model: bool = True  # where the user sets nothing, its generation_config counts

    def request(
        self,
        prompt: Prompt,
        given: SamplingParams,
        *,
        reuse: bool = False,
        namespace: str | None = None,
    ) -> Request:
        if namespace is not None:
            TEXT.of("namespace", namespace)
        encoded = self.encode(prompt)
        ids = encoded.ids
        if not ids:
            raise PromptError("the prompt is empty: give at least one token to continue from")
        vocab_size, max_context = self.runner.vocab_size, self.runner.max_context
        if outside := [i for i in ids if not 0 <= i < vocab_size]:
            raise PromptError(
                f"token {shown(outside[0])} is outside the vocabulary of {vocab_size}"
            )
        # A prompt that fills the context leaves room for log-probabilities of its own only.
        if len(ids) + (given.max_tokens != 0) > max_context:
            raise self._too_long(len(ids))
        params, eos_token_ids, processors = generation_config.resolve(
            given,
            self.model,
            self.tokenizer,
            ids,
            follow_model=self.follow_model,
            vocab_size=vocab_size,
            max_new_tokens=max_context - len(ids),
        )
        if len(ids) + (params.max_tokens or 0) > max_context:
            asked = f"max_tokens={shown(params.max_tokens)}"
            raise ContextLengthError(
                f"{len(ids)} prompt tokens and {asked} exceed the context of {max_context}: "
                f"ask for at most {max_context - len(ids)}" + self._larger_context_hint()
            )
        if params.stop_strings and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; use stop_token_ids without one")
        for name in ("logprobs", "prompt_logprobs"):
            if ((count := getattr(params, name)) or 0) > vocab_size:
                raise ConfigError(
                    f"{name}={shown(count)} is more than the vocabulary of {vocab_size}"
                )
        bad_word_ids = self._bad_word_ids(params.bad_words)
        ids_in = {
            "logit_bias": list(params.logit_bias or ()),
            "stop_token_ids": list(params.stop_token_ids),
            "bad_words": [token for word in bad_word_ids for token in word],
        }
        for name, tokens in ids_in.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise ConfigError(
                        f"{name}: token {shown(token)} is outside the vocabulary of {vocab_size}"
                    )
        return Request(
            prompt=tuple(ids),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            eos_token_ids=eos_token_ids,
            bad_word_ids=bad_word_ids,
            model_processors=processors,
            reuse=FLAG.of("reuse", reuse),
            namespace=namespace,
            prompt_text=encoded.text,
        )

    def _too_long(self, length: int) -> ContextLengthError:
        return ContextLengthError(
            f"the prompt has {length} tokens and the context {self.runner.max_context}: shorten it"
            + self._larger_context_hint()
        )

    def _larger_context_hint(self) -> str:
        if self.runner.max_context < self.runner.model_context:
            most = self.runner.model_context
            return f", or give the cache more room with max_context (at most {most})"
        return ""

    def _bad_word_ids(self, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """A word is forbidden at the start of a text and after a space alike."""
        found: list[tuple[int, ...]] = []
        for word in words:
            if not isinstance(word, str):
                found.append(tuple(word))
                continue
            if self.tokenizer is None:
                raise ConfigError("bad_words as text need a tokenizer; pass token ids instead")
            found += [tuple(self._tokenized(spelled, False)) for spelled in (word, " " + word)]
        return tuple(dict.fromkeys(ids for ids in found if ids))

    # ------------------------------------------------------------------------ to token ids

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """The token ids of one prompt."""
        with _failures_explained():
            found = _without_arrays(prompt)
            if isinstance(found, Mapping):
                return self._encode_mapping(found)
            if isinstance(found, str):
                return self._encode_text(found)
            if isinstance(found, Sequence) and not isinstance(found, BYTES):
                if found and isinstance(found[0], Mapping):
                    return self._encode_messages(found)
                return EncodedPrompt(self._checked_ids(found))
            raise PromptError(f"{_name(prompt)} is no prompt: {ACCEPTED}")

    def _encode_mapping(self, prompt: Mapping[str, Any]) -> EncodedPrompt:
        if "role" in prompt:
            return self._encode_messages([prompt])
        given = {key: value for key, value in prompt.items() if value is not None}
        text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
        if given or (text is None and ids is None):
            key = next(iter(given or prompt), "{}")
            hint = " (of a tokenizer's output, give the ids alone)" if key == "input_ids" else ""
            raise PromptError(f"a prompt cannot have {shown(key)}{hint}: {ACCEPTED}")
        if text is not None and not isinstance(text, str):
            raise PromptError("'prompt' must be text; give token ids as 'prompt_token_ids'")
        if ids is None:
            return self._encode_text(text or "")
        ids = _without_arrays(ids)
        if isinstance(ids, str | BYTES) or not isinstance(ids, Sequence):
            raise PromptError(f"'prompt_token_ids' must be a list of token ids, not {shown(ids)}")
        return EncodedPrompt(self._checked_ids(ids), text)

    def _checked_ids(self, ids: Sequence[Any]) -> list[int]:
        if len(ids) > self.runner.max_context:  # before they are looked at: a `range` may be long
            raise self._too_long(len(ids))
        found: list[int] = []
        for item in ids:
            try:
                found.append(WHOLE.read(item))
            except Exception:
                raise PromptError(
                    f"token ids are whole numbers, and {shown(item)} is none: {ACCEPTED}"
                ) from None
        return found

    def _encode_text(self, text: str) -> EncodedPrompt:
        return EncodedPrompt(self._tokenized(text, True) if text else [], text)

    def _encode_messages(self, messages: Sequence[Any]) -> EncodedPrompt:
        checked = [_message(message) for message in messages]
        self._require_tokenizer()
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError("this model has no chat template; give it plain text instead")
        text = self.tokenizer.apply_chat_template(
            checked, add_generation_prompt=True, tokenize=False
        )
        return EncodedPrompt(self._tokenized(text, False), text)

    def _tokenized(self, text: str, add_special_tokens: bool) -> list[int]:
        self._require_tokenizer()
        _check_text("the prompt", text)
        with _tokenizing:
            ids = self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return [int(i) for i in ids]

    def _require_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise ConfigError("a model without its tokenizer takes token ids; pass tokenizer=")


WHOLE = whole()
_tokenizing = threading.Lock()  # a tokenizer sets its options anew at every call


def as_prompts(given: Any) -> list[Any]:
    """One prompt, or a list of them, as a list of prompts."""
    with _failures_explained():
        found = _without_arrays(given)
        if isinstance(found, str | Mapping):
            return [found]
        if isinstance(found, BYTES) or not isinstance(found, Sequence):
            raise PromptError(f"{_name(given)} is no prompt and no list of prompts: {ACCEPTED}")
        is_one = len(found) > 0 and (_is_message(found[0]) or isinstance(found[0], Number))
        return [found] if is_one else list(found)


def as_conversations(given: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """Conversations, where text is the message of a user; and whether it was one and no list."""
    is_one = isinstance(given, str | Mapping)
    found = []
    for one in as_prompts(given):
        messages = [{"role": "user", "content": one}] if isinstance(one, str) else one
        messages = [messages] if isinstance(messages, Mapping) else messages
        if not isinstance(messages, Sequence) or isinstance(messages, BYTES) or not messages:
            raise PromptError(f"{shown(one)} is no conversation: give text or a list of messages")
        found.append([_message(message) for message in messages])
        is_one = is_one or one is given
    if not found:
        raise PromptError("the conversation is empty: give at least one message")
    return found, is_one


def _without_arrays(value: Any) -> Any:
    """Arrays and tensors as lists of Python's numbers."""
    has_list = not isinstance(value, BYTES) and hasattr(value, "tolist")
    return value.tolist() if has_list else value


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and not {"prompt", "prompt_token_ids"} & set(value)


def _message(value: Any) -> dict[str, Any]:
    """A message for the chat template: its parts of text are joined."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise PromptError(f"{A_MESSAGE}, not {shown(value)}")
    message = dict(value)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | BYTES):
        content = message["content"] = "\n".join(map(_text_of_part, content))
    if isinstance(content, str):
        _check_text("the content of a message", content)
    elif content is not None or not message.get("tool_calls"):
        raise PromptError(f"{A_MESSAGE}, and content cannot be {shown(content)}")
    return message


def _text_of_part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part["text"], str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise PromptError(
        f"a part of a message is {{'type': 'text', 'text': text}}; {shown(kind)} is not supported"
    )


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what} has half a character at {error.start} ({text[error.start]!r}): decode it as "
            "UTF-8"
        ) from None


def _name(value: Any) -> str:
    return f"{shown(value)} of type {type(value).__name__}"


@contextmanager
def _failures_explained() -> Iterator[None]:
    """For what a chat template, a tokenizer or an object of the user's raises."""
    try:
        yield
    except DraftaheadError:
        raise
    except Exception as failure:
        reason = " ".join(traceback.format_exception_only(failure)[-1].split())
        raise PromptError(f"the prompt cannot be turned into tokens: {reason}") from failure
