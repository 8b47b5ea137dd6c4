"""Reports of `draftahead bench`: tables, and figures in PNG files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from draftahead.bench import OVERALL, PLAIN

# ---------------------------------------------------------------------------------- tables


def table_of(left: Iterable[str], right: Iterable[str], **options: Any) -> Table:
    """A table without rows, of columns that are aligned to the left and to the right. Where there
    is too little room, names are folded, not numbers."""
    table = Table(**options)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def latency_table(report: Mapping[str, Any]) -> Table:
    bound, tree = report["memory_bound_ms"], report["tree"]
    table = table_of(
        (),
        ("tokens", "ms", "times the memory-bandwidth bound", "times one token"),
        title=f"one forward pass: {report['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{report['bandwidth_gb_per_s']:.1f} GB/s take {bound:.1f} ms",
        caption="10th percentile of interleaved repetitions",
    )
    rows = [(str(row["tokens"]), row) for row in report["latency"]]
    for tokens, row in [*rows, (f"tree of {tree['nodes']}", tree)]:
        if row is tree:
            table.add_section()
        ratios = f"{row['over_bound']:.2f}x", f"{row['over_one_token']:.2f}x"
        table.add_row(tokens, f"{row['ms']:.2f}", *ratios)
    return table


def overhead_table(report: Mapping[str, Any]) -> Table:
    """The engine's overhead on a shape with random weights."""
    rate = report["simulated_acceptance_rate"]
    title = f"{report['shape']}, simulated acceptance rate {rate:.2f}"
    table = table_of([""], [""], title=title, show_header=False)
    all_accepted = f"a step of {report['num_speculative_tokens'] + 1} tokens, all accepted"
    for name, key, form in (
        ("plain decoding, per token", "plain_ms_per_token", "{:.2f} ms"),
        ("drafted decoding, per token", "drafted_ms_per_token", "{:.2f} ms"),
        ("mean acceptance length", "mean_acceptance_length", "{:.2f}"),
        ("speed-up, decoding only", "speedup", "{:.2f}x"),
        ("predicted from forward passes", "predicted_speedup", "{:.2f}x"),
        ("measured over predicted", "measured_over_predicted", "{:.2f}"),
        ("outside forward passes, plain", "outside_forward_plain", "{:.1%}"),
        ("outside forward passes, drafted", "outside_forward_drafted", "{:.1%}"),
        (f"{all_accepted}, over a plain step", "accepted_step_over_plain_step", "{:.2f}x"),
    ):
        table.add_row(name, form.format(report[key]))
    return table


