"""Runs configurations interleaved over the same prompts, and sums the results up by task."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from draftahead.bench import OVERALL, PLAIN
from draftahead.bench.configurations import Configuration, Draftahead, Outcome
from draftahead.bench.prompts import BenchPrompt
from draftahead.control.policy import SURVEYED_KEYS
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.llm import LLM
from draftahead.loader.progress import progress_bar

RANDOM_LENGTHS = (8, 32, 128, 384)  # tokens of random prompts
RANDOM_PROMPTS = 16  # unless limited


@dataclass
class PromptBatch:
    """Prompts generated at once, and the outcomes: one per repetition, by configuration."""

    task: str
    prompts: list[list[int]]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)


@dataclass
class Measurement:
    configurations: list[Configuration]
    batches: list[PromptBatch]  # those that every configuration has run
    interrupted: bool = False


# --------------------------------------------------------------------------------- prompts


def prepare(
    llm: LLM,
    prompts: Sequence[BenchPrompt] | None,
    batch: int,
    limit: int | None,
    params: SamplingParams,
) -> tuple[list[PromptBatch], int]:
    """The batches of prompts (random ones for None), and the context that they need."""
    target, max_tokens = llm.engine.verifier, params.max_tokens or 0
    if prompts is None:
        longest = max(1, target.max_context - max_tokens)
        batches = random_batches(target.vocab_size, batch, limit or RANDOM_PROMPTS, longest)
    else:
        batches = batches_by_task(prompts, lambda prompt: prompt.encode(llm), batch, limit)
    return batches, context_for(batches, max_tokens, target.runner.model_context)


def batches_by_task(
    prompts: Sequence[BenchPrompt],
    encode: Callable[[BenchPrompt], list[int]],
    batch: int,
    limit: int | None,
) -> list[PromptBatch]:
    """Up to `limit` prompts per task, in batches of one task."""
    found = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        of_task = [prompt for prompt in prompts if prompt.task == task][:limit]
        found += _batches(task, [encode(prompt) for prompt in of_task], batch)
    return found


def random_batches(vocab_size: int, batch: int, count: int, longest: int) -> list[PromptBatch]:
    """Random tokens in several lengths: the worst case for a drafter."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(vocab_size) for _ in range(min(longest, rng.choice(RANDOM_LENGTHS)))]
        for _ in range(count)
    ]
    return _batches("random", prompts, batch)


def _batches(task: str, prompts: list[list[int]], size: int) -> list[PromptBatch]:
    return [PromptBatch(task, prompts[at : at + size]) for at in range(0, len(prompts), size)]


def context_for(batches: Sequence[PromptBatch], max_tokens: int, limit: int) -> int:
    """KV entries per slot: a cache of the model's whole context for every configuration would take
    too much memory. At least the number that the policy measures latencies with, so that its
    decisions are the same as elsewhere."""
    longest = max(len(prompt) for batch in batches for prompt in batch.prompts)
    return min(limit, max(longest + max_tokens, SURVEYED_KEYS))


# ------------------------------------------------------------------------------- measuring


def measure(
    configurations: Sequence[Configuration],
    batches: list[PromptBatch],
    params: SamplingParams,
    repeats: int,
) -> Measurement:
    """Each repetition runs a batch with every configuration, starting with another one each time:
    a disturbance of the machine hits all of them. Ctrl-C ends the measurement and keeps the
    batches that are complete."""
    configurations, interrupted = list(configurations), False
    runs = len(batches) * repeats * len(configurations)
    with progress_bar(f"batch {configurations[0].batch}", runs) as step:
        try:
            warm_up = SamplingParams(temperature=0, max_tokens=min(4, params.max_tokens or 4))
            for configuration in configurations:
                configuration.run(batches[0].prompts[:1], warm_up)
            for number, batch in enumerate(batches):
                for repetition in range(repeats):
                    first = (number + repetition) % len(configurations)
                    for configuration in configurations[first:] + configurations[:first]:
                        outcome = configuration.run(batch.prompts, params)
                        batch.outcomes.setdefault(configuration.name, []).append(outcome)
                        step()
        except KeyboardInterrupt:
            interrupted = True
    complete = [b for b in batches if all(b.outcomes.get(c.name) for c in configurations)]
    return Measurement(configurations, complete, interrupted)


