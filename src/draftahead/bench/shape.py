"""Models of a named shape with random weights: the engine's overhead, without any download.

The draft model is the target's own first layers. The other layers are scaled down until both agree
on a given share of tokens (the simulated acceptance rate). The measured speed-up is then compared
with the one predicted from the measured acceptance and the latency of single forward passes: the
difference is the engine's overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftahead.bench import OVERALL, PLAIN
from draftahead.bench.configurations import (
    Configuration,
    Draftahead,
    transformers_assisted,
    with_drafters,
)
from draftahead.bench.latency import measure_latency
from draftahead.bench.machine import peak_memory, provenance
from draftahead.bench.measure import PromptBatch, measure
from draftahead.bench.results import results_of
from draftahead.core.checks import choice
from draftahead.core.draft import Draft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter
from draftahead.errors import ConfigError
from draftahead.llm import LLM
from draftahead.loader.hub import resolve_device, resolve_dtype
from draftahead.loader.progress import progress_bar


@dataclass(frozen=True)
class Shape:
    """Fields of LlamaConfig."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int


SHAPES = {
    "llama-8b": Shape(32, 4096, 14336, 32, 8, 128256, 128),
    "llama-1b": Shape(16, 2048, 8192, 32, 8, 128256, 64),
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 49152, 64),
    "tiny": Shape(4, 64, 128, 4, 2, 512, 32),
}
DRAFT_LAYERS = {"llama-8b": 2, "llama-1b": 1, "smollm2-135m": 4, "tiny": 1}  # of the draft model
PROMPT_LENGTH = 256  # random tokens
SEARCH_STEPS = 12  # bisection steps of the search for the scale
TOLERANCE = 0.01  # of the simulated acceptance rate, at which the search ends
DRAFT, PERFECT = "draft_model", "perfect"  # configurations, beside plain decoding


def measure_shape(
    name: str,
    params: SamplingParams,
    *,
    acceptance_rate: float,
    num_drafted: int,
    dtype: str | None,
    device: str | None,
    num_prompts: int,
    repeats: int,
    against_transformers: bool,
) -> dict[str, Any]:
    """The report of `draftahead bench --shape`."""
    choice(*SHAPES).of("--shape", name)
    if not 0 < acceptance_rate <= 1:
        raise ConfigError(f"--acceptance-rate must be above 0 and at most 1, not {acceptance_rate}")
    if (params.max_tokens or 0) < 2:
        raise ConfigError("--max-tokens must be 2 or more: a text of one token has no draft")
    torch_device = resolve_device(device)
    weights_dtype = _weights_dtype(dtype, torch_device)
    target, draft = build_pair(name, weights_dtype, torch_device)
    size = (num_prompts, PROMPT_LENGTH)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, target.vocab_size, size, generator=generator).tolist()
    perfect = PerfectDrafter(num_drafted)
    config = {"method": DRAFT, "model": draft, "num_speculative_tokens": num_drafted}
    context = PROMPT_LENGTH + (params.max_tokens or 0) + 8
    llm = LLM(target, PLAIN, max_batch=1, max_context=context)
    drafters = with_drafters(llm, {DRAFT: config, PERFECT: perfect}, 1, context)
    ours = {configuration.name: configuration for configuration in drafters}
    greedy = SamplingParams(temperature=0, max_tokens=params.max_tokens)

    def first_token_acceptance() -> float:
        stats = ours[DRAFT].run(prompts, greedy).stats
        return stats.accepted_at[0] / stats.drafted_at[0]

    upper = target.model.layers[DRAFT_LAYERS[name] :]
    simulated_rate = scale_layers(upper, first_token_acceptance, acceptance_rate)
    texts = ours[PLAIN].run(prompts, greedy).texts
    perfect.texts = {tuple(p): text for p, text in zip(prompts, texts, strict=True)}
    configurations: list[Configuration] = [*drafters]
    if against_transformers:
        configurations += transformers_assisted(target, draft, num_drafted)
    batches = [PromptBatch("random text", [prompt]) for prompt in prompts]
    measurement = measure(configurations, batches, params, repeats)
    if not measurement.batches:  # there is nothing to report
        raise KeyboardInterrupt
    results = [row for row in results_of(measurement) if row["task"] == OVERALL]
    return {
        **provenance(),
        **({"interrupted": True} if measurement.interrupted else {}),
        "shape": name,
        "acceptance_rate_requested": acceptance_rate,
        "simulated_acceptance_rate": simulated_rate,
        "dtype": str(weights_dtype),
        **overheads(ours, results, num_drafted),
        "results": [row for row in results if "drafter" in row],
        "other_engines": [row for row in results if "drafter" not in row],
        "peak_memory_bytes": peak_memory(torch_device),
    }


