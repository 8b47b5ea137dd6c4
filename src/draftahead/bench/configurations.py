"""Configurations of a benchmark: drafters in this engine, and other engines."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from draftahead.bench import PLAIN
from draftahead.core.checks import choice
from draftahead.core.device import device_of
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.errors import ConfigError
from draftahead.llm import LLM
from draftahead.loader.embedded import ALIASES
from draftahead.loader.hub import load, resolve_dtype

ENGINES = ("transformers", "llama.cpp")


@dataclass
class Outcome:
    """One run of one configuration over the prompts of a batch."""

    seconds: float  # wall time, prefill included
    tokens: int
    texts: list[list[int]]  # generated token ids, if the engine reports them
    stats: Stats = field(default_factory=Stats)
    lossless: bool = True


class Configuration(Protocol):
    name: str
    batch: int

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome: ...


class Draftahead:
    """A drafter in this engine."""

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


class Transformers:
    """transformers' `generate`: plain, with prompt look-up, or with an assistant model."""

    batch = 1

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


class LlamaCpp:
    """llama.cpp through the optional package xllamacpp, on the same GGUF file."""

    name, batch = "llama.cpp", 1

    def __init__(self, alias: str) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(ALIASES[alias].gguf)
        parameters.n_ctx, parameters.n_parallel = 4096, 1
        parameters.cpuparams.n_threads = torch.get_num_threads()
        parameters.warmup = True
        parameters.verbosity = -1  # otherwise it logs every request
        self.server = xllamacpp.Server(parameters)

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome:
        options = {"max_tokens": params.max_tokens, "temperature": params.temperature}
        tokens, start = 0, time.perf_counter()
        for prompt in prompts:
            request = {"prompt": prompt, "cache_prompt": False, **options}
            answer = self.server.handle_completions(request)
            tokens += int(answer["usage"]["completion_tokens"])
        return Outcome(time.perf_counter() - start, tokens, [])


def check_engines(names: Sequence[str], model: str | None) -> None:
    """Refuses other engines that cannot run a model (None: one with random weights)."""
    for name in names:
        choice(*ENGINES).of("--against", name)
    if "llama.cpp" in names:
        if model not in ALIASES:
            raise ConfigError("--against llama.cpp runs the embedded model's own GGUF file")
        if importlib.util.find_spec("xllamacpp") is None:
            raise ConfigError("--against llama.cpp needs: pip install xllamacpp")


def other_engines(names: Sequence[str], model: str, device: torch.device) -> list[Configuration]:
    """Other engines on the same model, by name."""
    found: list[Configuration] = []
    if "transformers" in names:
        # Loaded again: our model may be quantized, stored, and its attention function is replaced.
        own = load(model, dtype=resolve_dtype(None, device), device=device)[0]
        look_up = Transformers("transformers prompt look-up", own, prompt_lookup_num_tokens=8)
        found += [Transformers("transformers", own), look_up]
    if "llama.cpp" in names:
        found.append(LlamaCpp(model))
    return found


def transformers_assisted(model: Any, draft: Any, num_drafted: int) -> list[Configuration]:
    """transformers, plain and with the same draft model and number of drafted tokens as ours."""
    draft.generation_config.num_assistant_tokens = num_drafted
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return [
        Transformers("transformers", model),
        Transformers("transformers assisted", model, assistant_model=draft),
    ]
