"""`draftahead bench`: drafters against plain decoding and other engines, interleaved in one run."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftahead.bench.prompts import load_prompts
from draftahead.cli import options
from draftahead.errors import ConfigError, nearest

if TYPE_CHECKING:
    from draftahead.bench.configurations import Configuration


@options.grouped
def bench(
    model: options.LLMOptions,
    measured: options.BenchOptions,
    drafter: Annotated[
        str, typer.Option(help="Drafters to measure, separated by commas.")
    ] = "none,lookup,auto",
    draft_model: options.DraftModel = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    not_lossless: options.NotLossless = False,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    against: Annotated[
        str, typer.Option(help="Other engines: transformers, llama.cpp, separated by commas.")
    ] = "",
    latency: Annotated[
        bool, typer.Option("--latency", help="Measure latency by number of tokens as well.")
    ] = False,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of a shape, such as llama-8b; no model.")
    ] = None,
    acceptance_rate: Annotated[
        float, typer.Option(help="Simulated acceptance rate of the draft model, for --shape.")
    ] = 0.8,
) -> None:
    """Measure drafters against plain decoding and other engines, interleaved in one run."""
    from draftahead.bench import report as reports
    from draftahead.bench.configurations import ENGINES, other_engines, with_drafters
    from draftahead.bench.latency import REPEATS, WARM_UP, interpolated, measure_latency
    from draftahead.bench.machine import peak_memory, provenance
    from draftahead.bench.measure import measure, prepare, results_of
    from draftahead.bench.shape import measure_shape

    console, notes = options.output_console(), options.notes_console()
    progress_bar = partial(options.progress_bar, notes)
    measured.check_files()
    engines = options.split_list(against)
    for engine in engines:
        if engine not in ENGINES:
            raise ConfigError(f"unknown engine {engine!r}{nearest(engine, ENGINES)}")
    params = measured.params()
    if shape is not None:
        if not_lossless:
            raise ConfigError("--not-lossless is for real models: leave it out with --shape")
        report = measure_shape(
            shape,
            params,
            acceptance_rate=acceptance_rate,
            num_drafted=num_speculative_tokens or 4,
            dtype=model.dtype,
            device=model.device,
            num_prompts=measured.limit or 2,
            repeats=measured.repeats,
            against_transformers="transformers" in engines,
            progress_bar=progress_bar,
        )
        console.print(reports.latency_table(report))
        console.print(reports.overhead_table(report))
        rows = [*report["results"], *report["other_engines"]]
        console.print(reports.results_table(rows, shape))
        measured.write(report, reports.draw)
        return
    names = options.split_list(drafter)
    drafters = {n: _config(n, draft_model, num_speculative_tokens) for n in names if n != "none"}
    sizes = options.split_numbers("--batch", batch)
    prompts = None if measured.prompts == "random" else load_prompts(measured.prompts)
    llm = model.build("none")
    runner = llm.engine.verifier.runner
    report = provenance() | {"model": model.model, "quantize": model.quantize}
    if latency:
        with progress_bar("latency by number of tokens", REPEATS + WARM_UP) as step:
            report |= measure_latency(runner, progress=step)
        console.print(reports.latency_table(report))
    forward_ms = interpolated(report["latency"]) if latency else None
    results: list[dict[str, Any]] = []
    for size in sizes:
        batches, context = prepare(llm, prompts, size, measured.limit, params)
        if (most := max(len(b.prompts) for b in batches)) < size:
            notes.print(f"batch {size}: a task has at most {most} prompts; see --limit")
        ours = with_drafters(llm, drafters, size, context, lossless=not not_lossless)
        configurations: list[Configuration] = [*ours]
        if size == 1:
            configurations += other_engines(engines, model.model, runner.device)
        runs = len(batches) * len(configurations) * measured.repeats
        with progress_bar(f"batch {size}", runs) as step:
            measurement = measure(configurations, batches, params, measured.repeats, step)
        if rows := results_of(measurement, forward_ms):
            title = f"{model.model}, batch {size}, {measured.max_tokens} tokens"
            console.print(reports.results_table(rows, title))
        results += rows
        if measurement.interrupted:
            notes.print("interrupted: these are the results so far")
            break
        del ours, configurations, measurement
        gc.collect()  # frees their KV caches before those of the next batch size are allocated
    report["results"] = [row for row in results if "drafter" in row]
    report["other_engines"] = [row for row in results if "drafter" not in row]
    report["peak_memory_bytes"] = peak_memory(runner.device)
    measured.write(report, reports.draw)


def _config(name: str, draft_model: str | None, num_drafted: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {"method": name}
    if num_drafted is not None:
        config["num_speculative_tokens"] = num_drafted
    if name in ("draft_model", "medusa") or (name == "auto" and draft_model is not None):
        config["model"] = draft_model
    return config
