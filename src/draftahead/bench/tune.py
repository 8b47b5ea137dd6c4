"""`draftahead tune`: the speed-up of each number of drafted tokens, predicted and measured.

Predicted: the measured latency of forward passes, averaged over all configurations, plus drafting.
Where a configuration was measured slower, time went elsewhere, or the machine was disturbed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from draftahead.bench import PLAIN
from draftahead.bench.report import figure, table_of
from draftahead.bench.results import forward_passes_ms

MIN_STEPS = 8  # of a number of nodes, for its mean latency to be used
AUTOMATIC = "automatic"  # the policy decides at every step
DEFAULT = "drafter's own"  # of a drafter that the policy does not adapt

Rows = Sequence[dict[str, Any]]  # results over all prompts, one per configuration


def forward_latency(overall: Rows) -> list[dict[str, Any]]:
    """Mean latency of the forward passes of these runs, by nodes, over all configurations."""
    steps: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for row in overall:
        steps.update(dict(enumerate(row["steps_by_nodes"], start=1)))
        seconds.update(dict(enumerate(row["seconds_by_nodes"], start=1)))
    known = sorted(nodes for nodes in steps if steps[nodes] >= MIN_STEPS) or [1]
    return [
        {"tokens": nodes, "mean_ms": 1e3 * seconds[nodes] / steps[nodes], "steps": steps[nodes]}
        for nodes in known
    ]


def speedups(overall: Rows, forward_ms: Callable[[int], float]) -> list[dict[str, Any]]:
    """Predicted and measured speed-up of every configuration but plain decoding."""
    copied = ("mean_acceptance_length", "acceptance_rate", "decode_speedup", "speedup", "identical")
    found = []
    for row in overall:
        if row["drafter"] != PLAIN:
            verifying = forward_passes_ms(row["steps_by_nodes"], forward_ms)
            drafting = 1e3 * row["seconds_by_stage"]["draft"] * row["batch"]
            predicted = row["tokens"] * forward_ms(1) / (verifying + drafting)
            entry = {"num_speculative_tokens": row["drafter"], "predicted_speedup": predicted}
            found.append(entry | {key: row[key] for key in copied})
    return found


def acceptance_by_position(overall: Rows) -> list[dict[str, Any]]:
    """Drafted and accepted tokens by position, of the configuration with the longest drafts."""
    longest = max(overall, key=lambda row: len(row["drafted_at"]))
    pairs = zip(longest["drafted_at"], longest["accepted_at"], strict=True)
    return [
        {"position": position, "drafted": drafted, "accepted": accepted}
        for position, (drafted, accepted) in enumerate(pairs, start=1)
        if drafted
    ]


def advice(rows: Rows) -> str:
    """Which number to use, in one sentence."""
    best = max(rows, key=lambda row: row["decode_speedup"])
    unfixed = next(row for row in rows if not is_fixed(row))
    if best["decode_speedup"] < 1.02:
        return "drafting does not pay here: drafter `none` is as fast"
    if unfixed["decode_speedup"] >= 0.97 * best["decode_speedup"]:
        decider = "policy" if unfixed["num_speculative_tokens"] == AUTOMATIC else "drafter"
        return f"leave num_speculative_tokens to the {decider}: no fixed number is clearly better"
    return (
        f"num_speculative_tokens={best['num_speculative_tokens']} was faster here than "
        f"{unfixed['num_speculative_tokens']!r}: "
        f"{best['decode_speedup']:.2f}x against {unfixed['decode_speedup']:.2f}x"
    )


def is_fixed(row: dict[str, Any]) -> bool:
    return row["num_speculative_tokens"] not in (AUTOMATIC, DEFAULT)


def acceptance_table(positions: Rows) -> Table:
    table = table_of(
        (),
        ("position", "steps", "accepted"),
        title="acceptance by position",
        caption="of steps with a token drafted there",
    )
    for row in positions:
        share = f"{row['accepted'] / row['drafted']:.0%}"
        table.add_row(str(row["position"]), str(row["drafted"]), share)
    return table


def speedup_table(rows: Rows, title: str) -> Table:
    columns = ("drafted tokens", "tokens per step", "predicted", "measured", "wall time")
    caption = "speed-up of decoding only; wall time includes prefill"
    table = table_of((), (*columns, "identical"), title=title, caption=caption)
    for row in rows:
        if not is_fixed(row):
            table.add_section()
        keys = ("predicted_speedup", "decode_speedup", "speedup")
        table.add_row(
            row["num_speculative_tokens"],
            f"{row['mean_acceptance_length']:.2f}",
            *(f"{row[key]:.2f}x" for key in keys),
            f"{row['identical']:.0%}",
        )
    return table


def draw(report: dict[str, Any], file: Path) -> None:
    """Latency by number of tokens, acceptance by position, speed-up by number of drafted tokens."""
    with figure(3, file) as (latency, acceptance, speedup):
        curves = ("latency", "median_ms", "separately"), ("forward", "mean_ms", "in these runs")
        for key, ms, label in curves:
            curve = [(row["tokens"], row[ms]) for row in report[key] if row["tokens"] <= 16]
            latency.plot(*zip(*curve, strict=True), "o-", label=label)
        title = "Latency of a forward pass"
        latency.set(xlabel="tokens per forward pass", ylabel="ms", title=title)
        latency.set_ylim(bottom=0)
        positions = report["positions"]
        shares = [row["accepted"] / row["drafted"] for row in positions]
        acceptance.bar([row["position"] for row in positions], shares, color="tab:green")
        title = "Acceptance by position"
        acceptance.set(xlabel="position", ylabel="share accepted", title=title, ylim=(0, 1))
        fixed = [row for row in report["speedups"] if is_fixed(row)]
        numbers = [row["num_speculative_tokens"] for row in fixed]
        predicted, measured = ("predicted_speedup", "o--"), ("decode_speedup", "o-")
        for (key, line), label in ((predicted, "predicted"), (measured, "measured")):
            speedup.plot(numbers, [row[key] for row in fixed], line, label=label)
        for row in report["speedups"]:
            if not is_fixed(row):
                label = row["num_speculative_tokens"]
                speedup.axhline(row["decode_speedup"], color="tab:green", label=label)
        speedup.axhline(1, color="tab:gray", linestyle="--", label="plain decoding")
        title = f"{report['drafter']}, decoding only"
        speedup.set(xlabel="drafted tokens per step", ylabel="speed-up", title=title)
        for axis in (latency, speedup):
            axis.legend()
