"""Completions as JSON lines: one per prompt, in the order of the prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftahead.core.stats import Stats
from draftahead.errors import ConfigError
from draftahead.loader.progress import progress_bar

if TYPE_CHECKING:
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.core.types import Completion
    from draftahead.llm import LLM

FIELDS = ("text", "token_ids", "finish_reason", "stop_reason", "drafted", "seed", "lossless")
BATCHES_AT_ONCE = 4  # sequences that end early make room for others; an interrupt loses so many


def line_of(completions: Sequence[Completion], **more: Any) -> str:
    """The samples of one prompt; with one sample its fields are the line's own."""
    failed = [str(completion.error) for completion in completions if completion.error is not None]
    samples = [_fields(completion) for completion in completions]
    if failed:
        found: dict[str, Any] = {"error": failed[0]}
    else:
        found = samples[0] if len(samples) == 1 else {"samples": samples}
    return json.dumps(more | found, ensure_ascii=False) + "\n"


def _fields(completion: Completion) -> dict[str, Any]:
    found = {name: getattr(completion, name) for name in FIELDS}
    if completion.logprobs is not None:
        found["logprobs"] = [asdict(token) for token in completion.logprobs]
    stats = completion.stats
    return found | {"prompt_tokens": stats.prompt_tokens, "stats": stats.as_dict()}


def write_lines(
    llm: LLM, requests: Sequence[tuple[Any, Any]], params: SamplingParams, out: Path | None
) -> tuple[int, Stats]:
    """Continues the prompts of (id, prompt) pairs; to `out`, or else to standard output. Returns
    how many failed, and the statistics of all."""
    failed, total = 0, Stats()
    size = BATCHES_AT_ONCE * llm.config.max_batch
    shown = out is not None or not sys.stdout.isatty()
    with progress_bar("prompts", len(requests), shown=shown) as step:
        for at in range(0, len(requests), size):
            part = requests[at : at + size]
            found = llm.generate([request for _, request in part], params, errors="return")
            samples: list[list[Completion]] = [[] for _ in part]
            for completion in found:
                samples[completion.index].append(completion)
                total.add(completion.stats)
            failed += sum(any(c.error is not None for c in group) for group in samples)
            ids = (name for name, _ in part)
            _write((line_of(g, id=name) for name, g in zip(ids, samples, strict=True)), out)
            for _ in part:
                step()
    return failed, total


def _write(lines: Iterator[str], out: Path | None) -> None:
    if out is None:
        sys.stdout.writelines(lines)
        sys.stdout.flush()
    else:
        with out.open("a", encoding="utf-8") as file:
            file.writelines(lines)


def num_done(out: Path, ids: Sequence[str | int]) -> int:
    """How many prompts an earlier run has written to `out`. Cuts off a line that it did not end."""
    if not out.exists():
        return 0
    with out.open("rb+") as file:
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
    try:
        found = [json.loads(line)["id"] for line in lines]
    except (ValueError, LookupError, TypeError, RecursionError):
        found = [None]
    if found != list(ids[: len(found)]):
        raise ConfigError(f"{out} holds no lines of these prompts: name another file for --out")
    return len(found)
