"""`draftahead bench`: drafters against plain decoding and other engines, interleaved in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from draftahead.cli import checks, command, options, terminal
from draftahead.errors import ConfigError
from draftahead.loader.progress import terminal_progress

if TYPE_CHECKING:
    from draftahead.bench.against import OtherEngines
    from draftahead.bench.configurations import Configuration
    from draftahead.bench.measure import Measurement

WITH_SHAPE = {"shape", "acceptance_rate", "num_speculative_tokens", "against", "dtype", "device"}
WITH_SHAPE |= {"limit", "repeats", "max_tokens", "temperature", "seed", "json_file", "plot"}
WITH_SHAPE |= {"verbose", "quiet"}


@command.grouped
def bench(
    context: Context,
    model: options.LLMOptions,
    measured: options.BenchOptions,
    drafter: Annotated[
        str, Option(help="Drafters to measure, separated by commas.")
    ] = "none,lookup,auto",
    draft_model: options.DraftModel = None,
    speculative_config: Annotated[
        list[str] | None,
        Option(help="One more drafter, as JSON with vLLM's keys; repeatable.", metavar="JSON"),
    ] = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    not_lossless: options.NotLossless = False,
    batch: Annotated[str, Option(help="Batch sizes, separated by commas.")] = "1",
    against: Annotated[
        list[str] | None,
        Option(
            help="Other engines: transformers, llama.cpp, or '[NAME=]/path/llama-server ARGS'; "
            "repeatable.",
            metavar="ENGINE",
        ),
    ] = None,
    against_modes: Annotated[
        str | None,
        Option(
            help="Speculative modes of llama.cpp and llama-servers, beside plain: draft, "
            "ngram-mod and others, or none, separated by commas; unset: all they have."
        ),
    ] = None,
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
    """Measure drafters beside plain decoding and other engines.

    All run interleaved, on the same prompts.
    """
    from draftahead.bench.report import draw

    if shape is not None:
        command.check_unused(context, set(context.params) - WITH_SHAPE, "with --shape")
        engines = _other_engines(against, None, "", None)
        report = _bench_shape(
            shape,
            measured,
            acceptance_rate=acceptance_rate,
            num_drafted=num_speculative_tokens or 4,
            dtype=model.dtype,
            device=model.device,
            against_transformers=engines.transformers,
        )
    else:
        command.check_unused(context, ["acceptance_rate"], "without --shape")
        engines = _other_engines(against, against_modes, model.model, draft_model)
        names = [name for name in checks.split_list(drafter) if name != "none"]
        used = engines.draft_model is not None and bool(engines.servers)
        drafters = _configs(names, draft_model, num_speculative_tokens, used)
        for text in speculative_config or ():
            drafters |= _config(checks.json_config(text))
        sizes = checks.split_numbers("--batch", batch)
        lossless = not not_lossless
        report = _bench_model(model, measured, drafters, engines, sizes, latency, lossless)
    measured.write(report, draw)


def _other_engines(
    against: list[str] | None, modes: str | None, model: str, draft_model: str | None
) -> OtherEngines:
    """What is measured beside ours; checked before anything is loaded."""
    from draftahead.bench.against import parse_against

    chosen = None if modes is None else checks.split_list(modes)
    return parse_against(against or (), chosen, model, draft_model)


def _configs(
    names: list[str], draft_model: str | None, num_drafted: int | None, is_used: bool
) -> dict[str, dict[str, Any]]:
    """The configuration of each drafter: the options that it takes of those that were given.
    `is_used`: another engine takes the draft model."""
    from draftahead.drafters.registry import options_of

    given = {"model": draft_model, "num_speculative_tokens": num_drafted}
    options_given = {key: value for key, value in given.items() if value is not None}
    known = {name: options_of(name) for name in names}
    takes_model = is_used or any("model" in keys for keys in known.values())
    if draft_model is not None and not takes_model:
        raise ConfigError(f"--draft-model: none of {', '.join(names)} drafts with a model")
    configs = {
        name: {"method": name, **{k: v for k, v in options_given.items() if k in keys}}
        for name, keys in known.items()
    }
    for config in configs.values():
        checks.check_drafter(config)
    return configs


def _config(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One of --speculative-config, by its method and what else it says."""
    checks.check_drafter(config)
    given = ", ".join(f"{key}={value}" for key, value in config.items() if key != "method")
    name = config.get("method", "draft_model")
    return {f"{name}({given})" if given else name: config}


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
    console = terminal.output_console()
    for table in (latency_table(report), overhead_table(report), results_table(rows, shape)):
        terminal.print_table(console, table)
    return report


