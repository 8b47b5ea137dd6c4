"""Options that several commands share, and what they are turned into.

A command takes them as dataclasses: `options.grouped` makes each field an option of the command.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from rich.console import Console
from typer import Option

from draftahead.bench.prompts import BenchPrompt, load_prompts
from draftahead.core.sampling_params import SamplingParams
from draftahead.errors import ConfigError
from draftahead.loader.progress import terminal_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftahead.llm import LLM


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its dataclass parameters in place of these parameters."""
    groups: dict[str, Any] = {n: h for n, h in get_type_hints(command).items() if is_dataclass(h)}

    def parameters_of(owner: Any) -> list[inspect.Parameter]:
        hints, found = get_type_hints(owner, include_extras=True), []
        for name, parameter in inspect.signature(owner).parameters.items():
            if is_dataclass(hints[name]):
                found += parameters_of(hints[name])
            else:
                keyword = inspect.Parameter.KEYWORD_ONLY
                found.append(parameter.replace(annotation=hints[name], kind=keyword))
        return found

    parameters = parameters_of(command)

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


# ------------------------------------------------------------------- values, checked early


def check_file(file: Path | None) -> Path | None:
    """Called before the work, so that a long run is not lost."""
    try:
        if file is not None:
            file.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    return file


def check_plot_file(file: Path | None) -> Path | None:
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'draftahead[bench]'")
    return check_file(file)


def check_folder(folder: Path) -> None:
    """The same for a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def split_numbers(option: str, text: str) -> list[int]:
    parts = split_list(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option} takes whole numbers from 1, separated by commas, not {text!r}")
    return [int(part) for part in parts]


# --------------------------------------------------------------------------- single options

DraftModel = Annotated[str | None, Option(help="The draft model, or the trained head.")]
NumSpeculativeTokens = Annotated[
    int | None,
    Option("--num-speculative-tokens", "-k", help="Drafted tokens per step; unset: automatic."),
]
NotLossless = Annotated[
    bool,
    Option("--not-lossless", help="Typical acceptance (Medusa): changes the distribution."),
]
Exact = Annotated[str | None, Option(help="distribution (the default), or replay: deterministic.")]
MaxContext = Annotated[int | None, Option(help="Tokens per sequence in the KV cache.")]
Json = Annotated[
    Path | None,
    Option("--json", help="Write a JSON report.", metavar="FILE", callback=check_file),
]
Plot = Annotated[
    Path | None, Option(help="Draw the report into a PNG file.", callback=check_plot_file)
]


# ---------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class ModelOptions:
    model: Annotated[str, Option(help="Alias, hub id, folder or .gguf file.")] = "smollm2"
    dtype: Annotated[str | None, Option(help="float32, bfloat16, float16 ...")] = None
    device: Annotated[str | None, Option(help="cpu, cuda, cuda:1 ...")] = None

    def load(self) -> tuple[PreTrainedModel, Any]:
        """The model and its tokenizer."""
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            from draftahead.loader.hub import load

            return load(self.model, dtype=self.dtype, device=self.device, progress=progress)


@dataclass(frozen=True)
class LLMOptions(ModelOptions):
    quantize: Annotated[str | None, Option(help="int8: quantized weights, CPU only.")] = None

    def build(self, drafter: Any, **options: Any) -> LLM:
        """An LLM for one sequence at a time, unless `options` say otherwise; None: its default."""
        own = {"dtype": self.dtype, "device": self.device, "quantize": self.quantize}
        given = {k: v for k, v in {"max_batch": 1, **own, **options}.items() if v is not None}
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            from draftahead.llm import LLM

            return LLM(self.model, drafter, report=progress, **given)


@dataclass(frozen=True)
class DrafterOptions:
    drafter: Annotated[
        str | None, Option(help="auto, eagle, medusa, suffix, draft_model, none ...")
    ] = None
    draft_model: DraftModel = None
    speculative_config: Annotated[
        str | None, Option(help="The drafter as JSON, with vLLM's keys.", metavar="JSON")
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
        float | None, Option(help="0 is greedy; unset: of the model's generation_config.")
    ] = None
    top_p: Annotated[float | None, Option(help="Keep the top tokens of this mass.")] = None
    top_k: Annotated[int | None, Option(help="Keep this many tokens; 0: all.")] = None
    min_p: Annotated[
        float | None, Option(help="Keep tokens of this share of the top probability.")
    ] = None
    max_tokens: Annotated[int | None, Option(help="Tokens to generate, at most.")] = None
    seed: Annotated[int | None, Option(help="The same seed gives the same text.")] = None

    def params(self, **more: Any) -> SamplingParams:
        return SamplingParams(**vars(self), **more)


@dataclass(frozen=True)
class BenchOptions:
    """What `bench` and `tune` share; `tune` has other defaults."""

    prompts: Annotated[
        str, Option(help="builtin, random (tokens), or a file in Spec-Bench's format.")
    ] = "builtin"
    limit: Annotated[int | None, Option(help="Prompts per task.", min=1)] = 2
    repeats: Annotated[int, Option(help="Repetitions; the median counts.", min=1)] = 3
    max_tokens: Annotated[int, Option(help="Tokens to generate per prompt.")] = 64
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="For temperatures above 0.")] = 0
    json_file: Json = None
    plot: Plot = None

    def prompt_set(self) -> list[BenchPrompt] | None:
        """None: random tokens."""
        return None if self.prompts == "random" else load_prompts(self.prompts)

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed
        )

    def write(self, report: dict[str, Any], draw: Callable[[dict[str, Any], Path], None]) -> None:
        if self.json_file is not None:
            self.json_file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        if self.plot is not None:
            draw(report, self.plot)


# ------------------------------------------------------------------------------- terminals


def output_console() -> Console:
    """For tables: as wide as the terminal, or 140 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def notes_console(*, quiet: bool = False) -> Console:
    """For messages beside the output, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
