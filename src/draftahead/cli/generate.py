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


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: options.Model = "smollm2",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    num_speculative_tokens: options.Tokens = None,
    exact: options.Exact = "distribution",
    not_lossless: options.NotLossless = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    max_tokens: options.MaxTokens = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="With the chat template, or as it is.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Tell what drafting did.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell why it drafted as it did.")
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantize: options.Quantize = None,
    max_context: options.MaxContext = None,
) -> None:
    """Continue a prompt. On a terminal, drafted tokens are green."""
    text = _standard_input() if prompt == "-" else prompt
    if not text:
        raise PromptError("the prompt is empty: give some text, or - and text on standard input")
    sampling = options.sampling_from(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop,
    )
    chosen = options.drafter_from(drafter, draft_model, speculative_config, num_speculative_tokens)
    llm = options.build_llm(
        model,
        chosen,
        exact=exact,
        lossless=not not_lossless,
        dtype=dtype,
        device=device,
        quantize=quantize,
        max_context=max_context,
    )
    if chat is None:
        chat = getattr(llm.tokenizer, "chat_template", None) is not None
    asked: Any = [{"role": "user", "content": text}] if chat else text
    if as_json:
        completion = llm.generate([asked], sampling)[0]
        print(json.dumps(as_dict(completion), ensure_ascii=False))
    else:
        completion = show_stream(llm, asked, sampling)
    notes = Console(stderr=True, highlight=False)
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
    llm: LLM, prompt: Any, sampling: SamplingParams, *, reuse: bool = False
) -> Completion:
    """Prints the text as it comes. Returns the completion; a Ctrl-C passes through."""
    console = Console(soft_wrap=True, highlight=False)
    stream = llm.stream(prompt, sampling, reuse=reuse)
    while True:
        try:
            piece = next(stream)
        except StopIteration as end:
            print()
            return end.value  # type: ignore[no-any-return]
        if console.is_terminal:
            style = DRAFTED if any(piece.drafted) else ""
            console.print(Text(piece.text, style=style), end="")
        else:  # as it is: rich would turn tabs into spaces
            sys.stdout.write(piece.text)
        sys.stdout.flush()


def as_dict(completion: Completion) -> dict[str, Any]:
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
    table = Table(show_header=False, box=None)
    table.add_row("tokens", f"{stats.tokens} in {stats.steps} target passes")
    table.add_row("mean acceptance length", f"{stats.mean_acceptance_length:.2f} tokens a pass")
    rate = f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens"
    table.add_row("acceptance rate", rate)
    by_depth = zip(stats.accepted_at, stats.drafted_at, strict=True)
    table.add_row("by depth", "  ".join(f"{a}/{d}" for a, d in by_depth) or "-")
    table.add_row("tokens/s", f"{stats.tokens_per_second:.1f} while decoding")
    names = ("prefill", "draft", "verify", "other")
    seconds = "  ".join(f"{name} {getattr(stats, name + '_seconds'):.2f}" for name in names)
    table.add_row("seconds", seconds)
    return table
