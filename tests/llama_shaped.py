"""Small models that our CPU kernels run: llama-shaped, in float32, with windows and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftahead.backends.cpu import build
from draftahead.models.runner import ModelRunner

needs_kernels = pytest.mark.skipif(build.library() is None, reason=str(build.problem()))

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
SHAPES: dict[str, Any] = {
    "llama": lambda **changes: LlamaForCausalLM(
        LlamaConfig(**SIZES | {"attention_bias": True} | changes)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}


def llama_shaped(name: str, **changes: Any) -> Any:
    """One of SHAPES with random weights, and norms around 1."""
    torch.manual_seed(1)
    model = SHAPES[name](**changes).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(0.25 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model


def plain_llama(vocab_size: int) -> Any:
    """With weights as transformers draws them: logits of equal size."""
    torch.manual_seed(0)
    config = LlamaConfig(**(SIZES | {"vocab_size": vocab_size}))
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def runner_of(
    model: Any, max_batch: int = 1, *, max_context: int = 96, kv_cache_dtype: str | None = None
) -> ModelRunner:
    return ModelRunner(
        model,
        max_batch=max_batch,
        max_context=max_context,
        scratch_entries=64,
        kv_cache_dtype=kv_cache_dtype,
    )


def filled_runner(
    model: Any, texts: list[list[int]], kv_cache_dtype: str | None = None
) -> ModelRunner:
    """Slots from 1 on hold texts; slot 0 is left to others."""
    runner = runner_of(model, max_batch=1 + len(texts), kv_cache_dtype=kv_cache_dtype)
    for slot, text in enumerate(texts, start=1):
        runner.prefill(slot, text)
    return runner
