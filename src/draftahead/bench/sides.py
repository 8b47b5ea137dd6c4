"""The sides of a measurement: our own decoding with one drafter or another, and the peers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from draftahead.bench.machine import synchronize
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.errors import ConfigError
from draftahead.llm import LLM
from draftahead.loader.hub import gguf_path


@dataclass
class Outcome:
    """One group of prompts, once, by one side."""

    seconds: float  # wall time, prompts included
    tokens: int
    texts: list[list[int]]  # token ids, where the side tells them
    stats: Stats = field(default_factory=Stats)
    lossless: bool = True


class Side(Protocol):
    name: str
    batch: int

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> Outcome: ...


class Ours:
    def __init__(self, name: str, llm: LLM, batch: int) -> None:
        self.name, self.llm, self.batch = name, llm, batch

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> Outcome:
        start = time.perf_counter()
        outs = self.llm.generate(list(prompts), sampling)
        seconds = time.perf_counter() - start
        total = Stats()
        for out in outs:
            total.add(out.stats)
        lossless = all(out.lossless for out in outs)
        return Outcome(seconds, total.tokens, [out.token_ids for out in outs], total, lossless)


class Transformers:
    """Its own `generate`: plain, with its prompt look-up, or with an assistant model."""

    def __init__(self, name: str, model: Any, options: dict[str, Any]) -> None:
        self.name, self.model, self.options, self.batch = name, model, options, 1

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> Outcome:
        texts, start = [], time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.model.device)
            warm = {"temperature": sampling.temperature} if sampling.temperature else {}
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_tokens,
                do_sample=bool(sampling.temperature),
                **warm,
                **self.options,
            )
            texts.append(out[0, len(prompt) :].tolist())
        synchronize(self.model.device)
        seconds = time.perf_counter() - start
        return Outcome(seconds, sum(map(len, texts)), texts)


class LlamaCpp:
    """llama.cpp through the optional package xllamacpp, on the same GGUF file."""

    name, batch = "llama.cpp", 1

    def __init__(self, alias: str, context: int) -> None:
        try:
            import xllamacpp
        except ImportError:
            raise ConfigError("--against llama.cpp needs: pip install xllamacpp") from None
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(gguf_path(alias))
        parameters.n_ctx, parameters.n_parallel = context, 1
        parameters.cpuparams.n_threads = torch.get_num_threads()
        parameters.warmup = True
        parameters.verbosity = -1  # it would log every request
        self.server = xllamacpp.Server(parameters)

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> Outcome:
        tokens, start = 0, time.perf_counter()
        for prompt in prompts:
            request = {
                "prompt": prompt,
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "cache_prompt": False,
            }
            answer = self.server.handle_completions(request)
            tokens += int(answer["usage"]["completion_tokens"])
        return Outcome(time.perf_counter() - start, tokens, [])


def transformers_peers(model: Any, assistant: Any = None) -> list[Side]:
    """Plain, and speculating in its own two ways."""
    found: list[Side] = [
        Transformers("transformers", model, {}),
        Transformers("transformers prompt look-up", model, {"prompt_lookup_num_tokens": 8}),
    ]
    if assistant is not None:
        options = {"assistant_model": assistant}
        found.append(Transformers("transformers assisted", model, options))
    return found


def transformers_pair(model: Any, assistant: Any, tokens: int) -> list[Side]:
    """Plain, and with the same draft and as many guesses a step as ours."""
    fixed = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant"}
    for name, value in (fixed | {"assistant_confidence_threshold": 0.0}).items():
        setattr(assistant.generation_config, name, value)
    return [
        Transformers("transformers", model, {}),
        Transformers("transformers assisted", model, {"assistant_model": assistant}),
    ]
