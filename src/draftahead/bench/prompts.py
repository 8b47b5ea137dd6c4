"""Prompts for the demo and for measurements: the built-in set, or a file in Spec-Bench's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from draftahead.errors import ConfigError


@dataclass(frozen=True)
class BenchPrompt:
    id: str
    task: str
    turns: tuple[str, ...]


def load_prompts(source: str | Path = "builtin") -> list[BenchPrompt]:
    """JSON lines with `turns`, and optionally `id` and `task` (or `category`)."""
    if source == "builtin":
        text = resources.files("draftahead").joinpath("data/prompts.jsonl").read_text("utf-8")
    else:
        try:
            text = Path(source).read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the prompts in {source}: {error.strerror}") from None
    found = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would split at U+2028
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            turns = tuple(str(turn) for turn in entry["turns"])
            if not turns or isinstance(entry["turns"], str):
                raise ValueError("turns must be a list of texts")
            task = str(entry.get("task") or entry.get("category") or "all")
            found.append(BenchPrompt(str(entry.get("id", number)), task, turns))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{source}, line {number}: not a prompt ({error})") from None
    if not found:
        raise ConfigError(f"{source} holds no prompts")
    return found
