"""`draftahead chat`: a conversation that keeps its KV cache from turn to turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import platformdirs
from typer import Exit, Option

from draftahead.bench.prompts import has_chat_template
from draftahead.cli import checks, command, options, terminal
from draftahead.cli.conversation import Conversation
from draftahead.cli.generate import show_stream, stats_table
from draftahead.errors import ConfigError, DraftaheadError, similar

if TYPE_CHECKING:
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.core.types import Completion
    from draftahead.llm import LLM

HELP = f"""\
/help         this list
/reset        start a new conversation
/save FILE    write the conversation: a JSON line, for --prompts as well
/load FILE    go on with a conversation that was saved
/stats        statistics of the last answer
/exit         end; so does Ctrl-D
Ctrl-C        stop an answer; what there is of it stays in the conversation
{terminal.FENCE}           before and after a message of several lines, or with / first"""
ENDS = ("/exit", "/quit")


@command.grouped
def chat(
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    sampling: options.SamplingOptions,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    exact: options.Exact = None,
    not_lossless: options.NotLossless = False,
    system: options.System = None,
    load: Annotated[
        Path | None, Option(help="Go on with a conversation that was saved.", metavar="FILE")
    ] = None,
    save: Annotated[
        Path | None,
        Option(
            help="Write the conversation to a file, after each answer.",
            metavar="FILE",
            callback=checks.check_file,
        ),
    ] = None,
    max_context: options.MaxContext = None,
) -> None:
    """Talk to a model.

    Drafted tokens are green; Ctrl-C stops an answer; /help lists what can be typed.
    """
    if system is not None and load is not None:
        raise ConfigError("--system is for a new conversation: leave it or --load out")
    conversation = Conversation(system)
    if load is not None:
        conversation.load(load)
    if save is not None:
        conversation.check_new(save)
    checks.check_text("--system", system or "")
    params = sampling.params()
    config = drafter.config(num_speculative_tokens)
    llm = model.build(config, exact=exact, lossless=not not_lossless, max_context=max_context)
    if not has_chat_template(llm.tokenizer):
        raise ConfigError("this model has no chat template: use `draftahead generate` instead")
    session = Session(llm, params, conversation, save)
    if not_lossless:
        terminal.notes_console().print(llm.explain()[0], style="red")
    if not terminal.is_interactive():
        session.run()
    else:
        terminal.notes_console().print("/help lists what can be typed here", style="dim")
        history = platformdirs.user_state_path("draftahead") / "chat_history"
        with terminal.line_editing(history):
            session.run()
    if session.failed and not terminal.is_interactive():
        raise Exit(1)


@dataclass
class Session:
    """Reads messages and commands until the end, and answers them."""

    llm: LLM
    params: SamplingParams
    conversation: Conversation
    file: Path | None  # written after each answer
    last: Completion | None = None
    failed: bool = False

    def run(self) -> None:
        while True:
            try:
                typed = terminal.read_message()
            except KeyboardInterrupt:
                if not terminal.is_interactive():
                    raise
                print()  # what was typed is given up
                self._note("/exit or Ctrl-D ends the chat")
                continue
            if typed is None or (typed.is_command and typed.text in ENDS):
                return
            try:
                if typed.is_command:
                    self._command(*typed.text.split(maxsplit=1))
                elif typed.text.strip():
                    self._answer(typed.text)
            except DraftaheadError as error:
                self.failed = True
                terminal.error_console().print(f"error: {error}", style="red", markup=False)

    def _command(self, name: str, argument: str = "") -> None:
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: terminal.error_console().print(HELP, markup=False),
            "/reset": self.conversation.reset,
            "/save": lambda: self._save(argument),
            "/load": lambda: self._load(argument),
            "/stats": self._stats,
        }
        if name not in commands:
            hint = similar(name, [*commands, *ENDS])
            raise ConfigError(f"no command {name!r}{hint} (/help lists them)")
        commands[name]()

    def _save(self, argument: str) -> None:
        file = _named(argument, "/save")
        self.conversation.check_new(file)
        self.conversation.save(file)
        self._note(f"saved to {file}: {self.conversation}")

    def _load(self, argument: str) -> None:
        file = _named(argument, "/load")
        self.conversation.load(file)
        self._note(f"loaded from {file}: {self.conversation}")

    def _stats(self) -> None:
        found = stats_table(self.last.stats) if self.last else "no answer yet"
        terminal.error_console().print(found)

    def _answer(self, text: str) -> None:
        """Shows an answer. What was shown of it is in the conversation, whatever ends it."""
        shown: list[str] = []
        is_complete = False
        messages = [*self.conversation.messages, {"role": "user", "content": text}]
        try:
            self.last = show_stream(self.llm, messages, self.params, reuse=True, shown=shown)
            is_complete = True
            if self.last.finish_reason == "length":
                self._note("(the answer was cut here: see --max-tokens and --max-context)")
        except KeyboardInterrupt:
            print()
            if not terminal.is_interactive():
                raise
            if shown:
                self._note("(interrupted: what there is of the answer stays in the conversation)")
            else:
                self._note("(interrupted before the answer began: the message is left out)")
        finally:
            if shown or is_complete:
                self.conversation.add(text, "".join(shown))
                if self.file is not None:
                    self.conversation.save(self.file)

    def _note(self, text: str) -> None:
        terminal.notes_console().print(text, style="dim", markup=False)


def _named(argument: str, name: str) -> Path:
    if not argument.strip():
        raise ConfigError(f"{name} needs the name of a file")
    return Path(argument.strip()).expanduser()
