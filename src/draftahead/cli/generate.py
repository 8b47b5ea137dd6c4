"""`draftahead generate`: one prompt, or a file of prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option

from draftahead.bench.prompts import BenchPrompt, has_chat_template, load_prompts
from draftahead.cli import checks, command, options, rows, terminal
from draftahead.core.stats import Stats
from draftahead.errors import ConfigError, PromptError
from draftahead.loader.progress import terminal_progress

if TYPE_CHECKING:
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.core.types import Completion
    from draftahead.llm import LLM

DRAFTED = "bold green"


@dataclass(frozen=True)
class Sources:
    """The prompts, and where their completions go."""

    prompt: Annotated[str | None, Argument(help="The prompt; - reads it from standard input.")] = (
        None
    )
    prompts: Annotated[
        Path | None, Option(help="JSON lines of prompt, messages, turns or text.")
    ] = None
    out: Annotated[
        Path | None,
        Option(
            help="For --prompts: JSON lines, in the same order; unset: standard output.",
            callback=checks.check_file,
        ),
    ] = None
    resume: Annotated[bool, Option("--resume", help="Go on with the file of --out.")] = False
    batch: options.Batch = 8

    def read(self) -> list[BenchPrompt]:
        """Those that are not done."""
        if (self.prompt is None) == (self.prompts is None):
            raise PromptError("give a prompt, or - for standard input, or --prompts FILE with many")
        if self.prompts is not None:
            found = load_prompts(self.prompts)
            if self.resume and self.out is not None:
                return found[rows.num_done(self.out, [entry.id for entry in found]) :]
            if self.out is not None and self.out.is_file() and self.out.stat().st_size:
                raise ConfigError(f"{self.out} exists: add --resume, or name another file")
            return found
        for flag, given in (("--out", self.out), ("--resume", self.resume)):
            if given:
                raise ConfigError(f"{flag} is for --prompts")
        text = terminal.read_input() if self.prompt == "-" else self.prompt
        if not text:
            raise PromptError("the prompt is empty: give some text, or - and standard input")
        checks.check_text("the prompt", text)
        return [BenchPrompt(1, "", turns=(text,))]


@command.grouped
def generate(
    sources: Sources,
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    sampling: options.SamplingOptions,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    exact: options.Exact = None,
    not_lossless: options.NotLossless = False,
    n: Annotated[int, Option("--n", "-n", help="Samples of each prompt.")] = 1,
    stop: Annotated[list[str] | None, Option(help="Stop string; repeatable.")] = None,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after an end token.")] = False,
    logprobs: Annotated[
        int | None, Option(help="In JSON: of so many likely tokens; 0: of the chosen one only.")
    ] = None,
    system: options.System = None,
    chat: Annotated[
        bool | None,
        Option("--chat/--raw", help="With the chat template, or without; unset: if there is one."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print a JSON object.")] = False,
    stats: Annotated[bool, Option("--stats", help="Print drafting statistics.")] = False,
    explain: Annotated[
        bool, Option("--explain", help="Print what the policy decided, and why.")
    ] = False,
    max_context: options.MaxContext = None,
) -> None:
    """Continue a prompt, or each prompt of a file.

    On a terminal, drafted tokens are green.
    """
    entries, in_lines = sources.read(), sources.prompts is not None
    if logprobs is not None and not (as_json or in_lines):
        raise ConfigError("--logprobs is for --json and --prompts")
    if system is not None and chat is False:
        raise ConfigError("--system needs the chat template: leave --raw out")
    checks.check_text("--system", system or "")
    params = sampling.params(stop=stop or (), n=n, ignore_eos=ignore_eos, logprobs=logprobs)
    llm = model.build(
        drafter.config(num_speculative_tokens),
        exact=exact,
        lossless=not not_lossless,
        max_batch=sources.batch if in_lines else min(n, sources.batch),
        max_context=max_context,
    )
    as_chat = has_chat_template(llm.tokenizer) if chat is None else chat
    if system is not None and not as_chat:
        raise ConfigError("--system needs a chat template, and this model has none")
    requests = [(entry.id, _with_system(entry.request(as_chat), system)) for entry in entries]
    failed = 0
    if in_lines:
        try:
            failed, total = rows.write_lines(llm, requests, params, sources.out)
        except KeyboardInterrupt:
            if sources.out is not None and sources.out.exists():
                note = f"interrupted: the same command with --resume goes on with {sources.out}"
                terminal.notes_console().print(note)
            raise
    else:
        total = _show(llm, requests[0][1], params, as_json=as_json)
    reasons = llm.explain()
    if not_lossless:
        terminal.notes_console().print(reasons.pop(0), style="red")
    if stats:
        terminal.error_console().print(stats_table(total))
    if explain:
        for reason in reasons:
            terminal.error_console().print(f"- {reason}")
    if failed:
        terminal.error_console().print(f"error: {failed} of {len(requests)} prompts failed")
        raise Exit(1)


def _with_system(request: Any, system: str | None) -> Any:
    """A conversation that has no system message gets this one."""
    if system is None or isinstance(request, str) or request[0].get("role") == "system":
        return request
    return [{"role": "system", "content": system}, *request]


def _show(llm: LLM, request: Any, params: SamplingParams, *, as_json: bool) -> Stats:
    """Prints the samples of one prompt, and returns their statistics."""
    if params.n == 1 and not as_json:
        return show_stream(llm, request, params).stats
    with terminal_progress() as progress:
        progress("generating")
        completions = llm.generate([request], params)
    if as_json:
        sys.stdout.write(rows.line_of(completions))
    else:
        for completion in completions:
            print(f"--- sample {completion.sample + 1} ---\n{completion.text}")
    total = Stats()
    for completion in completions:
        total.add(completion.stats)
    return total


def show_stream(
    llm: LLM,
    prompt: Any,
    params: SamplingParams,
    *,
    reuse: bool = False,
    shown: list[str] | None = None,
) -> Completion:
    """Prints the text as it is generated, adds it to `shown`, and returns the completion. Ctrl-C
    passes through."""
    console = Console(soft_wrap=True, highlight=False)
    stream = llm.stream(prompt, params, reuse=reuse)
    with terminal_progress(shown=not console.is_terminal) as progress:
        progress("generating")
        while True:
            try:
                chunk = next(stream)
            except StopIteration as end:
                print()
                return end.value  # type: ignore[no-any-return]
            if shown is not None and chunk.text:
                shown.append(chunk.text)
            if console.is_terminal:
                style = DRAFTED if any(chunk.drafted) else ""
                console.print(Text(chunk.text, style=style), end="")
            else:  # not through rich, which turns tabs into spaces
                sys.stdout.write(chunk.text)
            sys.stdout.flush()


def stats_table(stats: Stats) -> Table:
    pairs = zip(stats.accepted_at, stats.drafted_at, strict=True)
    positions = "  ".join(f"{accepted}/{drafted}" for accepted, drafted in pairs)
    stages = ("prefill", "draft", "verify", "other")
    seconds = "  ".join(f"{stage} {getattr(stats, f'{stage}_seconds'):.2f}" for stage in stages)
    per_pass = stats.tokens / stats.steps if stats.steps else 0.0
    # More than that, if the text ended with a drafted token: the target's own was left out.
    length = f"{stats.mean_acceptance_length:.2f} = 1 + {stats.accepted}/{stats.steps}"
    table = Table(show_header=False, box=None)
    table.add_row("tokens per forward pass", f"{per_pass:.2f} = {stats.tokens}/{stats.steps}")
    table.add_row("mean acceptance length", length)
    table.add_row(
        "acceptance rate", f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens"
    )
    table.add_row("accepted/drafted at position 1, 2, ...", positions or "-")
    table.add_row("tokens/s per sequence", f"{stats.tokens_per_second:.1f} while decoding")
    table.add_row("seconds", seconds)
    return table
