"""Options that several commands share, and what they are turned into.

A command takes them as dataclasses: `command.grouped` makes each field an option of the command.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from draftahead.bench.prompts import BenchPrompt, load_prompts
from draftahead.cli import checks
from draftahead.cli.command import DRAFTER_OPTIONS
from draftahead.cli.imports import importing
from draftahead.cli.terminal import notes_console
from draftahead.core.sampling_params import SamplingParams
from draftahead.errors import ConfigError, OtherEngineError
from draftahead.loader.progress import terminal_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftahead.llm import LLM

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
System = Annotated[str | None, Option(help="The system message.")]
Batch = Annotated[int, Option(min=1, help="Sequences at once.")]
MaxTokens = Annotated[int, Option(min=1, help="Tokens to generate per prompt, at most.")]
Temperature = Annotated[float, Option(help="0 is greedy.")]
Seed = Annotated[int, Option(help="The same seed gives the same text.")]
Exact = Annotated[str | None, Option(help="distribution (the default), or replay: deterministic.")]
MaxContext = Annotated[int | None, Option(min=1, help="Tokens per sequence in the KV cache.")]
Json = Annotated[
    Path | None,
    Option("--json", help="Write a JSON report.", metavar="FILE", callback=checks.check_file),
]
Plot = Annotated[
    Path | None,
    Option(
        help="Draw the report: .png, .svg or .pdf.",
        metavar="FILE",
        callback=checks.check_plot_file,
    ),
]


# ---------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class ModelOptions:
    model: Annotated[str, Option(help="Alias, hub id, folder or .gguf file.")] = "smollm2"
    dtype: Annotated[
        str | None,
        Option(help="float32 or bfloat16; unset: the model's own, computed in float32 on a CPU."),
    ] = None
    device: Annotated[str | None, Option(help="cpu or cuda:1; unset: a GPU, if any.")] = None
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a hub id.")] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False

    def load(self) -> tuple[PreTrainedModel, Any]:
        """The model and its tokenizer."""
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            with importing():
                from draftahead.loader.hub import load

            given = {field.name: getattr(self, field.name) for field in fields(ModelOptions)}
            return load(given.pop("model"), progress=progress, **given)


@dataclass(frozen=True)
class LLMOptions(ModelOptions):
    quantize: Annotated[str | None, Option(help="int8: quantized weights, CPU only.")] = None
    activations: Annotated[
        str | None, Option(help="Inputs of a .gguf file's layers: int24 (unset), int8 or float32.")
    ] = None
    kv_cache_dtype: Annotated[
        str | None, Option(help="bfloat16 or int8: rounded keys and values, CPU only.")
    ] = None

    def build(self, drafter: Any, **options: Any) -> LLM:
        """An LLM for one sequence at a time, unless `options` say otherwise; None: its default."""
        given = {"max_batch": 1, **vars(self), **options}
        given = {name: value for name, value in given.items() if value is not None}
        with terminal_progress() as progress:
            progress("loading torch and transformers")
            with importing():
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
        config = {}
        if self.speculative_config is not None:
            config = checks.json_config(self.speculative_config)
        given = {
            "method": self.drafter,
            "model": self.draft_model,
            "num_speculative_tokens": num_speculative_tokens,
        }
        for key, value in given.items():
            if value is not None and config.setdefault(key, value) != value:
                flag = "--" + DRAFTER_OPTIONS[key].replace("_", "-")
                raise ConfigError(f"{flag} is {value}; --speculative-config differs")
        config.setdefault("method", "draft_model" if "model" in config else "auto")
        checks.check_drafter(config)
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
        int | None,
        Option(min=1, help="Tokens to generate per prompt, at most; unset: the model's, or 256."),
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
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    seed: Seed = 0
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
        if report["results"]:
            if self.json_file is not None:
                self.json_file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
            if self.plot is not None:
                draw(report, self.plot)
        if "interrupted" in report:
            kept = "these are the results so far" if report["results"] else "there are no results"
            notes_console().print(f"interrupted: {kept}")
            raise Exit(130)
        if "failed" in report:
            raise OtherEngineError("; ".join(report["failed"].values()))
