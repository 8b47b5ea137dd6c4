"""Configurations of a benchmark: drafters in this engine, and transformers' `generate`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from draftahead.bench import PLAIN
from draftahead.core.device import device_of
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.llm import LLM


@dataclass
class Outcome:
    """One run of one configuration over the prompts of a batch."""

    seconds: float  # wall time, prefill included
    tokens: int
    texts: Sequence[Any]  # generated token ids, or text where an engine gives no ids
    stats: Stats = field(default_factory=Stats)  # empty where an engine reports none
    lossless: bool = True
    prefill_tokens: int = 0  # generated ones that prefill_seconds include: of a llama-server, one
    foreign_share: float | None = None  # of the CPU time, by other processes; None: not known
    disturbed: bool = False  # by them

    @property
    def prefill_seconds(self) -> float:
        """Sequences of a batch run at once: the seconds of each count them in full."""
        return self.stats.prefill_seconds / max(len(self.texts), 1)

    @property
    def decode_seconds(self) -> float:
        return self.stats.decode_seconds / max(len(self.texts), 1)


class Configuration(Protocol):
    name: str
    batch: int
    engine: str
    reference: str | None  # the engine's own plain decoding, which texts are compared with

    def running(self) -> AbstractContextManager[list[int]]:
        """Ready to run while entered. Yields the processes in which it runs."""
        ...

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Called before every repetition."""
        ...

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome: ...


class InThisProcess:
    """What is loaded all the time, and warm."""

    @contextmanager
    def running(self) -> Iterator[list[int]]:
        yield [os.getpid()]

    def warm_up(self, prompt: Sequence[int]) -> None:
        pass


class Draftahead(InThisProcess):
    """A drafter in this engine."""

    engine = "draftahead"
    reference: str | None = PLAIN

    def __init__(self, name: str, llm: LLM) -> None:
        self.name, self.llm, self.batch = name, llm, llm.config.max_batch

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome:
        start = time.perf_counter()
        completions = self.llm.generate(list(prompts), params)
        seconds = time.perf_counter() - start
        total = Stats()
        for completion in completions:
            total.add(completion.stats)
        texts = [completion.token_ids for completion in completions]
        return Outcome(seconds, total.tokens, texts, total, self.llm.config.lossless)


def with_drafters(
    llm: LLM, drafters: Mapping[str, Any], batch: int, context: int, *, lossless: bool = True
) -> list[Draftahead]:
    """Plain decoding and each drafter, by name, over the weights of one model."""
    plain = llm.with_drafter(PLAIN, max_batch=batch, max_context=context, lossless=True)
    llms = {n: plain.with_drafter(drafter, lossless=lossless) for n, drafter in drafters.items()}
    return [Draftahead(name, llm) for name, llm in [(PLAIN, plain), *llms.items()]]


class Transformers(InThisProcess):
    """transformers' `generate`: plain, with prompt look-up, or with an assistant model."""

    batch = 1
    engine = "transformers"
    reference: str | None = "transformers"

    def __init__(self, name: str, model: Any, **options: Any) -> None:
        self.name, self.model, self.options = name, model, options

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome:
        options: dict[str, Any] = {"max_new_tokens": params.max_tokens, "do_sample": False}
        if params.temperature:
            options |= {"do_sample": True, "temperature": params.temperature}
        texts, start = [], time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.model.device)
            mask = torch.ones_like(ids)
            out = self.model.generate(ids, attention_mask=mask, **options, **self.options)
            texts.append(out[0, len(prompt) :].tolist())
        device_of(self.model.device).synchronize()
        return Outcome(time.perf_counter() - start, sum(map(len, texts)), texts)


def transformers_assisted(model: Any, draft: Any, num_drafted: int) -> list[Configuration]:
    """transformers, plain and with the same draft model and number of drafted tokens as ours."""
    draft.generation_config.num_assistant_tokens = num_drafted
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return [
        Transformers("transformers", model),
        Transformers("transformers assisted", model, assistant_model=draft),
    ]
