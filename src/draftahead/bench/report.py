"""Reports of `draftahead bench`: tables, and figures in PNG files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from draftahead.bench.configurations import PLAIN
from draftahead.errors import ConfigError

# ---------------------------------------------------------------------------------- tables


def latency_table(report: dict[str, Any]) -> Table:
    bound = report["memory_bound_ms"]
    table = Table(
        title=f"one forward pass: {report['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{report['bandwidth_gb_per_s']:.1f} GB/s take {bound:.1f} ms",
        caption="10th percentile of interleaved repetitions",
    )
    for name in ("tokens", "ms", "times the memory-bandwidth bound", "times one token"):
        table.add_column(name, justify="right")
    for row in report["latency"]:
        ratios = (f"{row['over_bound']:.2f}x", f"{row['over_one_token']:.2f}x")
        table.add_row(str(row["tokens"]), f"{row['ms']:.2f}", *ratios)
    if tree := report.get("tree"):
        table.add_section()
        ratios = (f"{tree['ms'] / bound:.2f}x", f"{tree['over_one_token']:.2f}x")
        table.add_row(f"tree of {tree['nodes']}", f"{tree['ms']:.2f}", *ratios)
    return table


def overhead_table(report: dict[str, Any]) -> Table:
    """The engine's overhead on a shape with random weights."""
    rate = report["simulated_acceptance_rate"]
    table = Table(
        title=f"{report['shape']}, simulated acceptance rate {rate:.2f}", show_header=False
    )
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in {
        "plain decoding, per token": f"{report['plain_ms_per_token']:.2f} ms",
        "drafted decoding, per token": f"{report['drafted_ms_per_token']:.2f} ms",
        "mean acceptance length": f"{report['mean_acceptance_length']:.2f}",
        "speed-up, decoding only": f"{report['speedup']:.2f}x",
        "predicted from forward passes": f"{report['predicted_speedup']:.2f}x",
        "measured over predicted": f"{report['measured_over_predicted']:.2f}",
        "outside forward passes, plain": f"{report['outside_forward_plain']:.1%}",
        "outside forward passes, drafted": f"{report['outside_forward_drafted']:.1%}",
        f"a step of {report['num_speculative_tokens'] + 1} tokens, all accepted, over a plain "
        "step": f"{report['accepted_step_over_plain_step']:.2f}x",
    }.items():
        table.add_row(name, value)
    return table


def results_table(results: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, caption="tok/s and speed-up by wall time, prefill included")
    for name in ("task", "configuration", "batch"):
        table.add_column(name, no_wrap=True)
    lengths = ("decoding\nonly", "acceptance\nlength")
    for name in ("tok/s", "speed-up", "(spread)", *lengths, "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in results:
        if previous not in (None, row["task"]):
            table.add_section()
        low, high = row["speedup_spread"]
        name = row["name"]
        table.add_row(
            row["task"] if row["task"] != previous else "",
            name if row.get("lossless", True) else f"[red]{name}, not lossless[/red]",
            str(row["batch"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{row['decode_speedup']:.2f}x" if "decode_speedup" in row else "-",
            f"{row['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in row else "-",
            f"{row['identical']:.0%}" if "identical" in row else "-",
        )
        previous = row["task"]
    return table


# --------------------------------------------------------------------------------- figures


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'draftahead[bench]'")


@contextmanager
def figure(parts: int, file: Path) -> Iterator[Any]:
    """Yields so many axes side by side; writes the file at the end."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(1, parts, figsize=(5 * parts + 1.5, 4.5), squeeze=False)
    yield axes[0]
    drawing.tight_layout()
    drawing.savefig(file, dpi=130)
    pyplot.close(drawing)


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
    for number, configuration in enumerate(configurations):
        rows = [row for row in entries if (row["drafter"], row["batch"]) == configuration]
        lossless = all(row.get("lossless", True) for row in rows)
        speedups = {row["task"]: row["speedup"] for row in rows}
        label = "{}, batch {}".format(*configuration)
        axis.barh(
            [i + number * height for i in range(len(tasks))],
            [speedups.get(task, 0) for task in tasks],
            height,
            label=label if lossless else f"{label}, not lossless",
            color=None if lossless else "tab:red",
        )
    axis.axvline(1, color="tab:gray", linestyle="--")
    axis.set_yticks([i + 0.4 - height / 2 for i in range(len(tasks))], tasks)
    axis.invert_yaxis()
    axis.set_xlabel("speed-up over plain decoding (wall time)")
    axis.legend()
