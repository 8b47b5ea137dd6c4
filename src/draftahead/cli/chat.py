"""`draftahead chat`: a conversation that keeps its key-value cache from turn to turn."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from draftahead.cli import options
from draftahead.cli.generate import show_stream, stats_table
from draftahead.errors import DraftaheadError

HELP = "/reset forgets the conversation, /stats tells of the last answer, /exit (or Ctrl-D) ends."


def chat(
    model: options.Model = "smollm2",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    num_speculative_tokens: options.Tokens = None,
    exact: options.Exact = "distribution",
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    max_tokens: options.MaxTokens = None,
    seed: options.Seed = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantize: options.Quantize = None,
    max_context: options.MaxContext = None,
) -> None:
    """Talk to a model. Drafted tokens are green; Ctrl-C stops an answer."""
    sampling = options.sampling_from(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
    )
    chosen = options.drafter_from(drafter, draft_model, speculative_config, num_speculative_tokens)
    llm = options.build_llm(
        model,
        chosen,
        exact=exact,
        dtype=dtype,
        device=device,
        quantize=quantize,
        max_context=max_context,
    )
    notes = Console(stderr=True)
    if sys.stdin.isatty():
        notes.print(HELP, style="dim")
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages, last = list(opening), None
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(opening)
        elif line == "/stats":
            notes.print(stats_table(last.stats) if last else "no answer yet")
        elif line.startswith("/"):
            notes.print(HELP, style="dim")
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                last = show_stream(llm, messages, sampling, reuse=True)
                messages.append({"role": "assistant", "content": last.text})
            except KeyboardInterrupt:  # the answer ends here, the conversation goes on
                print()
                messages.pop()
            except DraftaheadError as error:
                notes.print(f"error: {error} (/reset starts anew)", style="red")
                messages.pop()


def _read_line() -> str | None:
    """The next line without its end, or None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print()
        return None
