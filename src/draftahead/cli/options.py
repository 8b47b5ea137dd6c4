"""Options that several commands share, and what they are turned into.

A command takes them as dataclasses: `options.grouped` makes each field an option of the command.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from rich.console import Console
from typer import Context, Exit, Option
from typer.models import OptionInfo

from draftahead.bench.prompts import BenchPrompt, load_prompts
from draftahead.core.sampling_params import SamplingParams
from draftahead.errors import ConfigError, DraftaheadError
from draftahead.loader.progress import is_quiet, terminal_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftahead.llm import LLM


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its dataclass parameters in place of these parameters. Errors
    that it raises name options as they are typed."""
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

    parameters = parameters_of(command) + parameters_of(_Verbosity)
    flags = {p.name: flag for p in parameters if (flag := _flag_of(p))}
    flags.pop("draft_model", None)  # also the name of a drafter

    @functools.wraps(command)
    def run(verbose: bool, quiet: bool, **given: Any) -> None:
        built = {}
        for name, group in groups.items():
            names = [field.name for field in fields(group) if field.name in given]
            built[name] = group(**{field: given.pop(field) for field in names})
        try:
            command(**given, **built)
        except DraftaheadError as error:
            error.args = (_as_typed(str(error), flags),)
            raise

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _flag_of(parameter: inspect.Parameter) -> str | None:
    """How an option is typed; None: it is no option."""
    for info in get_args(parameter.annotation)[1:]:
        if isinstance(info, OptionInfo):
            flags = (flag for flag in info.param_decls or () if flag.startswith("--"))
            return next(flags, "--" + parameter.name.replace("_", "-")).partition("/")[0]
    return None


def check_unused(context: Context, names: Iterable[str], where: str) -> None:
    """Refuses options that were typed, but say nothing there."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} says nothing {where}: leave it out")


def _as_typed(message: str, flags: Mapping[str, str]) -> str:
    """An error of the library in the words of the command line: `--max-tokens`, not `max_tokens`.
    Names in quotes, and those of a list of known ones, are keys of a configuration."""
    message, known, rest = message.partition(" (known: ")
    message = message.replace("lossless=False", "--not-lossless")
    for name, flag in flags.items():
        message = re.sub(rf"(?<![\w'-]){name}=", f"{flag} ", message)
        message = re.sub(rf"^{name}(?= (must|cannot|needs|is for)\b)", flag, message)
        if "_" in name:
            message = re.sub(rf"(?<![\w'-]){name}\b(?!')", flag, message)
    return message + known + rest


# --------------------------------------------------------------------------------- verbosity


def _log(level: int) -> Callable[[bool], bool]:
    def switch(on: bool) -> bool:
        if on:  # without a handler, Python prints warnings only
            logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
            logging.getLogger("draftahead").setLevel(level)
        return on

    return switch


Verbose = Annotated[
    bool,
    Option("--verbose", "-v", callback=_log(logging.INFO), help="Log decisions and fallbacks."),
]
Quiet = Annotated[
    bool,
    Option("--quiet", "-q", callback=_log(logging.ERROR), help="No progress, notes or warnings."),
]


@dataclass(frozen=True)
class _Verbosity:
    """Every command takes these after its name as well as before."""

    verbose: Verbose = False
    quiet: Quiet = False


# ------------------------------------------------------------------- values, checked early


def check_file(file: Path | None) -> Path | None:
    """Called before the work, so that a long run is not lost. Leaves no file behind."""
    try:
        if file is not None:
            existed = file.exists()
            file.open("a").close()
            if not existed:
                file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    return file


def check_plot_file(file: Path | None) -> Path | None:
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'draftahead[bench]'")
    return check_file(file)


def check_folder(folder: Path) -> None:
    """The same for a folder, which need not exist."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


DRAFTER_FLAGS = {  # by the key of a drafter's configuration
    "method": "--drafter",
    "model": "--draft-model",
    "num_speculative_tokens": "--num-speculative-tokens",
}


def json_config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config must be a JSON object")
    return config


def check_drafter(config: dict[str, Any], given: Iterable[str]) -> None:
    """Before the model is loaded; `given` are the keys that have an option of their own."""
    from draftahead.drafters import registry

    try:
        registry.check(config)
    except DraftaheadError as error:
        message = str(error)
        for key in given:
            message = message.replace(f"option {key!r}", DRAFTER_FLAGS[key])
        raise type(error)(message) from None


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
    Option(
        "--num-speculative-tokens", "-k", min=1, help="Drafted tokens per step; unset: automatic."
    ),
]
NotLossless = Annotated[
    bool,
    Option("--not-lossless", help="Typical acceptance (Medusa): changes the distribution."),
]
Exact = Annotated[str | None, Option(help="distribution (the default), or replay: deterministic.")]
MaxContext = Annotated[int | None, Option(min=1, help="Tokens per sequence in the KV cache.")]
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
    dtype: Annotated[str | None, Option(help="Unset: float32 on a CPU, else the model's own.")] = (
        None
    )
    device: Annotated[str | None, Option(help="cpu or cuda:1; unset: a GPU, if any.")] = None
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a hub id.")] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False

    def load(self) -> tuple[PreTrainedModel, Any]:
        """The model and its tokenizer."""
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            from draftahead.loader.hub import load

            given = {field.name: getattr(self, field.name) for field in fields(ModelOptions)}
            return load(given.pop("model"), progress=progress, **given)


