"""`draftahead bench`: drafters against plain decoding and other engines, interleaved in one run."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from draftahead.cli import checks, command, options, terminal
from draftahead.errors import ConfigError
from draftahead.loader.progress import terminal_progress

if TYPE_CHECKING:
    from draftahead.bench.configurations import Configuration

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
        str | None, Option(help="Other engines: transformers, llama.cpp, separated by commas.")
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
    from draftahead.bench.configurations import check_engines
    from draftahead.bench.report import draw

    engines = checks.split_list(against or "")
    if shape is not None:
        command.check_unused(context, set(context.params) - WITH_SHAPE, "with --shape")
        check_engines(engines, None)
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
        command.check_unused(context, ["acceptance_rate"], "without --shape")
        check_engines(engines, model.model)
        names = [name for name in checks.split_list(drafter) if name != "none"]
        drafters = _configs(names, draft_model, num_speculative_tokens)
        for text in speculative_config or ():
            drafters |= _config(checks.json_config(text))
        sizes = checks.split_numbers("--batch", batch)
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
    known = {name: options_of(name) for name in names}
    if draft_model is not None and not any("model" in keys for keys in known.values()):
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

    console, notes = terminal.output_console(), terminal.notes_console()
    prompts, params = measured.prompt_set(), measured.params()
    llm = measured.build(model)
    runner, forward_ms = llm.engine.verifier.runner, None
    report = provenance() | {"model": model.model, "quantize": model.quantize}
    if latency:
        report |= measure_latency(runner)
        forward_ms = interpolated(report["latency"])
        terminal.print_table(console, latency_table(report))
    results: list[dict[str, Any]] = []
    try:
        for size in sizes:
            batches, context = prepare(llm, prompts, size, measured.limit, params)
            if (most := max(len(b.prompts) for b in batches)) < size:
                notes.print(f"batch {size}: a task has at most {most} prompts; see --limit")
            context = measured.max_context or context
            with terminal_progress() as progress:
                progress("preparing the drafters")
                configurations: list[Configuration] = [
                    *with_drafters(llm, drafters, size, context, lossless=lossless),
                    *(other_engines(engines, model.model, runner.device) if size == 1 else ()),
                ]
            measurement = measure(configurations, batches, params, measured.repeats)
            if rows := results_of(measurement, forward_ms):
                title = f"{model.model}, batch {size}, {measured.max_tokens} tokens"
                terminal.print_table(console, results_table(rows, title))
            results += rows
            if measurement.interrupted:
                raise KeyboardInterrupt
            del configurations, measurement
            gc.collect()  # frees their KV caches before those of the next size are allocated
    except KeyboardInterrupt:  # also while the drafters of a size are built
        report["interrupted"] = True
    report["results"] = [row for row in results if "drafter" in row]
    report["other_engines"] = [row for row in results if "drafter" not in row]
    report["peak_memory_bytes"] = peak_memory(runner.device)
    return report
