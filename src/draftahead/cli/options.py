"""Options that several commands share, and what they are turned into.

A command takes them as dataclasses: `options.grouped` makes each field an option of the command.
"""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftahead.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftahead.core.sampling_params import SamplingParams
    from draftahead.llm import LLM


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its dataclass parameters in place of these parameters."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {n: hint for n, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            own_hints = get_type_hints(groups[name], include_extras=True)
            own = inspect.signature(groups[name]).parameters.values()
            parameters += [p.replace(annotation=own_hints[p.name]) for p in own]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        built = {}
        for name, group in groups.items():
            names = [field.name for field in fields(group) if field.name in given]
            built[name] = group(**{field: given.pop(field) for field in names})
        command(**given, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


# --------------------------------------------------------------------------- single options

DraftModel = Annotated[str | None, typer.Option(help="The draft model, or the trained head.")]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "-k", help="Drafted tokens per step; unset: as pays."),
]
NotLossless = Annotated[
    bool,
    typer.Option("--not-lossless", help="Typical acceptance (Medusa): changes the distribution."),
]
Exact = Annotated[
    str | None, typer.Option(help="distribution (the default), or replay: deterministic.")
]
MaxContext = Annotated[int | None, typer.Option(help="Tokens per sequence in the KV cache.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write a JSON report.", metavar="FILE")]
Plot = Annotated[Path | None, typer.Option(help="Draw the report into a PNG file.")]


# ---------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class ModelOptions:
    model: Annotated[str, typer.Option(help="Alias, hub id, folder or .gguf file.")] = "smollm2"
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 ...")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...")] = None

    def load(self) -> tuple[PreTrainedModel, Any]:
        """The model and its tokenizer."""
        from draftahead.loader.hub import load
        from draftahead.loader.progress import terminal_progress

        with terminal_progress() as progress:
            progress("loading torch and transformers")
            return load(self.model, dtype=self.dtype, device=self.device, progress=progress)


@dataclass(frozen=True)
class LLMOptions(ModelOptions):
    quantize: Annotated[str | None, typer.Option(help="int8: quantized weights, CPU only.")] = None

    def build(self, drafter: Any, **options: Any) -> LLM:
        """An LLM for one sequence at a time, unless `options` say otherwise; None: its default."""
        from draftahead.llm import LLM
        from draftahead.loader.progress import terminal_progress

        options = {"max_batch": 1, "dtype": self.dtype, "device": self.device, **options}
        options["quantize"] = self.quantize
        given = {name: value for name, value in options.items() if value is not None}
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            return LLM(self.model, drafter, report=progress, **given)


@dataclass(frozen=True)
class DrafterOptions:
    drafter: Annotated[
        str | None, typer.Option(help="auto, eagle, medusa, suffix, draft_model, none ...")
    ] = None
    draft_model: DraftModel = None
    speculative_config: Annotated[
        str | None, typer.Option(help="The drafter as JSON, with vLLM's keys.", metavar="JSON")
    ] = None

    def config(self, num_speculative_tokens: int | None = None) -> dict[str, Any]:
        """The drafter's configuration, from all options that can name one."""
        config: dict[str, Any] = {}
        if self.speculative_config is not None:
            try:
                config = json.loads(self.speculative_config)
            except json.JSONDecodeError as error:
                raise ConfigError(f"--speculative-config is not JSON: {error}") from None
            if not isinstance(config, dict):
                raise ConfigError("--speculative-config must be a JSON object")
        given = {
            "method": self.drafter,
            "model": self.draft_model,
            "num_speculative_tokens": num_speculative_tokens,
        }
        for key, value in given.items():
            if value is not None and config.setdefault(key, value) != value:
                raise ConfigError(f"{key!r} is {value!r} and, in --speculative-config, another")
        if self.draft_model is not None:
            config.setdefault("method", "draft_model")
        return config if "method" in config or "model" in config else {"method": "auto", **config}


@dataclass(frozen=True)
class SamplingOptions:
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; unset: of the model's generation_config.")
    ] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the top tokens of this mass.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep this many tokens; 0: all.")] = None
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens of this share of the top probability.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate, at most.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None

    def params(self, **more: Any) -> SamplingParams:
        return sampling_params(**vars(self), **more)


@dataclass(frozen=True)
class BenchOptions:
    """What `bench` and `tune` share; `tune` has other defaults."""

    prompts: Annotated[
        str, typer.Option(help="builtin, random (tokens), or a file in Spec-Bench's format.")
    ] = "builtin"
    limit: Annotated[int | None, typer.Option(help="Prompts per task.", min=1)] = 2
    repeats: Annotated[int, typer.Option(help="Repetitions; the median counts.", min=1)] = 3
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 64
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0
    json_file: Json = None
    plot: Plot = None

    def params(self) -> SamplingParams:
        return sampling_params(
            temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed
        )

    def check_files(self) -> None:
        for file in (self.json_file, self.plot):
            if file is not None:
                check_writable(file)

    def write(self, report: dict[str, Any], draw: Callable[[dict[str, Any], Path], None]) -> None:
        if self.json_file is not None:
            self.json_file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        if self.plot is not None:
            draw(report, self.plot)


def sampling_params(**fields: Any) -> SamplingParams:
    from draftahead.core.sampling_params import SamplingParams

    return SamplingParams(**{name: value for name, value in fields.items() if value is not None})


# --------------------------------------------------------------------- values and terminals


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def split_numbers(option: str, text: str) -> list[int]:
    parts = split_list(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option} takes whole numbers from 1, separated by commas, not {text!r}")
    return [int(part) for part in parts]


def output_console() -> Console:
    """For tables: as wide as the terminal, or 140 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def notes_console(*, quiet: bool = False) -> Console:
    """For messages beside the output, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function that advances the bar by one."""
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def check_writable(file: Path) -> None:
    """Called before the work, so that a long run is not lost."""
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def check_folder(folder: Path) -> None:
    """The same for a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
