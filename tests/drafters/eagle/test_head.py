"""The EAGLE head computes what published heads do; heads of other targets are refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

import drafted
import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.backends.cpu import build
from draftahead.drafters.eagle.head import EagleConfig, EagleHead, new_head
from eagle_heads import causal, small_llama

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("norms_residual", [False, True])
@torch.no_grad()
def test_the_head_computes_what_published_heads_do(norms_residual: bool) -> None:
    """Written out from the papers' code, tensor by tensor, without our modules."""
    torch.manual_seed(4)
    layer = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config = EagleConfig(
        layer, draft_vocab_size=20, aux_layers=(1, 2, 3), norm_before_residual=norms_residual
    )
    head = EagleHead(config)
    w = {name: value.normal_(0, 0.3) for name, value in head.named_parameters()}
    hidden_states, embedded = torch.randn(1, 9, 3, 32), torch.randn(1, 9, 32)
    positions = torch.arange(9)[None]
    ours = head.logits(head(embedded, head.feature(hidden_states), positions, causal))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(9, -1, 8).transpose(0, 1)

    angles = torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., :4], x[..., 4:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    feature = torch.cat([hidden_states[0, :, i] for i in range(3)], -1) @ w["fc.weight"].T
    normed = norm(feature, "layers.0.hidden_norm.weight")
    joined = torch.cat([norm(embedded[0], "layers.0.input_layernorm.weight"), normed], -1)
    query, key, value = heads(joined, "q"), heads(joined, "k"), heads(joined, "v")
    key, value = (x.repeat_interleave(2, 0) for x in (rotated(key), value))
    scores = rotated(query) @ key.transpose(1, 2) / 8**0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1) == 1, -torch.inf)
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(9, 32)
    x = normed if norms_residual else feature
    x = x + mixed @ w["layers.0.self_attn.o_proj.weight"].T
    y = norm(x, "layers.0.post_attention_layernorm.weight")
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    expected = norm(x, "norm.weight") @ w["lm_head.weight"].T
    assert torch.allclose(ours[0], expected, atol=1e-4)


@pytest.mark.skipif(build.library() is None, reason="no compiler")
def test_a_head_is_quantized_on_a_cpu_and_predicts_nearly_the_same() -> None:
    """Other drafts now and then, always the same output."""
    model = small_llama()
    head = new_head(model, torch.arange(zoo.VOCABULARY), aux_layers=(1, 2))
    llm = LLM(model, {"method": "eagle", "model": head, "num_speculative_tokens": 3})
    quantized = llm.engine.drafter.head  # type: ignore[attr-defined]
    hidden = torch.randn(4, 64)
    with torch.no_grad():
        expected = head.logits(hidden)
        error = (quantized.logits(hidden) - expected).norm() / expected.norm()
    assert 0 < error < 0.03
    prompt = zoo.ragged_prompts(1)[0]
    assert llm.generate(prompt, GREEDY)[0].token_ids == zoo.reference(model, prompt, 12)
    assert type(head.fc) is torch.nn.Linear  # the caller's own head is left as it was


def test_heads_that_do_not_fit_are_refused() -> None:
    model = zoo.tiny("llama")
    head = drafted.random_head(model)
    with pytest.raises(errors.ConfigError, match="needs 'model'"):
        LLM(model, "eagle")
    with pytest.raises(errors.ConfigError, match="no EAGLE head and no path"):
        LLM(model, {"method": "eagle", "model": 3})
    with pytest.raises(errors.HeadMismatchError, match="trained for another model"):
        LLM(model, {"method": "eagle", "model": drafted.random_head(small_llama())})
    with pytest.raises(errors.ConfigError, match="not both"):
        LLM(model, {"method": "eagle", "model": head, "tree": 5, "num_speculative_tokens": 3})
    with pytest.raises(errors.ConfigError, match="not both"):
        LLM(model, {"method": "auto", "model": model, "head": head})


@pytest.mark.model
def test_the_head_that_comes_with_smollm2_accepts_more_than_two_tokens_per_step() -> None:
    """On a prompt of ours; and the text is plain decoding's."""
    prompt = [{"role": "user", "content": "What is the capital of France, and why is it known?"}]
    params = SamplingParams(temperature=0, max_tokens=48)
    plain = LLM("smollm2", "none").chat(prompt, params)
    out = LLM("smollm2", {"method": "eagle", "num_speculative_tokens": 5}).chat(prompt, params)
    assert out.token_ids == plain.token_ids
    assert out.stats.mean_acceptance_length > 2
