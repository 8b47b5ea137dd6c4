"""Runs configurations interleaved over the same prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftahead.bench.configurations import Configuration, Outcome
from draftahead.bench.disturbance import FOREIGN_SHARE, NUM_RETRIES, CpuWatch
from draftahead.bench.prompts import BenchPrompt
from draftahead.control.policy import SURVEYED_KEYS
from draftahead.core.sampling_params import SamplingParams
from draftahead.errors import OtherEngineError
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
    dropped: dict[str, list[Outcome]] = field(default_factory=dict)  # disturbed, measured again


@dataclass
class Measurement:
    configurations: list[Configuration]  # without those that failed
    batches: list[PromptBatch]  # those that every configuration has run
    interrupted: bool = False
    failed: dict[str, str] = field(default_factory=dict)  # other engines, with their errors

    def disturbances(self) -> dict[str, Any]:
        """How many repetitions others disturbed, over all batches."""
        kept = [o for batch in self.batches for found in batch.outcomes.values() for o in found]
        known = any(outcome.foreign_share is not None for outcome in kept)
        return {
            "limit": FOREIGN_SHARE,
            "known": known,  # otherwise this system has no counters, and none was dropped
            "dropped": sum(len(f) for batch in self.batches for f in batch.dropped.values()),
            "kept": sum(outcome.disturbed for outcome in kept),
        }


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
    watch: CpuWatch | None = None,
) -> Measurement:
    """Each repetition runs a batch with every configuration, starting with another one each time:
    a disturbance of the machine hits all of them. Ctrl-C ends the measurement and keeps the
    batches that are complete; an engine of others that fails is left out from there on."""
    found = Measurement(list(configurations), batches)
    runs = len(batches) * repeats * len(configurations)
    with progress_bar(f"batch {configurations[0].batch}", runs) as step:
        run = _Runner(found, watch or CpuWatch(), runs)
        try:
            warm_up = SamplingParams(temperature=0, max_tokens=min(4, params.max_tokens or 4))
            for configuration in configurations:
                run.once(configuration, batches[0].prompts[:1], warm_up)
            for number, batch in enumerate(batches):
                for repetition in range(repeats):
                    first = (number + repetition) % len(configurations)
                    for configuration in (*configurations[first:], *configurations[:first]):
                        run.repetition(configuration, batch, params)
                        step()
        except KeyboardInterrupt:
            found.interrupted = True
    names = [configuration.name for configuration in found.configurations]
    found.batches = [b for b in batches if all(b.outcomes.get(name) for name in names)]
    return found


class _Runner:
    """Runs single repetitions, and drops those that others disturbed."""

    def __init__(self, found: Measurement, watch: CpuWatch, max_retries: int) -> None:
        # On a machine that is never quiet, a measurement takes twice as long at the most.
        self._found, self._watch, self._retries_left = found, watch, max_retries

    def once(
        self, configuration: Configuration, prompts: list[list[int]], params: SamplingParams
    ) -> Outcome | None:
        """None: another engine failed, now or before."""
        if configuration not in self._found.configurations:
            return None
        try:
            with configuration.running() as pids:
                configuration.warm_up(prompts[0])
                before = self._watch.start(pids)
                outcome = configuration.run(prompts, params)
                outcome.foreign_share = self._watch.foreign_share(before, pids)
        except OtherEngineError as error:
            self._found.failed[configuration.name] = str(error)
            self._found.configurations.remove(configuration)
            return None
        outcome.disturbed = (outcome.foreign_share or 0.0) > FOREIGN_SHARE
        return outcome

    def repetition(
        self, configuration: Configuration, batch: PromptBatch, params: SamplingParams
    ) -> None:
        for left in range(NUM_RETRIES, -1, -1):
            outcome = self.once(configuration, batch.prompts, params)
            if outcome is None:
                return
            if not outcome.disturbed or not left or not self._retries_left:
                batch.outcomes.setdefault(configuration.name, []).append(outcome)
                return
            batch.dropped.setdefault(configuration.name, []).append(outcome)
            self._retries_left -= 1