@dataclass(frozen=True)
class LLMOptions(ModelOptions):
    quantize: Annotated[str | None, Option(help="int8: quantized weights, CPU only.")] = None

    def build(self, drafter: Any, **options: Any) -> LLM:
        """An LLM for one sequence at a time, unless `options` say otherwise; None: its default."""
        given = {"max_batch": 1, **vars(self), **options}
        given = {name: value for name, value in given.items() if value is not None}
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            from draftahead.llm import LLM

            return LLM(given.pop("model"), drafter, report=progress, **given)


@dataclass(frozen=True)
class DrafterOptions:
    drafter: Annotated[
        str | None, Option(help="Unset: auto. `draftahead drafters` lists them.")
    ] = None
    draft_model: DraftModel = None
    speculative_config: Annotated[
        str | None, Option(help="The drafter as JSON, with vLLM's keys.", metavar="JSON")
    ] = None

    def config(self, num_speculative_tokens: int | None = None) -> dict[str, Any]:
        """The drafter's configuration, from all options that can name one; checked."""
        config = {} if self.speculative_config is None else json_config(self.speculative_config)
        given = {
            "method": self.drafter,
            "model": self.draft_model,
            "num_speculative_tokens": num_speculative_tokens,
        }
        given = {key: value for key, value in given.items() if value is not None}
        for key, value in given.items():
            if config.setdefault(key, value) != value:
                raise ConfigError(f"{DRAFTER_FLAGS[key]} is {value}; --speculative-config differs")
        config.setdefault("method", "draft_model" if "model" in config else "auto")
        check_drafter(config, given)
        return config


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
    repetition_penalty: Annotated[
        float | None, Option(help="Above 1: tokens of prompt and output become less likely.")
    ] = None
    presence_penalty: Annotated[
        float, Option(help="Taken from the logits of tokens of the output.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="The same, times how often they occur there.")
    ] = 0.0
    max_tokens: Annotated[
        int | None, Option(help="Tokens to generate, at most; unset: the model's, or 256.")
    ] = None
    seed: Annotated[int | None, Option(help="The same seed gives the same text.")] = None

    def params(self, **more: Any) -> SamplingParams:
        return SamplingParams(**vars(self), **more)


@dataclass(frozen=True)
class BenchOptions:
    """What `bench` and `tune` share; `tune` has other defaults."""

    prompts: Annotated[
        str,
        Option(help="builtin, random (tokens), or JSON lines of prompt, messages, turns or text."),
    ] = "builtin"
    limit: Annotated[int | None, Option(help="Prompts per task.", min=1)] = 2
    repeats: Annotated[int, Option(help="Repetitions; the median counts.", min=1)] = 3
    max_tokens: Annotated[int, Option(help="Tokens to generate per prompt.")] = 64
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, Option(help="For temperatures above 0.")] = 0
    exact: Exact = None
    max_context: MaxContext = None
    json_file: Json = None
    plot: Plot = None

    def prompt_set(self) -> list[BenchPrompt] | None:
        """None: random tokens."""
        return None if self.prompts == "random" else load_prompts(self.prompts)

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed
        )

    def build(self, model: LLMOptions) -> LLM:
        """The target, without a drafter."""
        return model.build("none", exact=self.exact, max_context=self.max_context)

    def write(self, report: dict[str, Any], draw: Callable[[dict[str, Any], Path], None]) -> None:
        """The report, maybe of an interrupted run: what it has measured is kept."""
        interrupted = "interrupted" in report
        if self.json_file is not None:
            self.json_file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        if self.plot is not None and (report["results"] or not interrupted):
            draw(report, self.plot)
        if interrupted:
            kept = "these are the results so far" if report["results"] else "there are no results"
            notes_console().print(f"interrupted: {kept}")
            raise Exit(130)


# ------------------------------------------------------------------------------- terminals


def output_console() -> Console:
    """For tables: as wide as the terminal, or 140 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def error_console() -> Console:
    """For what was asked for beside the output, and errors, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def notes_console(*, quiet: bool = False) -> Console:
    """The same for messages that --quiet switches off."""
    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet or is_quiet())
