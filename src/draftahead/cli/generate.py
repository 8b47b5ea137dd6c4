"""`draftahead generate`: one prompt, one text."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

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
    prompt: Annotated[str, Argument(help="The prompt; - reads it from standard input.")],
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    sampling: options.SamplingOptions,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    exact: options.Exact = None,
    not_lossless: options.NotLossless = False,
    stop: Annotated[list[str] | None, Option(help="Stop string; repeatable.")] = None,
    chat: Annotated[
        bool | None, Option("--chat/--raw", help="With or without the chat template.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print a JSON object.")] = False,
    stats: Annotated[bool, Option("--stats", help="Print drafting statistics.")] = False,
    explain: Annotated[
        bool, Option("--explain", help="Print what the policy decided, and why.")
    ] = False,
    max_context: options.MaxContext = None,
) -> None:
    """Continue a prompt.

    On a terminal, drafted tokens are green.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text ({error})") from None
    if not text:
        raise PromptError("the prompt is empty: give some text, or - and text on standard input")
    params = sampling.params(stop=stop or ())
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
        names = ("text", "token_ids", "finish_reason", "drafted", "seed", "lossless")
        shown = {name: getattr(completion, name) for name in names}
        counts = completion.stats
        shown |= {"prompt_tokens": counts.prompt_tokens, "stats": counts.as_dict()}
        print(json.dumps(shown, ensure_ascii=False))
    else:
        completion = show_stream(llm, request, params)
    notes, reasons = options.notes_console(), llm.explain()
    if not completion.lossless:
        notes.print(reasons.pop(0), style="red")
    if stats:
        notes.print(stats_table(completion.stats))
    if explain:
        for reason in reasons:
            notes.print(f"- {reason}")


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


def stats_table(stats: Stats) -> Table:
    pairs = zip(stats.accepted_at, stats.drafted_at, strict=True)
    positions = "  ".join(f"{accepted}/{drafted}" for accepted, drafted in pairs)
    stages = ("prefill", "draft", "verify", "other")
    seconds = "  ".join(f"{stage} {getattr(stats, f'{stage}_seconds'):.2f}" for stage in stages)
    length = f"{stats.mean_acceptance_length:.2f} tokens per forward pass"
    table = Table(show_header=False, box=None)
    table.add_row("tokens", f"{stats.tokens} in {stats.steps} forward passes")
    table.add_row("mean acceptance length", length)
    table.add_row(
        "acceptance rate", f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens"
    )
    table.add_row("accepted/drafted at position 1, 2, ...", positions or "-")
    table.add_row("tokens/s", f"{stats.tokens_per_second:.1f} while decoding")
    table.add_row("seconds", seconds)
    return table
