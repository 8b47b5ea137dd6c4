"""`draftahead bench`: drafters against plain decoding and other engines, interleaved in one run."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from draftahead.cli import options
from draftahead.errors import ConfigError

if TYPE_CHECKING:
    from draftahead.bench.configurations import Configuration


@options.grouped
def bench(
    model: options.LLMOptions,
    measured: options.BenchOptions,
    drafter: Annotated[
        str, Option(help="Drafters to measure, separated by commas.")
    ] = "none,lookup,auto",
    draft_model: options.DraftModel = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    not_lossless: options.NotLossless = False,
    batch: Annotated[str, Option(help="Batch sizes, separated by commas.")] = "1",
    against: Annotated[
        str, Option(help="Other engines: transformers, llama.cpp, separated by commas.")
    ] = "",
    latency: Annotated[
        bool, Option("--latency", help="Measure latency by number of tokens as well.")
    ] = False,
    shape: Annotated[
        str | None, Option(help="Random weights of a shape, such as llama-8b; no model.")
    ] = None,
    acceptance_rate: Annotated[
        float, Option(help="Simulated acceptance rate of the draft model, for --shape.")
    ] = 0.8,
) -> None:
    """Measure drafters against plain decoding and other engines, interleaved in one run."""
    from draftahead.bench.configurations import ENGINES
    from draftahead.bench.report import draw
    from draftahead.core.checks import choice

    engines = options.split_list(against)
    for engine in engines:
        choice(*ENGINES).of("--against", engine)
    if shape is not None:
        if not_lossless:
            raise ConfigError("--not-lossless is for real models: leave it out with --shape")
        report = _bench_shape(
            shape,
            measured,
            acceptance_rate=acceptance_rate,
            num_drafted=num_speculative_tokens or 4,
            dtype=model.dtype,
            device=model.device,
            against_transformers="transformers" in engines,
        )
    else:
        names = [name for name in options.split_list(drafter) if name != "none"]
        drafters = _configs(names, draft_model, num_speculative_tokens)
        sizes = options.split_numbers("--batch", batch)
        lossless = not not_lossless
        report = _bench_model(model, measured, drafters, engines, sizes, latency, lossless)
    measured.write(report, draw)


def _configs(
    names: list[str], draft_model: str | None, num_drafted: int | None
) -> dict[str, dict[str, Any]]:
    """The configuration of each drafter: the options that it takes of those that were given."""
    from draftahead.drafters.registry import options_of

    given = {"model": draft_model, "num_speculative_tokens": num_drafted}
    options_given = {key: value for key, value in given.items() if value is not None}
    if draft_model is not None and not any("model" in options_of(name) for name in names):
        raise ConfigError(f"--draft-model: none of {', '.join(names)} drafts with a model")
    return {
        name: {"method": name, **{k: v for k, v in options_given.items() if k in options_of(name)}}
        for name in names
    }


def _bench_shape(shape: str, measured: options.BenchOptions, **chosen: Any) -> dict[str, Any]:
    from draftahead.bench.report import latency_table, overhead_table, results_table
    from draftahead.bench.shape import measure_shape

    report = measure_shape(
        shape,
        measured.params(),
        num_prompts=measured.limit or 2,
        repeats=measured.repeats,
        **chosen,
    )
    rows = [*report["results"], *report["other_engines"]]
    console = options.output_console()
    for table in (latency_table(report), overhead_table(report), results_table(rows, shape)):
        console.print(table)
    return report


def _bench_model(
    model: options.LLMOptions,
    measured: options.BenchOptions,
    drafters: dict[str, Any],
    engines: list[str],
    sizes: list[int],
    latency: bool,
    lossless: bool,
) -> dict[str, Any]:
    from draftahead.bench.configurations import other_engines, with_drafters
    from draftahead.bench.latency import interpolated, measure_latency
    from draftahead.bench.machine import peak_memory, provenance
    from draftahead.bench.measure import measure, prepare, results_of
    from draftahead.bench.report import latency_table, results_table

    console, notes = options.output_console(), options.notes_console()
    prompts, params = measured.prompt_set(), measured.params()
    llm = model.build("none")
    runner, forward_ms = llm.engine.verifier.runner, None
    report = provenance() | {"model": model.model, "quantize": model.quantize}
    if latency:
        report |= measure_latency(runner)
        forward_ms = interpolated(report["latency"])
        console.print(latency_table(report))
    results: list[dict[str, Any]] = []
    for size in sizes:
        batches, context = prepare(llm, prompts, size, measured.limit, params)
        if (most := max(len(b.prompts) for b in batches)) < size:
            notes.print(f"batch {size}: a task has at most {most} prompts; see --limit")
        configurations: list[Configuration] = [
            *with_drafters(llm, drafters, size, context, lossless=lossless),
            *(other_engines(engines, model.model, runner.device) if size == 1 else ()),
        ]
        measurement = measure(configurations, batches, params, measured.repeats)
        if rows := results_of(measurement, forward_ms):
            title = f"{model.model}, batch {size}, {measured.max_tokens} tokens"
            console.print(results_table(rows, title))
        results += rows
        if measurement.interrupted:
            notes.print("interrupted: these are the results so far")
            break
        del configurations, measurement
        gc.collect()  # frees their KV caches before those of the next batch size are allocated
    report["results"] = [row for row in results if "drafter" in row]
    report["other_engines"] = [row for row in results if "drafter" not in row]
    report["peak_memory_bytes"] = peak_memory(runner.device)
    return report
