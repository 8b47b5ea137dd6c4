"""Files of prompts: JSON lines, which every command reads alike; and the built-in set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftahead.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from draftahead.llm import LLM

FORMS = "needs 'prompt', 'messages', 'turns' or 'text'"


@dataclass(frozen=True)
class BenchPrompt:
    """One line of a file: turns of a user, a conversation, or a text."""

    id: str | int  # the line's number, if it does not say
    task: str
    turns: tuple[str, ...] = ()  # the first is the prompt
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None  # without the chat template

    def request(self, as_chat: bool) -> Any:
        """What LLM takes: a conversation, or text."""
        if self.messages:
            return list(self.messages)
        if self.text is not None:
            return self.text
        return [{"role": "user", "content": self.turns[0]}] if as_chat else self.turns[0]

    def encode(self, llm: LLM) -> list[int]:
        try:
            return llm.encode(self.request(has_chat_template(llm.tokenizer)))
        except PromptError as problem:
            raise PromptError(f"prompt {self.id}: {problem}") from None


def has_chat_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def load_prompts(source: str | Path = "builtin") -> list[BenchPrompt]:
    """JSON lines with `prompt`, `turns` (as in Spec-Bench), `messages` or `text`, and optionally
    `id` and `task` (or `category`)."""
    if source == "builtin":
        text = resources.files("draftahead").joinpath("data/prompts.jsonl").read_text("utf-8")
    else:
        try:
            text = decoded(Path(source).read_bytes(), str(source))
        except OSError as error:
            raise ConfigError(f"cannot read the prompts in {source}: {error.strerror}") from None
    found = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would split at U+2028
        if line.strip():
            try:
                found.append(_parsed(json.loads(line), number))
            except json.JSONDecodeError as error:
                where = f"{source}, line {number}, column {error.colno}"
                raise ConfigError(f"{where}: a line is a JSON object ({error.msg})") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{source}, line {number}: {FORMS} ({error})") from None
    if not found:
        raise ConfigError(f"{source} holds no prompts and no texts")
    return found


def decoded(content: bytes, source: str) -> str:
    """The text of a file, with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}, line {line}: this is not UTF-8 text ({error})") from None


def _parsed(entry: Any, number: int) -> BenchPrompt:
    if not isinstance(entry, dict):
        raise ValueError("a line is a JSON object")
    task = str(entry.get("task") or entry.get("category") or "all")
    name = entry.get("id", number)
    if not isinstance(name, str | int):
        raise ValueError("an id is a string or a number")
    if "text" in entry:
        if not isinstance(entry["text"], str):
            raise ValueError("a text is a string")
        return BenchPrompt(name, task, text=entry["text"])
    if "messages" in entry:
        messages = entry["messages"]
        if not messages or not _is_list_of(dict, messages):
            raise ValueError("messages are a list of objects with role and content")
        return BenchPrompt(name, task, messages=tuple(messages))
    turns = [entry["prompt"]] if "prompt" in entry else entry.get("turns")
    if not turns or not _is_list_of(str, turns):
        raise ValueError("a prompt is a string, and turns are a list of strings")
    return BenchPrompt(name, task, turns=tuple(turns))


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
