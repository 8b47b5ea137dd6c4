"""`draftahead tune`: what each number of guesses is worth here, and what the policy makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftahead.bench.prompts import load_prompts
from draftahead.cli import bench, options
from draftahead.errors import ConfigError

if TYPE_CHECKING:
    from draftahead.bench.sides import Side


def tune(
    model: options.Model = "smollm2",
    drafter: options.Drafter = None,
    draft_model: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    guesses: Annotated[str, typer.Option(help="Numbers to try, with commas.")] = "1,3,5,7,11,15",
    prompts: Annotated[str, typer.Option(help="builtin, or a file as Spec-Bench's.")] = "builtin",
    limit: Annotated[int | None, typer.Option(help="Prompts of each task.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 64,
    batch: Annotated[int, typer.Option(help="Texts at once.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    repeats: Annotated[int, typer.Option(help="Turns; the median counts.", min=1)] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures.", metavar="FILE")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them into a PNG file.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantize: options.Quantize = None,
) -> None:
    """Show what drafting costs and gives on this machine, for every number of guesses."""
    from draftahead.bench import tune as tuning
    from draftahead.bench.machine import provenance
    from draftahead.bench.measure import results_of
    from draftahead.bench.report import rows_table
    from draftahead.bench.rows import between, measure_rows
    from draftahead.bench.sides import Ours

    console, notes = options.output_console(), Console(stderr=True)
    for file in (json_file, plot):
        if file is not None:
            options.check_writable(file)
    numbers = options.numbers_of("--guesses", guesses)
    config = options.drafter_from(drafter, draft_model, speculative_config, None)
    if "num_speculative_tokens" in config or config.get("method") == "none":
        raise ConfigError("tune tries numbers of guesses itself: name a drafter, without a number")
    sampling = options.sampling_from(temperature=temperature, max_tokens=max_tokens, seed=seed)
    chosen = load_prompts(prompts)
    first = options.build_llm(model, "none", dtype=dtype, device=device, quantize=quantize)
    name = str(config.get("method", "draft_model"))
    report: dict[str, Any] = provenance() | {"model": model, "drafter": name, "batch": batch}
    with options.progress_bar(notes, "T(rows)", 17) as step:
        report |= measure_rows(first.engine.verifier.runner, progress=step)
    console.print(rows_table(report))
    groups, context = bench.groups_for(first, chosen, batch, limit, sampling)
    sides: list[Side] = [bench.side("none", first, {"method": "none"}, batch, context)]
    for number in numbers:
        fixed = config | {"num_speculative_tokens": number}
        sides.append(bench.side(str(number), first, fixed, batch, context))
    own = bench.side(tuning.DEFAULT, first, config, batch, context)
    assert isinstance(own, Ours)
    if getattr(own.llm.engine.drafter, "adaptive", False):
        own.name = tuning.GUIDED
    sides.append(own)
    found = bench.run(notes, sides, groups, sampling, repeats)
    if not found.groups:
        raise ConfigError("interrupted before the first prompt was through: nothing to tell")
    results = results_of(found, "none")
    report["results"] = results
    report["depths"] = tuning.by_depth(results)
    report["passes"] = tuning.passes_of(results)
    report["choices"] = tuning.choices(results, between(report["passes"], "mean_ms"))
    report["reasons"] = [*own.llm.explain(), tuning.verdict(report["choices"])]
    console.print(tuning.depth_table(report["depths"]))
    title = f"{model}, {name}, batch {batch}: what a number of guesses is worth"
    console.print(tuning.choices_table(report["choices"], title))
    for reason in report["reasons"]:
        console.print(f"- {reason}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if plot is not None:
        tuning.draw(report, plot)
