"""Runs the sides turn by turn over the same prompts, and says what came of it, by task."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from draftahead.bench.prompts import BenchPrompt
from draftahead.bench.sides import Ours, Outcome, Side
from draftahead.control.policy import SURVEYED_KEYS
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats

OVERALL = "overall"
LENGTHS = (8, 32, 128, 384)  # of random prompts


@dataclass
class Group:
    """Prompts that are generated for at once, and what each side made of them, turn by turn."""

    task: str
    prompts: list[list[int]]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)  # by side

    def complete(self, sides: Iterable[Side]) -> bool:
        return all(self.outcomes.get(side.name) for side in sides)


@dataclass
class Measurement:
    sides: list[Side]
    groups: list[Group]
    interrupted: bool = False


def grouped(
    prompts: Sequence[BenchPrompt],
    encode: Callable[[Any], list[int]],
    batch: int,
    limit: int | None,
) -> list[Group]:
    """The first turns of up to `limit` prompts a task, in groups of one task."""
    tasks: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        mates = tasks.setdefault(prompt.task, [])
        if limit is None or len(mates) < limit:
            mates.append(encode([{"role": "user", "content": prompt.turns[0]}]))
    return [
        Group(task, mates[start : start + batch])
        for task, mates in tasks.items()
        for start in range(0, len(mates), batch)
    ]


def random_groups(vocabulary: int, batch: int, count: int, longest: int) -> list[Group]:
    """Prompts that no drafter can make sense of: random tokens, of many lengths."""
    chance = random.Random(0)
    texts = [
        [chance.randrange(vocabulary) for _ in range(min(longest, chance.choice(LENGTHS)))]
        for _ in range(count)
    ]
    return [Group("random", texts[at : at + batch]) for at in range(0, count, batch)]


def context_for(groups: Sequence[Group], tokens: int, limit: int) -> int:
    """What a side must hold of each text: a cache of the model's whole context for every side would
    be far more. Never less than the policy measures passes over, for it should decide here as it
    does elsewhere."""
    longest = max(len(prompt) for group in groups for prompt in group.prompts)
    return min(limit, max(longest + tokens, SURVEYED_KEYS))


def measure(
    sides: list[Side],
    groups: list[Group],
    sampling: SamplingParams,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
) -> Measurement:
    """Each turn takes every side through a group before the next turn begins, each time starting
    with another side: whatever the machine does meanwhile, it does to all of them. Ctrl-C ends the
    measurement and keeps what is there."""
    found = Measurement(sides, groups)
    try:
        for side in sides:  # the first pass of a process is slow
            short = SamplingParams(temperature=0, max_tokens=min(4, sampling.max_tokens or 4))
            side.run(groups[0].prompts[:1], short)
        for number, group in enumerate(groups):
            for turn in range(repeats):
                first = (number + turn) % len(sides)
                for side in sides[first:] + sides[:first]:
                    outcome = side.run(group.prompts, sampling)
                    group.outcomes.setdefault(side.name, []).append(outcome)
                    progress()
    except KeyboardInterrupt:
        found.interrupted = True
    found.groups = [group for group in groups if group.complete(sides)]
    return found


def results_of(
    found: Measurement, plain: str, pass_ms: Callable[[int], float] | None = None
) -> list[dict[str, Any]]:
    """One entry a side and task, `overall` included. A side's seconds are the sum over groups of
    the median over turns; its spread is that of single turns over the whole set. With `pass_ms`,
    the time of a pass by its rows, also the worst prompt, by passes alone and free of noise."""
    tasks = list(dict.fromkeys(group.task for group in found.groups))
    results = []
    for task in [*tasks, OVERALL]:
        groups = [group for group in found.groups if task in (group.task, OVERALL)]
        for side in found.sides if groups else []:
            entry = _result(side, task, groups, plain)
            if pass_ms is not None and isinstance(side, Ours) and side.batch == 1:
                entry["worst_modelled_speedup"] = min(
                    modelled(group.outcomes[plain], pass_ms)
                    / modelled(group.outcomes[side.name], pass_ms)
                    for group in groups
                )
            results.append(entry)
    return results


def modelled(outcomes: Sequence[Outcome], pass_ms: Callable[[int], float]) -> float:
    """What one text's passes take: their number by width, times the usual time of that width."""
    return median(
        sum(
            count * pass_ms(nodes)
            for nodes, count in enumerate(outcome.stats.steps_by_nodes, start=1)
        )
        for outcome in outcomes
    )


def _result(side: Side, task: str, groups: list[Group], plain: str) -> dict[str, Any]:
    def seconds(name: str) -> float:
        return sum(median(o.seconds for o in group.outcomes[name]) for group in groups)

    def decode_seconds(name: str) -> float:
        return sum(
            median(o.stats.decode_seconds / len(group.prompts) for o in group.outcomes[name])
            for group in groups
        )

    turns = min(len(group.outcomes[side.name]) for group in groups)
    by_turn = [
        sum(g.outcomes[plain][t].seconds for g in groups)
        / sum(g.outcomes[side.name][t].seconds for g in groups)
        for t in range(min(turns, *(len(g.outcomes[plain]) for g in groups)))
    ]
    last = [group.outcomes[side.name][-1] for group in groups]
    texts = [text for outcome in last for text in outcome.texts]
    expected = [text for group in groups for text in group.outcomes[plain][-1].texts]
    tokens = sum(outcome.tokens for outcome in last)
    entry: dict[str, Any] = {
        "name": side.name,
        "task": task,
        "batch": side.batch,
        "prompts": len(expected),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds(side.name),
        "speedup": seconds(plain) / seconds(side.name),
        "speedup_spread": [min(by_turn), max(by_turn)],
    }
    if texts:
        same = sum(a == b for a, b in zip(texts, expected, strict=True))
        entry["identical"] = same / len(texts)
    if isinstance(side, Ours):
        stats = Stats()
        for outcome in last:
            stats.add(outcome.stats)
        entry |= {
            "drafter": side.name,
            "lossless": all(outcome.lossless for outcome in last),
            "decode_speedup": decode_seconds(plain) / decode_seconds(side.name),
            "mean_acceptance_length": stats.mean_acceptance_length,
            "acceptance_rate": stats.acceptance_rate,
            "drafted_at": stats.drafted_at,
            "accepted_at": stats.accepted_at,
            "steps_by_nodes": stats.steps_by_nodes,
            "seconds_by_nodes": stats.seconds_by_nodes,
            # Mates share a pass and its time; each sequence counted both for itself.
            "ms_per_pass": 1e3 * stats.verify_seconds / stats.steps,
            "ms_per_step": 1e3 * stats.decode_seconds / stats.steps,
            "seconds_by_stage": {
                name: getattr(stats, f"{name}_seconds") / side.batch
                for name in ("prefill", "draft", "verify", "other")
            },
        }
    return entry