def results_table(results: list[dict[str, Any]], title: str) -> Table:
    lengths = ("decoding\nonly", "acceptance\nlength")
    table = table_of(
        ("task", "configuration", "batch"),
        ("tok/s", "speed-up", "(95%)", *lengths, "identical"),
        title=title,
        caption="tok/s and speed-up by wall time, prefill included; identical to `none`",
    )
    previous = None
    for row in results:
        if previous not in (None, row["task"]):
            table.add_section()
        interval, name = row["speedup_interval"], row["name"]
        table.add_row(
            row["task"] if row["task"] != previous else "",
            name if row.get("lossless", True) else f"[red]{name}, not lossless[/red]",
            str(row["batch"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            "-" if interval is None else "{:.2f}-{:.2f}".format(*interval),
            _known(row, "decode_speedup", "{:.2f}x"),
            _known(row, "mean_acceptance_length", "{:.2f}"),
            _known(row, "identical", "{:.0%}"),
        )
        previous = row["task"]
    return table


def engines_table(results: list[dict[str, Any]], title: str) -> Table:
    """Over all prompts: what the speed-up of another engine is made of."""
    table = table_of(
        ["configuration"],
        ("tokens", "decoding tok/s", "prompt tok/s", "identical to its own plain"),
        title=title,
        caption="rates as each engine reports them; texts may end at other tokens",
    )
    for row in results:
        if row["task"] == OVERALL:
            table.add_row(
                row["name"],
                str(row["tokens"]),
                _known(row, "decode_tokens_per_second", "{:.1f}"),
                _known(row, "prompt_tokens_per_second", "{:.0f}"),
                _known(row, "identical_to_own", "{:.0%}"),
            )
    return table


def _known(row: Mapping[str, Any], key: str, form: str) -> str:
    return form.format(row[key]) if row.get(key) is not None else "-"


def comparison_table(comparisons: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Over all prompts: each of our configurations over each engine, plain and at its best."""
    rows = [row for row in comparisons if row["task"] == OVERALL]
    shown = {row["other"]: row for row in rows if row["best"] or row["plain"]}
    heads = (f"{name}\n(its best)" if row["best"] else name for name, row in shown.items())
    caption = "ratio of tok/s by wall time, prefill included, and its 95% interval"
    table = table_of(["configuration"], heads, title=title, caption=caption)
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = []
        for row in rows:
            if row["name"] == name and row["other"] in shown:
                interval = row["interval"]
                sure = "" if interval is None else " ({:.2f}-{:.2f})".format(*interval)
                cells.append(f"{row['ratio']:.2f}x{sure}")
        table.add_row(name, *cells)
    return table


def disturbance_note(found: Mapping[str, Any]) -> str:
    """What happened to repetitions that other processes disturbed; empty: nothing."""
    limit = f"{found['limit']:.0%} of the CPU time"
    if not found["known"]:
        return "the CPU time of other processes is not known here: no repetition was dropped"
    if not found["dropped"]:
        return ""
    kept = f"; {found['kept']} stayed so and count, flagged in --json" if found["kept"] else ""
    return (
        f"dropped and measured again: {found['dropped']} repetitions in which other processes took "
        f"over {limit}{kept}"
    )


# --------------------------------------------------------------------------------- figures


@contextmanager
def figure(parts: int, file: Path) -> Iterator[Any]:
    """Yields axes side by side; writes the file at the end."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5 * parts + 1.5, 4.5), layout="tight")
    yield drawing.subplots(1, parts, squeeze=False)[0]
    drawing.savefig(file, dpi=130)


def draw(report: dict[str, Any], file: Path) -> None:
    """Latency by number of tokens, and speed-up by task, as far as the report has them."""
    parts = {"latency": _draw_latency, "results": _draw_results}
    drawn = [draw_part for key, draw_part in parts.items() if report.get(key)]
    with figure(len(drawn), file) as axes:
        for draw_part, axis in zip(drawn, axes, strict=True):
            draw_part(report, axis)


def _draw_latency(report: dict[str, Any], axis: Any) -> None:
    tokens, ms = zip(*((row["tokens"], row["ms"]) for row in report["latency"]), strict=True)
    bound = report["memory_bound_ms"]
    axis.plot(tokens, ms, "o-", color="tab:green", label="forward pass")
    axis.axhline(bound, color="tab:gray", linestyle="--", label=f"reading weights: {bound:.1f} ms")
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [str(n) for n in tokens])
    axis.set_ylim(bottom=0)
    axis.set(xlabel="tokens per forward pass", ylabel="ms", title="Latency of a forward pass")
    axis.legend()


def _draw_results(report: dict[str, Any], axis: Any) -> None:
    entries = [row for row in report["results"] if row["drafter"] != PLAIN]
    tasks = list(dict.fromkeys(row["task"] for row in entries))
    configurations = list(dict.fromkeys((row["drafter"], row["batch"]) for row in entries))
    height = 0.8 / max(len(configurations), 1)
    for number, (drafter, batch) in enumerate(configurations):
        rows = [row for row in entries if (row["drafter"], row["batch"]) == (drafter, batch)]
        lossless = all(row["lossless"] for row in rows)
        axis.barh(
            [tasks.index(row["task"]) + number * height for row in rows],
            [row["speedup"] for row in rows],
            height,
            label=f"{drafter}, batch {batch}" + ("" if lossless else ", not lossless"),
            color=None if lossless else "tab:red",
        )
    axis.axvline(1, color="tab:gray", linestyle="--")
    axis.set_yticks([i + 0.4 - height / 2 for i in range(len(tasks))], tasks)
    axis.invert_yaxis()
    axis.set_xlabel("speed-up over plain decoding (wall time)")
    axis.legend()
