"""Options that several commands share, and the LLM and Sampling they ask for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftahead.errors import ConfigError

if TYPE_CHECKING:
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.llm import LLM

Model = Annotated[str, typer.Option(help="Alias, hub id, folder or .gguf file.", show_default=True)]
Drafter = Annotated[
    str | None, typer.Option(help="auto, eagle, medusa, suffix, draft_model, none ...")
]
DraftModel = Annotated[str | None, typer.Option(help="The model, or the heads, that draft.")]
SpeculativeConfig = Annotated[
    str | None, typer.Option(help="The drafter as JSON, with vLLM's keys.", metavar="JSON")
]
Tokens = Annotated[
    int | None, typer.Option("--num-speculative-tokens", "-k", help="How far to draft.")
]
Exact = Annotated[str, typer.Option(help="law, or replay: bit for bit as plain decoding.")]
NotLossless = Annotated[
    bool,
    typer.Option("--not-lossless", help="Keep guesses that are merely typical: other text."),
]
Quantize = Annotated[str | None, typer.Option(help="int8: rounded weights, on the CPU.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 ...")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens the key-value cache holds.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Unset: as the model says.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this likely against the best.")]
MaxTokens = Annotated[int | None, typer.Option(help="The most to generate.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Ends the text; may be given often.")]


def drafter_from(
    drafter: str | None,
    draft_model: str | None,
    speculative_config: str | None,
    tokens: int | None,
) -> dict[str, Any]:
    """One drafter out of the options that can name one."""
    config: dict[str, Any] = {}
    if speculative_config is not None:
        try:
            config = json.loads(speculative_config)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--speculative-config is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError("--speculative-config must be a JSON object")
    given = {"method": drafter, "model": draft_model, "num_speculative_tokens": tokens}
    for key, value in given.items():
        if value is not None and config.setdefault(key, value) != value:
            raise ConfigError(f"{key!r} is {value!r} and, in --speculative-config, another")
    if draft_model is not None:
        config.setdefault("method", "draft_model")
    return config if "method" in config or "model" in config else {"method": "auto", **config}


def build_llm(
    model: str,
    drafter: str | Mapping[str, Any],
    *,
    exact: str = "distribution",
    lossless: bool = True,
    dtype: str | None = None,
    device: str | None = None,
    quantize: str | None = None,
    max_context: int | None = None,
    max_batch: int = 1,
) -> LLM:
    from draftahead.llm import LLM
    from draftahead.loader.hub import terminal_report

    with terminal_report() as report:
        report("loading torch and transformers")
        return LLM(
            model,
            drafter,
            exact=exact,  # type: ignore[arg-type]
            lossless=lossless,
            dtype=dtype,
            device=device,
            quantize=quantize,  # type: ignore[arg-type]
            max_context=max_context,
            max_batch=max_batch,
            report=report,
        )


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Any]:
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def parts_of(text: str) -> list[str]:
    """A list that was given with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers_of(option: str, text: str) -> list[int]:
    parts = parts_of(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option} takes whole numbers from 1, with commas, not {text!r}")
    return [int(part) for part in parts]


def output_console() -> Console:
    """For tables: as wide as the terminal, and wide enough where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def check_writable(file: Path) -> None:
    """Before the work, not after it."""
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def check_folder(folder: Path) -> None:
    """The same for a folder to write to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


def sampling_from(**fields: Any) -> SamplingParams:
    from draftahead.core.sampling_params import SamplingParams

    return SamplingParams(**{name: value for name, value in fields.items() if value is not None})
