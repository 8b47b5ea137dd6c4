"""`draftahead generate`: one prompt, one text."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftahead.cli import options
from draftahead.errors import PromptError

if TYPE_CHECKING:
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.core.stats import Stats
    from draftahead.core.types import Completion
    from draftahead.llm import LLM

DRAFTED = "bold green"


@options.grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    sampling: options.SamplingOptions,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    exact: options.Exact = None,
    not_lossless: options.NotLossless = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="With or without the chat template.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print drafting statistics.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what the policy decided, and why.")
    ] = False,
    max_context: options.MaxContext = None,
) -> None:
    """Continue a prompt. On a terminal, drafted tokens are green."""
    text = _standard_input() if prompt == "-" else prompt
    if not text:
        raise PromptError("the prompt is empty: give some text, or - and text on standard input")
    params = sampling.params(stop=stop)
    llm = model.build(
        drafter.config(num_speculative_tokens),
        exact=exact,
        lossless=not not_lossless,
        max_context=max_context,
    )
    if chat is None:
        chat = getattr(llm.tokenizer, "chat_template", None) is not None
    request: Any = [{"role": "user", "content": text}] if chat else text
    if as_json:
        completion = llm.generate([request], params)[0]
        print(json.dumps(_as_dict(completion), ensure_ascii=False))
    else:
        completion = show_stream(llm, request, params)
    notes = options.notes_console()
    reasons = llm.explain()
    if not completion.lossless:
        notes.print(reasons.pop(0), style="red")
    if stats:
        notes.print(stats_table(completion.stats))
    if explain:
        for reason in reasons:
            notes.print(f"- {reason}")


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text ({error})") from None


def show_stream(
    llm: LLM, prompt: Any, params: SamplingParams, *, reuse: bool = False
) -> Completion:
    """Prints the text as it is generated and returns the completion. Ctrl-C passes through."""
    console = Console(soft_wrap=True, highlight=False)
    stream = llm.stream(prompt, params, reuse=reuse)
    while True:
        try:
            chunk = next(stream)
        except StopIteration as end:
            print()
            return end.value  # type: ignore[no-any-return]
        if console.is_terminal:
            style = DRAFTED if any(chunk.drafted) else ""
            console.print(Text(chunk.text, style=style), end="")
        else:  # not through rich, which turns tabs into spaces
            sys.stdout.write(chunk.text)
        sys.stdout.flush()


def _as_dict(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "drafted": completion.drafted,
        "seed": completion.seed,
        "lossless": completion.lossless,
        "prompt_tokens": completion.stats.prompt_tokens,
        "stats": completion.stats.as_dict(),
    }


def stats_table(stats: Stats) -> Table:
    pairs = zip(stats.accepted_at, stats.drafted_at, strict=True)
    positions = "  ".join(f"{accepted}/{drafted}" for accepted, drafted in pairs)
    stages = ("prefill", "draft", "verify", "other")
    table = Table(show_header=False, box=None)
    for name, value in {
        "tokens": f"{stats.tokens} in {stats.steps} forward passes",
        "mean acceptance length": f"{stats.mean_acceptance_length:.2f} tokens per forward pass",
        "acceptance rate": f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens",
        "accepted/drafted at position 1, 2, ...": positions or "-",
        "tokens/s": f"{stats.tokens_per_second:.1f} while decoding",
        "seconds": "  ".join(f"{s} {getattr(stats, s + '_seconds'):.2f}" for s in stages),
    }.items():
        table.add_row(name, value)
    return table