# ---------------------------------------------------------------------------------- results


def results_of(
    measurement: Measurement, forward_ms: Callable[[int], float] | None = None
) -> list[dict[str, Any]]:
    """One entry per configuration and task, `overall` included. Seconds are the sum over batches
    of the median over repetitions; the spread is that of single repetitions over all batches.
    `forward_ms`, the latency of a forward pass by its tokens, adds the lowest speed-up of any
    prompt as predicted from the forward passes, which is free of timing noise."""
    results = []
    for task in [*dict.fromkeys(batch.task for batch in measurement.batches), OVERALL]:
        batches = [batch for batch in measurement.batches if task in (batch.task, OVERALL)]
        for configuration in measurement.configurations if batches else []:
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


def _result(
    configuration: Configuration, task: str, batches: Sequence[PromptBatch]
) -> dict[str, Any]:
    """The figures that every engine has."""
    name = configuration.name
    runs, plain = ([batch.outcomes[n] for batch in batches] for n in (name, PLAIN))
    speedups = [
        sum(outcomes[i].seconds for outcomes in plain)
        / sum(outcomes[i].seconds for outcomes in runs)
        for i in range(min(map(len, runs + plain)))
    ]
    tokens = sum(outcomes[-1].tokens for outcomes in runs)
    texts, plain_texts = (
        [text for outcomes in side for text in outcomes[-1].texts] for side in (runs, plain)
    )
    entry = {
        "name": name,
        "task": task,
        "batch": configuration.batch,
        "prompts": len(plain_texts),
        "tokens": tokens,
        "tokens_per_second": tokens / _seconds(batches, name),
        "speedup": _seconds(batches, PLAIN) / _seconds(batches, name),
        "speedup_spread": [min(speedups), max(speedups)],
    }
    if texts:
        same = sum(a == b for a, b in zip(texts, plain_texts, strict=True))
        entry["identical"] = same / len(texts)
    return entry


def _engine_result(configuration: Draftahead, batches: Sequence[PromptBatch]) -> dict[str, Any]:
    """The figures that only this engine reports."""
    name, stats = configuration.name, Stats()
    last = [batch.outcomes[name][-1] for batch in batches]
    for outcome in last:
        stats.add(outcome.stats)
    copied = ("mean_acceptance_length", "acceptance_rate", "drafted_at", "accepted_at")
    decoding = [_seconds(batches, n, decoding=True) for n in (PLAIN, name)]
    return {
        "drafter": name,
        "lossless": all(outcome.lossless for outcome in last),
        "decode_speedup": decoding[0] / decoding[1],
        **{key: getattr(stats, key) for key in (*copied, "steps_by_nodes", "seconds_by_nodes")},
        # Sequences of a batch share forward passes; the seconds of each count them in full.
        "ms_per_forward": 1e3 * stats.verify_seconds / stats.steps,
        "ms_per_step": 1e3 * stats.decode_seconds / stats.steps,
        "seconds_by_stage": {
            stage: getattr(stats, f"{stage}_seconds") / configuration.batch
            for stage in ("prefill", "draft", "verify", "other")
        },
    }


def _seconds(batches: Sequence[PromptBatch], name: str, *, decoding: bool = False) -> float:
    """Of a configuration: all, or those of decoding only."""

    def of(outcome: Outcome, batch: PromptBatch) -> float:
        return outcome.stats.decode_seconds / len(batch.prompts) if decoding else outcome.seconds

    return sum(median(of(outcome, b) for outcome in b.outcomes[name]) for b in batches)


def _forward_passes_ms(outcomes: Sequence[Outcome], forward_ms: Callable[[int], float]) -> float:
    """Predicted time of all forward passes of a text: their number by nodes, times the latency."""
    return median(forward_passes_ms(o.stats.steps_by_nodes, forward_ms) for o in outcomes)


def forward_passes_ms(steps_by_nodes: Sequence[int], forward_ms: Callable[[int], float]) -> float:
    return sum(count * forward_ms(n) for n, count in enumerate(steps_by_nodes, start=1))
