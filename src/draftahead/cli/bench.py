"""`draftahead bench`: how fast, against what, and how far from what the memory allows."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftahead.bench.prompts import load_prompts
from draftahead.cli import options
from draftahead.errors import ConfigError, nearest

if TYPE_CHECKING:
    from draftahead.bench.measure import Group, Measurement
    from draftahead.bench.sides import Side
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.llm import LLM

PEERS = ("transformers", "llama.cpp")


def bench(
    model: options.Model = "smollm2",
    drafter: Annotated[str, typer.Option(help="Sides to run, with commas.")] = "none,lookup,auto",
    draft_model: options.DraftModel = None,
    num_speculative_tokens: options.Tokens = None,
    not_lossless: options.NotLossless = False,
    prompts: Annotated[
        str, typer.Option(help="builtin, random (tokens), or a file as Spec-Bench's.")
    ] = "builtin",
    limit: Annotated[int | None, typer.Option(help="Prompts of each task.", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 64,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    repeats: Annotated[int, typer.Option(help="Turns; the median counts.", min=1)] = 3,
    against: Annotated[str, typer.Option(help="transformers, llama.cpp, with commas.")] = "",
    rows: Annotated[bool, typer.Option("--rows", help="Measure T(rows) as well.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures.", metavar="FILE")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of a shape, as llama-8b, instead of a model.")
    ] = None,
    agreement: Annotated[float, typer.Option(help="Of the draft, for --shape.")] = 0.8,
    plot: Annotated[Path | None, typer.Option(help="Draw them into a PNG file.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    quantize: options.Quantize = None,
) -> None:
    """Measure drafters against plain decoding and against peers, side by side in one run."""
    from draftahead.bench.machine import peak_memory, provenance
    from draftahead.bench.measure import results_of
    from draftahead.bench.report import results_table, rows_table, shape_table
    from draftahead.bench.rows import between, measure_rows

    console, notes = options.output_console(), Console(stderr=True)
    for file in (json_file, plot):
        if file is not None:
            options.check_writable(file)
    names, peers = options.parts_of(drafter), options.parts_of(against)
    batches = options.numbers_of("--batch", batch)
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(f"unknown peer {peer!r}{nearest(peer, PEERS)}")
    sampling = options.sampling_from(temperature=temperature, max_tokens=max_tokens, seed=seed)
    if not_lossless and shape is not None:
        raise ConfigError("--not-lossless is for real models: leave it out with --shape")
    if shape is not None:
        count = num_speculative_tokens or 4
        kind = (shape, agreement, count, dtype, device)
        found = _shape(notes, kind, sampling, limit or 2, repeats, "transformers" in peers)
        everyone = [*found["results"], *found["peers"]]
        tables = rows_table(found), shape_table(found), results_table(everyone, shape)
        for table in tables:
            console.print(table)
        _keep(found, json_file, plot)
        return
    chosen = None if prompts == "random" else load_prompts(prompts)
    first = options.build_llm(model, "none", dtype=dtype, device=device, quantize=quantize)
    report: dict[str, Any] = provenance() | {"model": model, "quantize": quantize}
    if rows:
        with options.progress_bar(notes, "T(rows)", 17) as step:
            report |= measure_rows(first.engine.verifier.runner, progress=step)
        console.print(rows_table(report))
    results: list[dict[str, Any]] = []
    for size in batches:
        groups, context = groups_for(first, chosen, size, limit, sampling)
        sides = [
            side(name, first, config, size, context, not_lossless)
            for name, config in _configs(names, draft_model, num_speculative_tokens).items()
        ]
        if size == 1:
            sides += _peers(peers, model, first)
        if (most := max(len(group.prompts) for group in groups)) < size:
            notes.print(f"batch {size}: only {most} prompts of a task to run at once; see --limit")
        measured = run(notes, sides, groups, sampling, repeats)
        some = results_of(measured, "none", between(report["rows"]) if rows else None)
        results += some
        if some:
            console.print(results_table(some, f"{model}, batch {size}, {max_tokens} tokens"))
        if measured.interrupted:
            notes.print("interrupted: these are the results so far")
            break
        del sides, measured
        gc.collect()  # their caches, before the next size makes its own
    report["results"] = [row for row in results if "drafter" in row]
    report["peers"] = [row for row in results if "drafter" not in row]
    report["peak_memory_bytes"] = peak_memory(first.engine.verifier.runner.device)
    _keep(report, json_file, plot)


def _keep(report: dict[str, Any], json_file: Path | None, plot: Path | None) -> None:
    from draftahead.bench.report import draw

    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if plot is not None:
        draw(report, plot)


def _shape(
    notes: Console,
    kind: tuple[str, float, int, str | None, str | None],
    sampling: SamplingParams,
    limit: int,
    repeats: int,
    against_transformers: bool,
) -> dict[str, Any]:
    """A model of a named shape instead of a real one: see bench/shape.py."""
    import torch

    from draftahead.bench import shape as shapes
    from draftahead.bench.machine import peak_memory, provenance
    from draftahead.bench.measure import OVERALL, Group, measure, results_of
    from draftahead.bench.sides import transformers_pair
    from draftahead.core.device import default_device

    name, agreement, count, dtype, device = kind
    place = torch.device(device) if device else default_device()
    numbers = shapes.dtype_for(dtype, place)
    target, draft = shapes.build_pair(name, numbers, place)
    tokens = sampling.max_tokens or 64
    texts = shapes.prompts_for(target.config.vocab_size, limit)
    sides = shapes.sides_for(target, draft, count, texts, tokens)
    with options.progress_bar(notes, f"{name}, agreement {agreement}", shapes.STEPS) as step:
        found = shapes.calibrate(
            target,
            shapes.SHAPES[name].draft_layers,
            lambda: shapes.agreement_of(sides[1], texts, tokens),
            agreement,
            step,
        )
    shapes.learn_answers(sides, texts, tokens)
    everyone: list[Side] = [*sides]
    if against_transformers:
        everyone += transformers_pair(target, draft, count)
    groups = [Group("random text", [text]) for text in texts]
    with options.progress_bar(notes, name, len(groups) * len(everyone) * repeats) as step:
        results = results_of(measure(everyone, groups, sampling, repeats, step), plain="none")
    return (
        provenance()
        | {"shape": name, "agreement_asked": agreement, "agreement": found, "dtype": str(numbers)}
        | shapes.overheads(sides, results, count)
        | {
            # One task only: "overall" says it all.
            "results": [row for row in results if "drafter" in row and row["task"] == OVERALL],
            "peers": [row for row in results if "drafter" not in row and row["task"] == OVERALL],
            "peak_memory_bytes": peak_memory(place),
        }
    )


def groups_for(
    llm: LLM, prompts: Any, batch: int, limit: int | None, sampling: SamplingParams
) -> tuple[list[Group], int]:
    """The groups that all sides generate for, and the context that takes. No prompts: random."""
    from draftahead.bench.measure import context_for, grouped, random_groups

    target, tokens = llm.engine.verifier, sampling.max_tokens or 0
    if prompts is None:
        longest = max(1, target.max_context - tokens)
        groups = random_groups(target.vocab_size, batch, limit or 16, longest)
    else:
        groups = grouped(prompts, llm.encode, batch, limit)
    return groups, context_for(groups, tokens, target.runner.model_context)


def run(
    notes: Console, sides: list[Side], groups: list[Group], sampling: SamplingParams, repeats: int
) -> Measurement:
    from draftahead.bench.measure import measure

    title, count = f"batch {sides[0].batch}", len(groups) * len(sides) * repeats
    with options.progress_bar(notes, title, count) as step:
        return measure(sides, groups, sampling, repeats, step)


def _configs(
    names: list[str], draft_model: str | None, tokens: int | None
) -> dict[str, dict[str, Any]]:
    """Of our sides. Plain decoding is always among them, for it is the measure."""
    found: dict[str, dict[str, Any]] = {}
    for name in ["none", *names]:
        config: dict[str, Any] = {"method": name}
        if name != "none" and tokens is not None:
            config["num_speculative_tokens"] = tokens
        if name in ("draft_model", "medusa") or (name == "auto" and draft_model is not None):
            config["model"] = draft_model
        found[name] = config
    return found


def side(
    name: str,
    first: LLM,
    drafter: dict[str, Any],
    batch: int,
    context: int,
    not_lossless: bool = False,
) -> Side:
    """Another drafter for a model that is loaded already. Plain decoding has nothing to lose."""
    from draftahead.bench.sides import Ours

    lossless = name == "none" or not not_lossless
    llm = first.with_drafter(drafter, max_batch=batch, max_context=context, lossless=lossless)
    return Ours(name, llm, batch)


def _peers(names: list[str], model: str, llm: LLM) -> list[Side]:
    from draftahead.bench.sides import LlamaCpp, transformers_peers
    from draftahead.loader.hub import ALIASES, load

    found: list[Side] = []
    if "transformers" in names:
        # A model of its own: ours may be rounded, and its attention is not our affair.
        found += transformers_peers(load(model, device=llm.model.device)[0])
    if "llama.cpp" in names:
        if model not in ALIASES:
            raise ConfigError("--against llama.cpp runs the embedded model's own GGUF file")
        found.append(LlamaCpp(model, 4096))
    return found