def _bench_model(
    model: options.LLMOptions,
    measured: options.BenchOptions,
    drafters: dict[str, Any],
    engines: OtherEngines,
    sizes: list[int],
    latency: bool,
    lossless: bool,
) -> dict[str, Any]:
    from draftahead.bench.configurations import with_drafters
    from draftahead.bench.latency import interpolated, measure_latency
    from draftahead.bench.machine import peak_memory, provenance
    from draftahead.bench.measure import measure, prepare
    from draftahead.bench.other_engines import configurations_of
    from draftahead.bench.report import latency_table

    notes = terminal.notes_console()
    prompts, params = measured.prompt_set(), measured.params()
    llm = measured.build(model)
    runner, forward_ms = llm.engine.verifier.runner, None
    # Options of the model that change its speed belong here.
    report = provenance() | {"model": model.model, "quantize": model.quantize}
    report |= {"engines": engines.described(), "results": [], "other_engines": []}
    report |= {"comparisons": [], "disturbances": [], "repetitions": []}
    if latency:
        report |= measure_latency(runner)
        forward_ms = interpolated(report["latency"])
        terminal.print_table(terminal.output_console(), latency_table(report))
    try:
        for size in sizes:
            batches, context = prepare(llm, prompts, size, measured.limit, params)
            if (most := max(len(b.prompts) for b in batches)) < size:
                notes.print(f"batch {size}: a task has at most {most} prompts; see --limit")
            context = measured.max_context or context
            with terminal_progress() as progress:
                progress("preparing the drafters")
                configurations: list[Configuration] = [
                    *with_drafters(llm, drafters, size, context, lossless=lossless)
                ]
                if size == 1:
                    configurations += configurations_of(
                        engines, model.model, runner.device, context, progress
                    )
            measurement = measure(configurations, batches, params, measured.repeats)
            title = f"{model.model}, batch {size}, {measured.max_tokens} tokens"
            _report(measurement, report, title, forward_ms)
            if measurement.interrupted:
                raise KeyboardInterrupt
            del configurations, measurement
            gc.collect()  # frees their KV caches before those of the next size are allocated
    except KeyboardInterrupt:  # also while the drafters of a size are built
        report["interrupted"] = True
    report["peak_memory_bytes"] = peak_memory(runner.device)
    return report


def _report(
    measurement: Measurement,
    report: dict[str, Any],
    title: str,
    forward_ms: Callable[[int], float] | None,
) -> None:
    """Prints what was measured, and adds it to the JSON report."""
    from draftahead.bench.report import (
        comparison_table,
        disturbance_note,
        engines_table,
        results_table,
    )
    from draftahead.bench.results import comparisons_of, repetitions_of, results_of

    console = terminal.output_console()
    if rows := results_of(measurement, forward_ms):
        terminal.print_table(console, results_table(rows, title))
    if comparisons := comparisons_of(measurement):
        terminal.print_table(console, engines_table(rows, "each engine by itself"))
        terminal.print_table(console, comparison_table(comparisons, "beside other engines"))
    report["results"] += [row for row in rows if "drafter" in row]
    report["other_engines"] += [row for row in rows if "drafter" not in row]
    report["comparisons"] += comparisons
    report["repetitions"] += repetitions_of(measurement)
    found = measurement.disturbances()
    report["disturbances"].append(found)
    if note := disturbance_note(found):
        console.print(note, highlight=False)
    if measurement.failed:
        report["failed"] = report.get("failed", {}) | measurement.failed
