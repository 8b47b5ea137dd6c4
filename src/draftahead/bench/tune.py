"""What each number of guesses is worth on this machine: predicted from its passes, and measured.

Predicted is what passes of these widths take, averaged over all sides, and drafting: where a side
was measured slower, time went elsewhere, or the machine was busy when its turn came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from draftahead.bench.report import figure_with

FEW = 8  # passes of a width that are too few to tell its time
GUIDED = "as pays"  # the policy decides at every step
DEFAULT = "its own"  # a drafter that the policy does not guide


def passes_of(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What passes took in these very runs, by the nodes of a text, all sides together."""
    count: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for row in results:
        if row["task"] == "overall":
            for nodes, steps in enumerate(row["steps_by_nodes"], start=1):
                count[nodes] = count.get(nodes, 0) + steps
                seconds[nodes] = seconds.get(nodes, 0) + row["seconds_by_nodes"][nodes - 1]
    known = sorted(nodes for nodes in count if count[nodes] >= FEW) or [1]
    return [
        {"rows": nodes, "mean_ms": 1e3 * seconds[nodes] / count[nodes], "steps": count[nodes]}
        for nodes in known
    ]


def choices(
    results: Sequence[dict[str, Any]], pass_ms: Callable[[int], float]
) -> list[dict[str, Any]]:
    """For every side but plain decoding: tokens a step, what that should be worth by the measured
    times of passes and drafting, and what it was."""
    found = []
    for row in results:
        if row["task"] != "overall" or row["drafter"] == "none":
            continue
        steps = enumerate(row["steps_by_nodes"], start=1)
        passes = sum(count * pass_ms(nodes) for nodes, count in steps)
        drafting = 1e3 * row["seconds_by_stage"]["draft"] * row["batch"]
        plain = row["tokens"] * pass_ms(1)
        found.append(
            {
                "guesses": row["drafter"],
                "mean_acceptance_length": row["mean_acceptance_length"],
                "acceptance_rate": row["acceptance_rate"],
                "predicted_speedup": plain / (passes + drafting),
                "decode_speedup": row["decode_speedup"],
                "speedup": row["speedup"],
                "identical": row["identical"],
            }
        )
    return found


def by_depth(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often guesses of each depth were kept where there were any, of the side that went the
    deepest."""
    sides = [row for row in results if row["task"] == "overall" and row["drafted_at"]]
    if not sides:
        return []
    deepest = max(sides, key=lambda row: len(row["drafted_at"]))
    pairs = zip(deepest["accepted_at"], deepest["drafted_at"], strict=True)
    return [
        {"depth": depth, "drafted": drafted, "kept": kept}
        for depth, (kept, drafted) in enumerate(pairs, start=1)
        if drafted
    ]


def verdict(found: Sequence[dict[str, Any]]) -> str:
    """What to use, in a sentence."""
    best = max(found, key=lambda row: row["decode_speedup"])
    own = next(row for row in found if row["guesses"] in (GUIDED, DEFAULT))
    if best["decode_speedup"] < 1.02:
        return "drafting does not pay here: drafter `none` is as fast"
    if own["decode_speedup"] >= 0.97 * best["decode_speedup"]:
        who = "the policy" if own["guesses"] == GUIDED else "the drafter"
        return f"leave the number of guesses to {who}: no fixed one was clearly better"
    return (
        f"num_speculative_tokens={best['guesses']} was better here than {own['guesses']!r}: "
        f"{best['decode_speedup']:.2f}x against {own['decode_speedup']:.2f}x"
    )


def depth_table(depths: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="acceptance by depth", caption="of steps that had a guess so deep")
    for name in ("depth", "steps", "kept"):
        table.add_column(name, justify="right")
    for row in depths:
        share = f"{row['kept'] / row['drafted']:.0%}"
        table.add_row(str(row["depth"]), str(row["drafted"]), share)
    return table


def choices_table(found: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, caption="decoding alone; wall time has the prompt's pass in it")
    names = ("guesses", "tokens a step", "predicted", "measured", "wall time", "identical")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        if row["guesses"] in (GUIDED, DEFAULT):
            table.add_section()
        speeds = (row[key] for key in ("predicted_speedup", "decode_speedup", "speedup"))
        table.add_row(
            row["guesses"],
            f"{row['mean_acceptance_length']:.2f}",
            *(f"{speed:.2f}x" for speed in speeds),
            f"{row['identical']:.0%}",
        )
    return table


def draw(report: dict[str, Any], file: Path) -> None:
    """What passes cost, how deep guesses hold, and what each number of them is worth."""
    with figure_with(3, file) as (costs, depths, worth):
        curves = ("rows", "median_ms", "by themselves"), ("passes", "mean_ms", "in these runs")
        for name, key, label in curves:
            curve = [(row["rows"], row[key]) for row in report[name] if row["rows"] <= 16]
            costs.plot(*zip(*curve, strict=True), "o-", label=label)
        costs.legend()
        costs.set(xlabel="rows of a pass", ylabel="ms", title="What a pass costs")
        costs.set_ylim(bottom=0)
        shares = [(r["depth"], r["kept"] / r["drafted"]) for r in report["depths"]]
        depths.bar(
            [depth for depth, _ in shares], [share for _, share in shares], color="tab:green"
        )
        depths.set(xlabel="depth", ylabel="share kept", title="How deep guesses hold", ylim=(0, 1))
        fixed = [row for row in report["choices"] if row["guesses"] not in (GUIDED, DEFAULT)]
        places = range(len(fixed))
        worth.plot(places, [r["predicted_speedup"] for r in fixed], "o--", label="predicted")
        worth.plot(places, [r["decode_speedup"] for r in fixed], "o-", label="measured")
        for row in report["choices"]:
            if row not in fixed:
                worth.axhline(row["decode_speedup"], color="tab:green", label=row["guesses"])
        worth.axhline(1, color="tab:gray", linestyle="--", label="plain decoding")
        worth.set_xticks(places, [row["guesses"] for row in fixed])
        worth.set(
            xlabel="guesses a step", ylabel="speed-up", title=f"{report['drafter']}, decoding"
        )
        worth.legend()
