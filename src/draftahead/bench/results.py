"""What measurements say: figures by task, with intervals, and comparisons with other engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from draftahead.bench import OVERALL, PLAIN
from draftahead.bench.configurations import Configuration, Draftahead, Outcome
from draftahead.bench.measure import Measurement, PromptBatch
from draftahead.core.stats import Stats

RESAMPLES = 1000  # of the repetitions: more gives steadier ends of an interval, and takes longer
INTERVAL = (2.5, 97.5)  # percentiles: a 95% interval


def results_of(
    measurement: Measurement, forward_ms: Callable[[int], float] | None = None
) -> list[dict[str, Any]]:
    """One entry per configuration and task, `overall` included. Seconds are the sum over batches
    of the median over repetitions; the spread is that of single repetitions over all batches.
    `forward_ms`, the latency of a forward pass by its tokens, adds the lowest speed-up of any
    prompt as predicted from the forward passes, which is free of timing noise."""
    results = []
    for task, batches in _tasks(measurement):
        for configuration in measurement.configurations:
            entry = _result(configuration, task, batches)
            if isinstance(configuration, Draftahead):
                entry |= _engine_result(configuration, batches)
                if forward_ms is not None and configuration.batch == 1:
                    predicted = [
                        [_forward_passes_ms(b.outcomes[name], forward_ms) for b in batches]
                        for name in (PLAIN, configuration.name)
                    ]
                    entry["worst_predicted_speedup"] = min(
                        plain / drafted for plain, drafted in zip(*predicted, strict=True)
                    )
            results.append(entry)
    return results


def comparisons_of(measurement: Measurement) -> list[dict[str, Any]]:
    """Our configurations over those of other engines: the ratio of tokens per second (wall time,
    prefill included) with its interval, by task. `best` is the fastest one of an engine."""
    ours = [c for c in measurement.configurations if isinstance(c, Draftahead)]
    others = [c for c in measurement.configurations if not isinstance(c, Draftahead)]
    found = []
    for task, batches in _tasks(measurement):
        seconds = {c.name: _per_token(batches, c.name) for c in others}
        for own in ours:
            for other in others:
                of_engine = [seconds[c.name] for c in others if c.engine == other.engine]
                found.append(
                    {
                        "task": task,
                        "name": own.name,
                        "other": other.name,
                        "engine": other.engine,
                        "best": seconds[other.name] == min(of_engine),
                        "plain": other.name == other.reference,
                        "ratio": seconds[other.name] / _per_token(batches, own.name),
                        "interval": interval_of_ratio(batches, other.name, own.name),
                    }
                )
    return found


def repetitions_of(measurement: Measurement) -> list[dict[str, Any]]:
    """Every single run, those that were dropped included."""
    return [
        {
            "task": batch.task,
            "prompt_batch": number,
            "name": name,
            "dropped": dropped,
            "disturbed": outcome.disturbed,
            "foreign_share": outcome.foreign_share,
            "seconds": outcome.seconds,
            "tokens": outcome.tokens,
            "prompt_tokens": sum(map(len, batch.prompts)),
            "prefill_seconds": outcome.prefill_seconds,
            "prefill_tokens": outcome.prefill_tokens,
            "decode_seconds": outcome.decode_seconds,
            "drafted": outcome.stats.drafted,
            "accepted": outcome.stats.accepted,
        }
        for number, batch in enumerate(measurement.batches)
        for dropped, runs in ((False, batch.outcomes), (True, batch.dropped))
        for name, outcomes in runs.items()
        for outcome in outcomes
    ]


def interval_of_ratio(
    batches: Sequence[PromptBatch], above: str, below: str
) -> tuple[float, float] | None:
    """95% interval of the ratio of seconds per token, by resampling repetitions. The i-th of both
    configurations ran one after the other: they are drawn together, so that what slowed both does
    not count. None with a single repetition. Prompts are not resampled: it says how sure the ratio
    is for these prompts."""
    rng, sums = np.random.default_rng(0), np.zeros((2, RESAMPLES))
    counts = [min(len(batch.outcomes[name]) for name in (above, below)) for batch in batches]
    if min(counts) < 2:
        return None
    for batch, count in zip(batches, counts, strict=True):
        drawn = rng.integers(count, size=(RESAMPLES, count))
        for row, name in enumerate((above, below)):
            seconds = np.array([outcome.seconds for outcome in batch.outcomes[name][:count]])
            sums[row] += np.median(seconds[drawn], axis=1)
    tokens = [_tokens(batches, name) for name in (above, below)]
    low, high = np.percentile(sums[0] / sums[1] * (tokens[1] / tokens[0]), INTERVAL)
    return float(low), float(high)


# ----------------------------------------------------------------------------------- figures


def _tasks(measurement: Measurement) -> list[tuple[str, list[PromptBatch]]]:
    tasks = dict.fromkeys(batch.task for batch in measurement.batches)
    found = [(t, [b for b in measurement.batches if b.task == t]) for t in tasks]
    return [*found, (OVERALL, measurement.batches)] if found else []


def _result(
    configuration: Configuration, task: str, batches: Sequence[PromptBatch]
) -> dict[str, Any]:
    """The figures that every engine has. Speed-ups are ratios of seconds per token: texts of other
    engines may have other lengths."""
    name = configuration.name
    runs, plain = ([batch.outcomes[n] for batch in batches] for n in (name, PLAIN))
    speedups = [
        sum(outcomes[i].seconds for outcomes in plain)
        / sum(outcomes[i].seconds for outcomes in runs)
        * (sum(o[i].tokens for o in runs) / max(sum(o[i].tokens for o in plain), 1))
        for i in range(min(map(len, runs + plain)))
    ]
    tokens, prompts = _tokens(batches, name), [p for batch in batches for p in batch.prompts]
    entry = {
        "name": name,
        "engine": configuration.engine,
        "task": task,
        "batch": configuration.batch,
        "prompts": len(prompts),
        "tokens": tokens,
        "tokens_per_second": 1 / _per_token(batches, name),
        "speedup": _per_token(batches, PLAIN) / _per_token(batches, name),
        "speedup_spread": [min(speedups), max(speedups)],
        "speedup_interval": interval_of_ratio(batches, PLAIN, name),
    }
    if all(outcome.stats.seconds for outcomes in (*runs, *plain) for outcome in outcomes):
        own, ours = (_decoding_rate(batches, n) for n in (name, PLAIN))
        if own is not None and ours is not None:
            entry |= {"decode_tokens_per_second": own, "decode_speedup": own / ours}
        if prefill := _sum(batches, name, lambda o: o.prefill_seconds):
            entry["prompt_tokens_per_second"] = sum(map(len, prompts)) / prefill
    for key, reference in (("identical", PLAIN), ("identical_to_own", configuration.reference)):
        if reference is not None and (share := _identical(batches, name, reference)) is not None:
            entry[key] = share
    stats = _summed(batches, name)
    if stats.steps:
        entry["mean_acceptance_length"] = stats.mean_acceptance_length
        entry["acceptance_rate"] = stats.acceptance_rate
    return entry


def _engine_result(configuration: Draftahead, batches: Sequence[PromptBatch]) -> dict[str, Any]:
    """The figures that only this engine reports."""
    name, stats = configuration.name, _summed(batches, configuration.name)
    copied = ("mean_acceptance_length", "acceptance_rate", "drafted_at", "accepted_at")
    return {
        "drafter": name,
        "lossless": all(batch.outcomes[name][-1].lossless for batch in batches),
        **{key: getattr(stats, key) for key in (*copied, "steps_by_nodes", "seconds_by_nodes")},
        # Sequences of a batch share forward passes; the seconds of each count them in full.
        "ms_per_forward": 1e3 * stats.verify_seconds / stats.steps,
        "ms_per_step": 1e3 * stats.decode_seconds / stats.steps,
        "seconds_by_stage": {
            stage: getattr(stats, f"{stage}_seconds") / configuration.batch
            for stage in ("prefill", "draft", "verify", "other")
        },
    }


def _summed(batches: Sequence[PromptBatch], name: str) -> Stats:
    """Of the last repetitions."""
    stats = Stats()
    for batch in batches:
        stats.add(batch.outcomes[name][-1].stats)
    return stats


def _identical(batches: Sequence[PromptBatch], name: str, reference: str) -> float | None:
    """Share of texts that equal those of another configuration; None if they cannot be compared:
    one engine gives token ids and the other text, or the other one failed."""
    if any(reference not in batch.outcomes for batch in batches):
        return None
    pairs = [
        pair
        for batch in batches
        for pair in zip(
            batch.outcomes[name][-1].texts, batch.outcomes[reference][-1].texts, strict=True
        )
    ]
    if not pairs or any(type(text) is not type(other) for text, other in pairs):
        return None
    return sum(bool(text == other) for text, other in pairs) / len(pairs)


def _sum(batches: Sequence[PromptBatch], name: str, value: Callable[[Outcome], float]) -> float:
    """Over batches, of the median over repetitions."""
    return sum(median(value(outcome) for outcome in b.outcomes[name]) for b in batches)


def _tokens(batches: Sequence[PromptBatch], name: str) -> int:
    return round(_sum(batches, name, lambda outcome: outcome.tokens))


def _per_token(batches: Sequence[PromptBatch], name: str) -> float:
    return _sum(batches, name, lambda o: o.seconds) / max(_tokens(batches, name), 1)


def _decoding_rate(batches: Sequence[PromptBatch], name: str) -> float | None:
    """Tokens per second without prefill; None if prefill gave them all."""
    tokens = _sum(batches, name, lambda o: o.tokens - o.prefill_tokens)
    seconds = _sum(batches, name, lambda o: o.decode_seconds)
    return tokens / seconds if tokens and seconds else None


def _forward_passes_ms(outcomes: Sequence[Outcome], forward_ms: Callable[[int], float]) -> float:
    """Predicted time of all forward passes of a text: their number by nodes, times the latency."""
    return median(forward_passes_ms(o.stats.steps_by_nodes, forward_ms) for o in outcomes)


def forward_passes_ms(steps_by_nodes: Sequence[int], forward_ms: Callable[[int], float]) -> float:
    return sum(count * forward_ms(n) for n, count in enumerate(steps_by_nodes, start=1))