def _weights_dtype(name: str | None, device: torch.device) -> torch.dtype:
    chosen = resolve_dtype(name, device)
    if isinstance(chosen, str):
        found: torch.dtype = getattr(torch, "bfloat16" if chosen == "auto" else chosen)
        return found
    return chosen


@torch.no_grad()
def build_pair(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A target with random weights, and a draft model that shares its first layers."""
    fields = asdict(SHAPES[name]) | {"max_position_embeddings": 8192}
    fields |= {"bos_token_id": None, "eos_token_id": None}

    def build(**changes: Any) -> Any:
        config = LlamaConfig(**fields | changes)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    torch.manual_seed(0)
    with device:
        target = build()
        draft = build(num_hidden_layers=DRAFT_LAYERS[name])
    for parameter in target.parameters():
        if parameter.ndim > 1:  # larger than the initialisation, so that layers change the output
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    draft.lm_head, draft.model.norm = target.lm_head, target.model.norm
    draft.model.embed_tokens = target.model.embed_tokens
    draft.model.layers = target.model.layers[: DRAFT_LAYERS[name]]
    return target, draft


class PerfectDrafter(Drafter):
    """Drafts the tokens that the target will generate: the cost of a step whose tokens are all
    accepted."""

    def __init__(self, num_drafted: int) -> None:
        self.num_drafted = num_drafted
        self.texts: dict[tuple[int, ...], list[int]] = {}  # by prompt

    def propose(self, batch: Batch) -> Draft | None:
        chains = []
        for sequence, max_depth in zip(batch.sequences, batch.max_depths, strict=True):
            text, start = self.texts.get(sequence.prompt, []), sequence.num_generated
            chains.append(text[start : start + min(self.num_drafted, max_depth)])
        return Draft.chains(batch.roots, chains) if any(chains) else None


@torch.no_grad()
def scale_layers(layers: Any, acceptance_rate: Callable[[], float], wanted: float) -> float:
    """Scales the output projections of the layers above the draft model by bisection, until
    `acceptance_rate()` is near `wanted`; returns it. At scale 0 draft model and target agree on
    every token, at a large scale on few."""
    weights = [
        w for layer in layers for w in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
    ]
    current = 1.0

    def rate_at(scale: float) -> float:
        nonlocal current
        for weight in weights:
            weight.mul_(scale / current)
        current = scale
        return acceptance_rate()

    low, high = 0.0, 4.0
    tried: list[tuple[float, float]] = []  # (distance from the wanted rate, scale)
    with progress_bar(f"acceptance rate {wanted}", SEARCH_STEPS) as step:
        for _ in range(SEARCH_STEPS):
            scale = (low + high) / 2
            rate = rate_at(scale)
            tried.append((abs(rate - wanted), scale))
            low, high = (scale, high) if rate > wanted else (low, scale)
            step()
            if tried[-1][0] < TOLERANCE:
                return rate
    return rate_at(min(tried)[1])


def overheads(
    ours: dict[str, Draftahead], results: list[dict[str, Any]], num_drafted: int
) -> dict[str, Any]:
    """Measured times of steps beside those predicted from the latency of single forward passes."""
    draft_runner = ours[DRAFT].llm.engine.drafter.runner  # type: ignore[attr-defined]
    sizes = tuple(sorted({1, 2, 4, num_drafted + 1, 8, 16, 32}))
    context = PROMPT_LENGTH + 64
    runner = ours[PLAIN].llm.engine.verifier.runner
    target = measure_latency(runner, num_tokens=sizes, context=context)
    draft = measure_latency(draft_runner, num_tokens=(1, 2), context=context)["latency"]
    target_ms, draft_ms = (
        {row["tokens"]: row["median_ms"] for row in rows} for rows in (target["latency"], draft)
    )
    by_name = {row["name"]: row for row in results}
    plain, drafted, perfect = (by_name[name] for name in (PLAIN, DRAFT, PERFECT))
    # The draft model first reads the last two tokens, then one per further drafted token.
    forward_ms = target_ms[num_drafted + 1] + draft_ms[2] + (num_drafted - 1) * draft_ms[1]
    length = drafted["mean_acceptance_length"]
    predicted = length * target_ms[1] / forward_ms
    return target | {
        "draft_latency": draft,
        "num_speculative_tokens": num_drafted,
        "plain_ms_per_token": plain["ms_per_step"],
        "drafted_ms_per_step": drafted["ms_per_step"],
        "drafted_ms_per_token": drafted["ms_per_step"] / length,
        "mean_acceptance_length": length,
        "speedup": drafted["decode_speedup"],
        "predicted_speedup": predicted,
        "measured_over_predicted": drafted["decode_speedup"] / predicted,
        "outside_forward_plain": 1 - target_ms[1] / plain["ms_per_step"],
        "outside_forward_drafted": 1 - forward_ms / drafted["ms_per_step"],
        "accepted_step_over_plain_step": perfect["ms_per_step"] / plain["ms_per_step"],
    }
