"""`draftahead chat`: a conversation that keeps its KV cache from turn to turn."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from typer import Option

from draftahead.cli import options
from draftahead.cli.generate import show_stream, stats_table
from draftahead.errors import DraftaheadError

HELP = "/reset clears the conversation, /stats prints statistics of the last answer, /exit ends."


@options.grouped
def chat(
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    sampling: options.SamplingOptions,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    exact: options.Exact = None,
    system: Annotated[str | None, Option(help="The system message.")] = None,
    max_context: options.MaxContext = None,
) -> None:
    """Talk to a model.

    Drafted tokens are green; Ctrl-C stops an answer.
    """
    params = sampling.params()
    config = drafter.config(num_speculative_tokens)
    llm = model.build(config, exact=exact, max_context=max_context)
    notes = options.notes_console()
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
                last = show_stream(llm, messages, params, reuse=True)
                messages.append({"role": "assistant", "content": last.text})
            except KeyboardInterrupt:  # ends the answer, not the conversation
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
