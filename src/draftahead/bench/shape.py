"""Models of a named shape with random weights: what the engine costs, without any download.

The draft is the target's own first layers. The other layers are scaled down until draft and target
agree as often as asked for; then the measured speed-up is held against the one that the measured
acceptance and the measured times of single passes predict. What is missing is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftahead.bench.rows import measure_rows
from draftahead.bench.sides import Ours
from draftahead.core.device import device_of
from draftahead.core.draft import Draft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter
from draftahead.errors import ConfigError, nearest
from draftahead.llm import LLM


@dataclass(frozen=True)
class Shape:
    layers: int
    draft_layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int
    width: int = 128


SHAPES = {
    "llama-8b": Shape(32, 2, 4096, 14336, 32, 8, 128256),
    "llama-1b": Shape(16, 1, 2048, 8192, 32, 8, 128256, 64),
    "smollm2-135m": Shape(30, 4, 576, 1536, 9, 3, 49152, 64),
    "tiny": Shape(4, 1, 64, 128, 4, 2, 512, 32),
}
PROMPT = 256  # random tokens
STEPS = 12  # of the search for a scale
NEAR = 0.01  # to the agreement that was asked for
PERFECT = "perfect"  # the side whose drafter knows what the target will say


def dtype_for(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.bfloat16 if device_of(device).is_gpu else torch.float32
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"unknown dtype {name!r}: float32, bfloat16 or float16")
    return found


@torch.no_grad()
def build_pair(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """A target with random weights, and a draft that shares its first layers."""
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}{nearest(name, SHAPES)}")
    shape, before = SHAPES[name], torch.get_default_dtype()

    def config(layers: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            head_dim=shape.width,
            max_position_embeddings=8192,
            eos_token_id=None,
            bos_token_id=None,
        )

    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with device:
            target = LlamaForCausalLM(config(shape.layers)).eval()
            draft = LlamaForCausalLM(config(shape.draft_layers)).eval()
    finally:
        torch.set_default_dtype(before)
    for parameter in target.parameters():
        if parameter.ndim > 1:  # large enough that layers change what is said
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    draft.lm_head, draft.model.norm = target.lm_head, target.model.norm
    draft.model.embed_tokens = target.model.embed_tokens
    draft.model.layers = target.model.layers[: shape.draft_layers]
    return target, draft


def prompts_for(vocabulary: int, count: int, length: int = PROMPT) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (count, length), generator=generator).tolist()


def agreement_of(side: Ours, prompts: list[list[int]], tokens: int) -> float:
    """How often the first guess is what the target says."""
    stats: Stats = side.run(prompts, SamplingParams(temperature=0, max_tokens=tokens)).stats
    return stats.accepted_at[0] / stats.drafted_at[0]


@torch.no_grad()
def calibrate(
    target: Any,
    draft_layers: int,
    measured: Callable[[], float],
    wanted: float,
    progress: Callable[[], None] = lambda: None,
) -> float:
    """Scales what the upper layers add until `measured()` is near `wanted`; returns what it is.
    With the scale at 0 draft and target are one, with a large scale they have little in common."""
    if not 0 < wanted <= 1:
        raise ConfigError(f"--agreement must be above 0 and at most 1, not {wanted}")
    upper = target.model.layers[draft_layers:]
    weights = [
        w for layer in upper for w in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
    ]
    now = 1.0

    def tried(scale: float) -> float:
        nonlocal now
        for weight in weights:
            weight.mul_(scale / now)
        now = scale
        return measured()

    low, high = 0.0, 4.0
    found: list[tuple[float, float]] = []  # (how far off, scale)
    for _ in range(STEPS):
        scale = (low + high) / 2
        got = tried(scale)
        found.append((abs(got - wanted), scale))
        low, high = (scale, high) if got > wanted else (low, scale)
        progress()
        if found[-1][0] < NEAR:
            return got
    return tried(min(found)[1])


class Known(Drafter):
    """Guesses that are always right: what a step of so many rows costs when all is accepted."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompt

    def propose(self, batch: Batch) -> Draft | None:
        guesses = []
        for sequence, room in zip(batch.sequences, batch.max_depths, strict=True):
            answer = self.answers.get(sequence.request.prompt, [])
            done = sequence.num_generated
            guesses.append(answer[done : done + min(self.count, room)])
        return Draft.chains(batch.roots, guesses) if any(guesses) else None


def sides_for(
    target: Any, draft: Any, count: int, prompts: list[list[int]], tokens: int
) -> list[Ours]:
    """Plain, drafted by the first layers, and with a drafter that is always right."""
    most = len(prompts[0]) + tokens + 8
    known = Known(count)
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": count}
    drafters: dict[str, Any] = {"none": "none", "draft_model": config, PERFECT: known}
    return [
        Ours(name, LLM(target, drafter, max_batch=1, max_context=most), 1)
        for name, drafter in drafters.items()
    ]


def learn_answers(sides: list[Ours], prompts: list[list[int]], tokens: int) -> None:
    """Tells the knowing drafter what plain decoding says."""
    texts = sides[0].run(prompts, SamplingParams(temperature=0, max_tokens=tokens)).texts
    known = sides[-1].llm.engine.drafter
    assert isinstance(known, Known)
    known.answers = {tuple(p): text for p, text in zip(prompts, texts, strict=True)}


def overheads(sides: list[Ours], results: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """What was measured beside what the times of single passes predict."""
    draft_passes = sides[1].llm.engine.drafter.runner  # type: ignore[attr-defined]
    rows = tuple(sorted({1, 2, 4, count + 1, 8, 16, 32}))
    curve = measure_rows(sides[0].llm.engine.verifier.runner, rows=rows, context=PROMPT + 64)
    draft = measure_rows(draft_passes, rows=(1, 2), context=PROMPT + 64)
    target_ms = {row["rows"]: row["median_ms"] for row in curve["rows"]}
    draft_ms = {row["rows"]: row["median_ms"] for row in draft["rows"]}
    by_name = {row["name"]: row for row in results if row["task"] == "overall"}
    plain, drafted, perfect = (by_name[side.name] for side in sides)
    passes = target_ms[count + 1] + draft_ms[2] + (count - 1) * draft_ms[1]
    length = drafted["mean_acceptance_length"]
    predicted = length * target_ms[1] / passes
    return curve | {
        "draft_rows": draft["rows"],
        "speculative_tokens": count,
        "plain_ms_per_token": plain["ms_per_step"],
        "drafted_ms_per_step": drafted["ms_per_step"],
        "drafted_ms_per_token": drafted["ms_per_step"] / length,
        "mean_acceptance_length": length,
        "speedup": drafted["decode_speedup"],
        "predicted_speedup": predicted,
        "measured_over_predicted": drafted["decode_speedup"] / predicted,
        "outside_passes_plain": 1 - target_ms[1] / plain["ms_per_step"],
        "outside_passes_drafted": 1 - passes / drafted["ms_per_step"],
        "accepted_step_over_plain_step": perfect["ms_per_step"] / plain["ms_per_step"],
    }
