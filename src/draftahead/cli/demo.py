"""`draftahead demo`: plain and drafted decoding race side by side on the embedded model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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
    """The result of one prompt."""

    task: str
    prompt: str
    tokens: int
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    speedup: float
    mean_acceptance_length: float
    identical: bool


@options.grouped
def demo(
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 96,
    per_kind: Annotated[int, typer.Option(help="Prompts of each kind.", min=1)] = 1,
    json_file: options.Json = None,
) -> None:
    """Race plain against drafted decoding on prompts of six kinds; greedy, so the same text."""
    from draftahead.llm import LLM

    if json_file is not None:
        options.check_writable(json_file)
    config = drafter.config(num_speculative_tokens)
    params = options.sampling_params(temperature=0, max_tokens=max_tokens)
    drafted = model.build(config)
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
    for llm in (plain, drafted):  # warm-up: the first forward pass of each is slow
        llm.generate("Hello", options.sampling_params(temperature=0, max_tokens=4))
    console = options.output_console()
    rows = [_race(console, prompt, plain, drafted, params) for prompt in prompts]
    name = config.get("method", "draft_model")
    console.print(_table(rows, f"{model.model}, drafter {name}, greedy"))
    if json_file is not None:
        report = {"model": model.model, "drafter": config, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(report | {"overall": _overall(rows)}, indent=2) + "\n")


def _race(
    console: Console, prompt: BenchPrompt, plain: LLM, drafted: LLM, params: SamplingParams
) -> Row:
    """The one that has used less time so far makes the next step: each runs at its own speed, and
    a disturbance of the machine hits both."""
    messages = [{"role": "user", "content": prompt.turns[0]}]
    left = Racer("plain", plain, messages, params)
    right = Racer("drafted", drafted, messages, params)

    def picture() -> Group:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(left.panel(height=12), right.panel(height=12))
        return Group(Text(f"{prompt.task}: {_first_words(prompt)}", style="bold"), grid)

    with Live(console=console, refresh_per_second=8, transient=True) as live:
        while active := [racer for racer in (left, right) if racer.completion is None]:
            min(active, key=lambda racer: racer.seconds).advance()
            if console.is_terminal:
                live.update(picture())
    if console.is_terminal:
        console.print(picture())
    assert left.completion is not None and right.completion is not None
    a, b = left.completion.stats, right.completion.stats
    return Row(
        task=prompt.task,
        prompt=prompt.id,
        tokens=b.tokens,
        plain_tokens_per_second=a.tokens_per_second,
        drafted_tokens_per_second=b.tokens_per_second,
        speedup=a.decode_seconds / b.decode_seconds,
        mean_acceptance_length=b.mean_acceptance_length,
        identical=left.completion.token_ids == right.completion.token_ids,
    )


class Racer:
    """One of the two streams: its text so far with drafted tokens in colour, and its own clock."""

    def __init__(self, name: str, llm: LLM, prompt: Any, params: SamplingParams) -> None:
        self.name, self.text = name, Text()
        self._stream = llm.stream(prompt, params)
        self._engine = llm.engine
        self.completion: Completion | None = None
        self.seconds = 0.0

    def advance(self) -> None:
        try:
            chunk = next(self._stream)
        except StopIteration as end:
            self.completion = end.value
            return
        self.text.append(chunk.text, style=DRAFTED if any(chunk.drafted) else "")
        running = self._engine.scheduler.running
        self.seconds = running[0].stats.decode_seconds if running else self.seconds

    def panel(self, height: int) -> Panel:
        if self.completion is not None:
            speed = f"{self.completion.stats.tokens_per_second:.1f} tokens/s"
        else:
            speed = f"{self.seconds:.1f} s"
        lines = self.text.split("\n", allow_blank=True)[-height:]
        return Panel(Text("\n").join(lines), title=f"{self.name}: {speed}")


def _first_words(prompt: BenchPrompt) -> str:
    line = prompt.turns[0].strip().splitlines()[0]
    return line if len(line) <= 90 else line[:87] + "..."


def _overall(rows: list[Row]) -> dict[str, Any]:
    """All prompts together: total tokens over total time."""
    tokens = sum(row.tokens for row in rows)
    plain = sum(row.tokens / row.plain_tokens_per_second for row in rows)
    drafted = sum(row.tokens / row.drafted_tokens_per_second for row in rows)
    steps = sum(row.tokens / row.mean_acceptance_length for row in rows)
    return {
        "tokens": tokens,
        "plain_tokens_per_second": tokens / plain,
        "drafted_tokens_per_second": tokens / drafted,
        "speedup": plain / drafted,
        "mean_acceptance_length": tokens / steps,
        "identical": all(row.identical for row in rows),
    }


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, caption="tok/s of decoding only, both interleaved in one run")
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
