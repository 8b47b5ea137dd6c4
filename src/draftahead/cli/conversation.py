"""A conversation, kept in a file of one JSON line, which is also a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftahead.bench.prompts import load_prompts
from draftahead.errors import ConfigError


class Conversation:
    def __init__(self, system: str | None = None) -> None:
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = []
        self._file: Path | None = None  # whose contents these are
        self.reset()

    def __str__(self) -> str:
        return f"{len(self.messages)} message{'s' * (len(self.messages) != 1)}"

    def reset(self) -> None:
        self.messages = list(self._opening)
        self._file = None

    def add(self, question: str, answer: str) -> None:
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def load(self, file: Path) -> None:
        found = load_prompts(file)
        if len(found) != 1 or not found[0].messages:
            raise ConfigError(f"{file} holds no conversation: it must be one line with 'messages'")
        self.messages = [dict(message) for message in found[0].messages]
        self._file = file

    def check_new(self, file: Path) -> None:
        """Refuses to write over a file that is not this conversation's own."""
        is_own = self._file is not None and file.absolute() == self._file.absolute()
        if not is_own and file.is_file() and file.stat().st_size:
            raise ConfigError(f"{file} exists: load that conversation first, or name another file")

    def save(self, file: Path) -> None:
        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        try:
            file.write_text(line, "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from None
        self._file = file
