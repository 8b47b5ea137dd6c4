"""EAGLE heads with random weights, small targets for them, and drafters that use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from draftahead import LLM
from draftahead.backends.cpu import build
from draftahead.drafters.eagle.drafter import Eagle
from draftahead.drafters.eagle.head import EagleConfig, EagleHead, new_head
from draftahead.drafters.rms_norm import RMSNorm

AUX_LAYERS = (1, 3)
DRAFT_TOKENS = torch.arange(1, zoo.VOCABULARY, 2)
LAYER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": zoo.VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


def exact_head(**options: Any) -> EagleHead:
    """A head whose weights bfloat16 holds exactly, so that files change nothing."""
    layer = LlamaConfig(**LAYER, tie_word_embeddings=False)
    config = EagleConfig(
        layer, draft_vocab_size=len(DRAFT_TOKENS), aux_layers=AUX_LAYERS, **options
    )
    head, generator = EagleHead(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.draft_to_target.copy_(DRAFT_TOKENS)
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_((0.2 * noise + (weight.ndim == 1)).bfloat16())
    return head.eval()


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a head over a whole text, without a cache."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def small_llama() -> Any:
    """A target whose sizes the int8 kernels support."""
    config = LlamaConfig(
        vocab_size=zoo.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    torch.manual_seed(2)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(0.25 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model


def eagle_llm(
    monkeypatch: pytest.MonkeyPatch,
    *,
    kernels: bool,
    max_batch: int = 3,
    logit_scale: float = 1.0,
    **flags: bool,
) -> tuple[Any, LLM, Eagle]:
    """A target, and an LLM with an EAGLE head that is not quantized, by our CPU kernels or by
    torch. The larger `logit_scale`, the more confident the head and the deeper its trees. `flags`
    of EagleConfig."""
    if kernels and build.library() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr("draftahead.drafters.eagle.runner.quantize_linears", lambda head: 0)
    if not kernels:
        monkeypatch.setattr("draftahead.drafters.eagle.runner.cpu_eagle_head", lambda *_: None)
    model = small_llama()
    torch.manual_seed(1)
    head = new_head(model, torch.arange(0, zoo.VOCABULARY, 2), aux_layers=(1, 2), num_layers=2)
    for name, value in flags.items():
        setattr(head.config, name, value)
    head.layers[0]._norms_residual = head.config.norm_before_residual  # read once, when built
    if head.config.norm_before_fc:
        head.input_norm = RMSNorm(2 * 64, 1e-6)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 1:  # all norms differ
                weight.mul_(1 + 0.3 * torch.randn_like(weight))
        head.lm_head.weight.mul_(logit_scale)
    llm = LLM(model, {"method": "eagle", "model": head}, max_batch=max_batch)
    drafter = llm.engine.drafter
    assert isinstance(drafter, Eagle)
    assert (drafter.runner.cpu is not None) == kernels
    return model, llm, drafter
