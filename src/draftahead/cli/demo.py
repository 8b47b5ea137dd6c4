"""`draftahead demo`: plain and drafted decoding race side by side on the embedded model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftahead.bench.prompts import BenchPrompt, load_prompts
from draftahead.cli import options
from draftahead.cli.generate import DRAFTED

if TYPE_CHECKING:
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.core.types import Completion
    from draftahead.llm import LLM

KINDS = ("code_edit", "summary", "question_with_context", "translation", "code", "chat")


@dataclass
class Row:
    """One prompt's result."""

    task: str
    prompt: str
    tokens: int
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    speedup: float
    mean_acceptance_length: float
    identical: bool


def demo(
    model: options.Model = "smollm2",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    num_speculative_tokens: options.Tokens = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 96,
    per_kind: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the table to this file.", metavar="FILE")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
) -> None:
    """Race plain against drafted decoding on prompts of six kinds; greedy, so the same text."""
    from draftahead.llm import LLM

    if json_file is not None:
        options.check_writable(json_file)
    chosen = options.drafter_from(drafter, draft_model, speculative_config, num_speculative_tokens)
    sampling = options.sampling_from(temperature=0, max_tokens=max_tokens)
    drafted = options.build_llm(
        model, chosen, device=device, dtype=dtype, quantize=quantize, max_context=None
    )
    plain = LLM(
        drafted.model,
        "none",
        tokenizer=drafted.tokenizer,
        max_context=drafted.engine.verifier.max_context,
        max_batch=1,
    )
    prompts = [
        prompt
        for kind in KINDS
        for prompt in [p for p in load_prompts() if p.task == kind][:per_kind]
    ]
    for llm in (plain, drafted):  # the first pass of a process is slow on either side
        llm.generate("Hello", options.sampling_from(temperature=0, max_tokens=4))
    console = options.output_console()
    rows = [_race(console, prompt, plain, drafted, sampling) for prompt in prompts]
    console.print(_table(rows, model, chosen))
    if json_file is not None:
        report = {"model": model, "drafter": chosen, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(report | {"overall": _overall(rows)}, indent=2) + "\n")


class Side:
    """One of the two racers: its text so far, drafted tokens in colour, and its own clock."""

    def __init__(self, name: str, llm: LLM, prompt: Any, sampling: SamplingParams) -> None:
        self.name, self.text = name, Text()
        self._stream = llm.stream(prompt, sampling)
        self._engine = llm.engine
        self.done: Completion | None = None
        self.seconds = 0.0

    def advance(self) -> None:
        try:
            piece = next(self._stream)
        except StopIteration as end:
            self.done = end.value
            return
        self.text.append(piece.text, style=DRAFTED if any(piece.drafted) else "")
        running = self._engine.scheduler.running
        self.seconds = running[0].stats.decode_seconds if running else self.seconds

    def panel(self, height: int) -> Panel:
        if self.done is not None:
            speed = f"{self.done.stats.tokens_per_second:.1f} tokens/s"
        else:
            speed = f"{self.seconds:.1f} s"
        return Panel(_last_lines(self.text, height), title=f"{self.name}: {speed}")


def _last_lines(text: Text, height: int) -> Text:
    lines = text.split("\n", allow_blank=True)
    return Text("\n").join(lines[-height:])


def _race(
    console: Console, prompt: BenchPrompt, plain: LLM, drafted: LLM, sampling: SamplingParams
) -> Row:
    """Whoever has used less time so far makes the next step: each side runs at its own speed,
    and a busy moment of the machine hits both."""
    messages = [{"role": "user", "content": prompt.turns[0]}]
    left = Side("plain", plain, messages, sampling)
    right = Side("drafted", drafted, messages, sampling)
    sides = (left, right)

    def picture() -> Group:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*(side.panel(height=12) for side in sides))
        return Group(Text(f"{prompt.task}: {_first_words(prompt)}", style="bold"), grid)

    with Live(console=console, refresh_per_second=8, transient=True) as live:
        while active := [side for side in sides if side.done is None]:
            min(active, key=lambda side: side.seconds).advance()
            if console.is_terminal:
                live.update(picture())
    if console.is_terminal:
        console.print(picture())
    assert left.done is not None and right.done is not None
    a, b = left.done.stats, right.done.stats
    return Row(
        task=prompt.task,
        prompt=prompt.id,
        tokens=b.tokens,
        plain_tokens_per_second=a.tokens_per_second,
        drafted_tokens_per_second=b.tokens_per_second,
        speedup=a.decode_seconds / b.decode_seconds,
        mean_acceptance_length=b.mean_acceptance_length,
        identical=left.done.token_ids == right.done.token_ids,
    )


def _first_words(prompt: BenchPrompt) -> str:
    line = prompt.turns[0].strip().splitlines()[0]
    return line if len(line) <= 90 else line[:87] + "..."


def _overall(rows: list[Row]) -> dict[str, Any]:
    """Of all prompts together: total tokens over total time."""
    tokens = sum(row.tokens for row in rows)
    plain = sum(row.tokens / row.plain_tokens_per_second for row in rows)
    drafted = sum(row.tokens / row.drafted_tokens_per_second for row in rows)
    passes = sum(row.tokens / row.mean_acceptance_length for row in rows)
    return {
        "tokens": tokens,
        "plain_tokens_per_second": tokens / plain,
        "drafted_tokens_per_second": tokens / drafted,
        "speedup": plain / drafted,
        "mean_acceptance_length": tokens / passes,
        "identical": all(row.identical for row in rows),
    }


def _table(rows: list[Row], model: str, drafter: Any) -> Table:
    name = drafter if isinstance(drafter, str) else drafter.get("method", "draft_model")
    table = Table(
        title=f"{model}, drafter {name}, greedy",
        caption="tok/s while decoding, both sides in one run; the prompt's own pass not counted",
    )
    table.add_column("kind", no_wrap=True)
    length = "mean\nacceptance\nlength"
    for title in ("tokens", "plain\ntok/s", "drafted\ntok/s", "speed-up", length):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("identical", no_wrap=True)
    summary = [(row.task, asdict(row)) for row in rows] + [("overall", _overall(rows))]
    for number, (task, row) in enumerate(summary):
        table.add_row(
            task,
            str(row["tokens"]),
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['drafted_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['mean_acceptance_length']:.2f}",
            "yes" if row["identical"] else "no",
            end_section=number == len(rows) - 1,
        )
    return table
