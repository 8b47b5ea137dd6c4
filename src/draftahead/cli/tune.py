"""`draftahead tune`: the speed-up of each number of drafted tokens, and of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from draftahead.cli import checks, command, options, terminal
from draftahead.errors import ConfigError
from draftahead.loader.progress import terminal_progress


@dataclass(frozen=True)
class TuneOptions(options.BenchOptions):
    limit: Annotated[int | None, Option(help="Prompts per task.", min=1)] = 1
    repeats: Annotated[int, Option(help="Repetitions; the median counts.", min=1)] = 2


@command.grouped
def tune(
    model: options.LLMOptions,
    drafter: options.DrafterOptions,
    measured: TuneOptions,
    num_speculative_tokens: Annotated[
        str,
        Option("--num-speculative-tokens", "-k", help="Numbers to measure, separated by commas."),
    ] = "1,3,5,7,11,15",
    batch: options.Batch = 1,
) -> None:
    """Measure the speed-up by number of drafted tokens.

    Prints what drafting costs and gains on this machine: the latency of forward passes, acceptance
    by position, and the speed-up, predicted and measured.
    """
    from draftahead.bench import OVERALL
    from draftahead.bench import tune as tuning
    from draftahead.bench.configurations import with_drafters
    from draftahead.bench.latency import interpolated, measure_latency
    from draftahead.bench.machine import provenance
    from draftahead.bench.measure import measure, prepare
    from draftahead.bench.report import latency_table
    from draftahead.bench.results import results_of

    console = terminal.output_console()
    numbers = checks.split_numbers("--num-speculative-tokens", num_speculative_tokens)
    config, params, prompts = drafter.config(), measured.params(), measured.prompt_set()
    if "num_speculative_tokens" in config or config["method"] == "none":
        raise ConfigError("tune measures several numbers: name a drafter, without a fixed number")
    name = str(config["method"])
    llm = measured.build(model)
    report = provenance() | {"model": model.model, "drafter": name, "batch": batch}
    report |= measure_latency(llm.engine.verifier.runner)
    terminal.print_table(console, latency_table(report))
    batches, context = prepare(llm, prompts, batch, measured.limit, params)
    context = measured.max_context or context
    drafters = {str(n): config | {"num_speculative_tokens": n} for n in numbers}
    with terminal_progress() as progress:
        progress("preparing the drafters")
        ours = with_drafters(llm, drafters | {tuning.DEFAULT: config}, batch, context)
    own = ours[-1]
    if own.llm.engine.adaptive:
        own.name = tuning.AUTOMATIC
    measurement = measure(ours, batches, params, measured.repeats)
    if not measurement.batches:
        raise KeyboardInterrupt
    if measurement.interrupted:
        report["interrupted"] = True
    report["results"] = results_of(measurement)
    overall = [row for row in report["results"] if row["task"] == OVERALL]
    report["positions"] = tuning.acceptance_by_position(overall)
    report["forward"] = tuning.forward_latency(overall)
    report["speedups"] = tuning.speedups(overall, interpolated(report["forward"], "mean_ms"))
    report["reasons"] = [*own.llm.explain(), tuning.advice(report["speedups"])]
    terminal.print_table(console, tuning.acceptance_table(report["positions"]))
    title = f"{model.model}, {name}, batch {batch}: speed-up by number of drafted tokens"
    terminal.print_table(console, tuning.speedup_table(report["speedups"], title))
    for reason in report["reasons"]:
        console.print(f"- {reason}", highlight=False)
    measured.write(report, tuning.draw)
