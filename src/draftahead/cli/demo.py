"""`draftahead demo`: plain and drafted decoding race side by side on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text
from typer import Option

from draftahead.bench.prompts import BenchPrompt, load_prompts
from draftahead.bench.report import table_of
from draftahead.cli import command, options, terminal
from draftahead.cli.generate import DRAFTED
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.loader.progress import progress_bar

if TYPE_CHECKING:
    from draftahead.core.types import Completion
    from draftahead.llm import LLM

KINDS = ("code_edit", "summary", "question_with_context", "translation", "code", "chat")
PANEL_LINES = 12  # of text, the last ones


@command.grouped
def demo(
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    max_tokens: options.MaxTokens = 96,
    per_kind: Annotated[int, Option(help="Prompts of each kind.", min=1)] = 1,
    json_file: options.Json = None,
) -> None:
    """Race plain against drafted decoding.

    The prompts are of six kinds; decoding is greedy, so both texts are the same.
    """
    config = drafter.config(num_speculative_tokens)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    drafted = model.build(config)
    plain = drafted.with_drafter("none")
    for llm in (plain, drafted):  # warm-up: the first forward pass of each is slow
        llm.generate("Hello", SamplingParams(temperature=0, max_tokens=4))
    console = terminal.output_console()
    rows: list[dict[str, Any]] = []
    races: list[tuple[Completion, Completion]] = []
    given = load_prompts()
    prompts = [p for kind in KINDS for p in [p for p in given if p.task == kind][:per_kind]]
    # On a terminal the texts are shown.
    with progress_bar("prompts", len(prompts), shown=not console.is_terminal) as step:
        for prompt in prompts:
            races.append(_race(console, prompt, plain, drafted, params))
            rows.append({"task": prompt.task, "prompt": prompt.id, **_summary(races[-1:])})
            step()
    overall = _summary(races)
    name = config.get("method", "draft_model")
    terminal.print_table(console, _table(rows, overall, f"{model.model}, drafter {name}, greedy"))
    if json_file is not None:
        report = {"model": model.model, "drafter": config, "rows": rows, "overall": overall}
        json_file.write_text(json.dumps(report, indent=2) + "\n")


def _race(
    console: Console, prompt: BenchPrompt, plain: LLM, drafted: LLM, params: SamplingParams
) -> tuple[Completion, Completion]:
    """The one that has used less time so far makes the next step: each runs at its own speed, and
    a disturbance of the machine hits both."""
    messages = [{"role": "user", "content": prompt.turns[0]}]
    left = Racer("plain", plain, messages, params)
    right = Racer("drafted", drafted, messages, params)
    title = f"{prompt.task}: {prompt.turns[0].strip().splitlines()[0]}"
    line = Text(title, style="bold", no_wrap=True, overflow="ellipsis")

    def picture() -> Group:
        grid = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
        grid.add_row(left.panel(), right.panel())
        return Group(line, grid)

    with Live(console=console, refresh_per_second=8, transient=True) as live:
        while active := [racer for racer in (left, right) if racer.completion is None]:
            min(active, key=lambda racer: racer.seconds).advance()
            if console.is_terminal:
                live.update(picture())
    if console.is_terminal:
        console.print(picture())
    assert left.completion is not None and right.completion is not None
    return left.completion, right.completion


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

    def panel(self) -> Panel:
        speed = f"{self.seconds:.1f} s"
        if self.completion is not None:
            speed = f"{self.completion.stats.tokens_per_second:.1f} tokens/s"
        lines = self.text.split("\n", allow_blank=True)[-PANEL_LINES:]
        return Panel(Text("\n").join(lines), title=f"{self.name}: {speed}")


def _summary(races: Sequence[tuple[Completion, Completion]]) -> dict[str, Any]:
    """Of some races together: total tokens over total time."""
    plain, drafted = Stats(), Stats()
    for slow, fast in races:
        plain.add(slow.stats)
        drafted.add(fast.stats)
    return {
        "tokens": drafted.tokens,
        "plain_tokens_per_second": plain.tokens_per_second,
        "drafted_tokens_per_second": drafted.tokens_per_second,
        "speedup": plain.decode_seconds / drafted.decode_seconds,
        "mean_acceptance_length": drafted.mean_acceptance_length,
        "identical": all(slow.token_ids == fast.token_ids for slow, fast in races),
    }


def _table(rows: Sequence[dict[str, Any]], overall: dict[str, Any], title: str) -> Table:
    length = "mean\nacceptance\nlength"
    table = table_of(
        ["kind"],
        ["tokens", "plain\ntok/s", "drafted\ntok/s", "speed-up", length],
        title=title,
        caption="tok/s of decoding only, both interleaved in one run",
    )
    table.add_column("identical", no_wrap=True)
    for row in [*rows, {"task": "overall", **overall}]:
        table.add_row(
            row["task"],
            str(row["tokens"]),
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['drafted_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['mean_acceptance_length']:.2f}",
            "yes" if row["identical"] else "no",
            end_section=row is rows[-1],
        )
    return table
