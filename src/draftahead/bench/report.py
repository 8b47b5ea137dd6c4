"""Tables for people, JSON for machines, pictures for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from draftahead.errors import ConfigError


def rows_table(curve: dict[str, Any]) -> Table:
    table = Table(
        title=f"one pass: {curve['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{curve['bandwidth_gb_per_s']:.1f} GB/s take {curve['memory_limit_ms']:.1f} ms",
        caption="low percentile of passes and reads, turn by turn",
    )
    for name in ("rows", "ms", "over the limit", "over one row"):
        table.add_column(name, justify="right")
    for row in curve["rows"]:
        ratios = (f"{row['over_limit']:.2f}x", f"{row['over_one_row']:.2f}x")
        table.add_row(str(row["rows"]), f"{row['ms']:.2f}", *ratios)
    if tree := curve.get("tree"):
        table.add_section()
        over = (f"{tree['ms'] / curve['memory_limit_ms']:.2f}x", f"{tree['over_one_row']:.2f}x")
        table.add_row(f"tree of {tree['nodes']}", f"{tree['ms']:.2f}", *over)
    return table


def shape_table(found: dict[str, Any]) -> Table:
    """What the engine adds to its passes."""
    table = Table(title=f"{found['shape']}, agreement {found['agreement']:.2f}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    rows = (
        ("plain decoding, a token", f"{found['plain_ms_per_token']:.2f} ms"),
        ("drafted decoding, a token", f"{found['drafted_ms_per_token']:.2f} ms"),
        ("mean acceptance length", f"{found['mean_acceptance_length']:.2f}"),
        ("speed-up, decoding alone", f"{found['speedup']:.2f}x"),
        ("predicted from the passes", f"{found['predicted_speedup']:.2f}x"),
        ("measured over predicted", f"{found['measured_over_predicted']:.2f}"),
        ("outside passes, plain", f"{found['outside_passes_plain']:.1%}"),
        ("outside passes, drafted", f"{found['outside_passes_drafted']:.1%}"),
        (
            f"a step of {found['speculative_tokens'] + 1} rows, all accepted, over a plain step",
            f"{found['accepted_step_over_plain_step']:.2f}x",
        ),
    )
    for row in rows:
        table.add_row(*row)
    return table


def results_table(results: list[dict[str, Any]], title: str) -> Table:
    table = Table(
        title=title, caption="tok/s and speed-up by wall time, the prompt's pass included"
    )
    for name in ("task", "side", "batch"):
        table.add_column(name, no_wrap=True)
    numbers = (
        "tok/s",
        "speed-up",
        "(spread)",
        "decoding\nalone",
        "acceptance\nlength",
        "identical",
    )
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in results:
        if previous not in (None, row["task"]):
            table.add_section()
        low, high = row["speedup_spread"]
        table.add_row(
            row["task"] if row["task"] != previous else "",
            _said(row),
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


def _said(row: dict[str, Any]) -> str:
    """A side's name, with what must be known of it."""
    return row["name"] if row.get("lossless", True) else f"[red]{row['name']}, not lossless[/red]"


def draw(report: dict[str, Any], file: Path) -> None:
    """The curve of T(rows) and the speed-up by task, as far as the report has them."""
    parts = [name for name in ("rows", "results") if report.get(name)]
    with figure_with(len(parts), file) as axes:
        for name, axis in zip(parts, axes, strict=True):
            (_draw_rows if name == "rows" else _draw_results)(report, axis)


@contextmanager
def figure_with(parts: int, file: Path) -> Iterator[Any]:
    """So many pictures side by side, written to a file in the end."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, parts, figsize=(6.5 * parts, 4.5), squeeze=False)
    yield axes[0]
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _draw_rows(report: dict[str, Any], axis: Any) -> None:
    rows = [row["rows"] for row in report["rows"]]
    axis.plot(rows, [row["ms"] for row in report["rows"]], "o-", color="tab:green", label="a pass")
    limit = report["memory_limit_ms"]
    axis.axhline(
        limit, color="tab:gray", linestyle="--", label=f"reading the weights: {limit:.1f} ms"
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(rows, [str(row) for row in rows])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows (nodes scored in one pass)")
    axis.set_ylabel("ms")
    axis.set_title("What a pass costs")
    axis.legend()


def _draw_results(report: dict[str, Any], axis: Any) -> None:
    entries = [row for row in report["results"] if row["drafter"] != "none"]
    tasks = list(dict.fromkeys(row["task"] for row in entries))
    sides = list(dict.fromkeys((row["drafter"], row["batch"]) for row in entries))
    bent = {row["drafter"] for row in entries if not row.get("lossless", True)}
    height = 0.8 / max(len(sides), 1)
    for number, (drafter, batch) in enumerate(sides):
        values = {
            row["task"]: row["speedup"]
            for row in entries
            if (row["drafter"], row["batch"]) == (drafter, batch)
        }
        places = [i + number * height for i in range(len(tasks))]
        label = f"{drafter}, batch {batch}" + (", not lossless" if drafter in bent else "")
        color = "tab:red" if drafter in bent else None
        widths = [values.get(task, 0) for task in tasks]
        axis.barh(places, widths, height, label=label, color=color)
    axis.axvline(1, color="tab:gray", linestyle="--")
    axis.set_yticks([i + 0.4 - height / 2 for i in range(len(tasks))], tasks)
    axis.invert_yaxis()
    axis.set_xlabel("speed-up over plain decoding (wall time)")
    axis.legend()
