"""Tiny random causal language models, for parity with transformers' own `generate`.

Every model has three layers, 32 channels and 97 tokens. The weights are far larger than a trained
model's start would be: at the usual 0.02 a greedy text is one token repeated, which proves nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 97
WINDOW = 8
POSITIONS = 128
LAYERS = 3

SLIDING = "sliding_attention"
FULL = "full_attention"

# Ids every configuration takes. The end is taken away once the model is built, because some
# configurations (glm4) read None as "their own ids", which lie outside this vocabulary.
_TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HEADS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
_SIZES: dict[str, Any] = {
    **_HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def _config(kind: str, *groups: dict[str, Any], **own: Any) -> Callable[[], PreTrainedConfig]:
    """A maker of configurations, so that importing this module builds nothing."""

    def make() -> PreTrainedConfig:
        options = dict(_TOKENS)
        for group in groups:
            options.update(group)
        options.update(own)
        # A configuration may write into the dictionaries it is given (rope_parameters).
        options = {k: _copied(v) for k, v in options.items()}
        return getattr(transformers, kind)(**options)

    return make


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return list(value) if isinstance(value, list) else value


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config("LlamaConfig", _GROUPED),
    "llama_dynamic": _config(
        "LlamaConfig",
        _GROUPED,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "mistral": _config("MistralConfig", _GROUPED, head_dim=8, sliding_window=WINDOW),
    "qwen2": _config("Qwen2Config", _GROUPED),
    "qwen3": _config("Qwen3Config", _GROUPED, head_dim=8),
    "qwen3_sliding": _config(
        "Qwen3Config",
        _GROUPED,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=[FULL, SLIDING, SLIDING],
    ),
    "gemma2": _config(
        "Gemma2Config",
        _GROUPED,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL, SLIDING],
        attn_logit_softcapping=5.0,
        final_logit_softcapping=6.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        _GROUPED,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=[SLIDING, SLIDING, FULL],
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
        },
    ),
    "phi3": _config("Phi3Config", _GROUPED, sliding_window=WINDOW),
    "phi3_longrope": _config(
        "Phi3Config",
        _GROUPED,
        original_max_position_embeddings=24,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": POSITIONS / 24,
            "short_factor": [1.0, 1.0, 1.1, 1.2],
            "long_factor": [1.0, 1.6, 2.8, 4.5],
        },
    ),
    "phi": _config("PhiConfig", _GROUPED),
    "gpt2": _config("GPT2Config", n_embd=32, n_layer=LAYERS, n_head=4, n_positions=POSITIONS),
    "gpt_neox": _config("GPTNeoXConfig", _SIZES),
    "gptj": _config(
        "GPTJConfig", n_embd=32, n_layer=LAYERS, n_head=4, n_positions=POSITIONS, rotary_dim=4
    ),
    "opt": _config("OPTConfig", _HEADS, ffn_dim=64, max_position_embeddings=POSITIONS),
    "olmo2": _config("Olmo2Config", _GROUPED),
    "olmo3": _config(
        "Olmo3Config", _GROUPED, sliding_window=WINDOW, layer_types=[SLIDING, FULL, SLIDING]
    ),
    "cohere2": _config(
        "Cohere2Config",
        _GROUPED,
        sliding_window=WINDOW,
        layer_types=[SLIDING, SLIDING, FULL],
        logit_scale=0.5,
    ),
    "starcoder2": _config("Starcoder2Config", _GROUPED),
    "stablelm": _config("StableLmConfig", _GROUPED, use_qkv_bias=True),
    "granite": _config(
        "GraniteConfig",
        _GROUPED,
        embedding_multiplier=4.0,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "glm4": _config("Glm4Config", _GROUPED, head_dim=8),
    "smollm3": _config("SmolLM3Config", _GROUPED, no_rope_layer_interval=2),
    "mixtral": _config("MixtralConfig", _GROUPED, _EXPERTS, head_dim=8, num_local_experts=4),
    "qwen3_moe": _config(
        "Qwen3MoeConfig",
        _GROUPED,
        _EXPERTS,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt_oss": _config(
        "GptOssConfig",
        _GROUPED,
        _EXPERTS,
        head_dim=8,
        num_local_experts=4,
        sliding_window=WINDOW,
        layer_types=[SLIDING, FULL, SLIDING],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": POSITIONS // 4,
        },
    ),
    "deepseek_v3": _config(
        "DeepseekV3Config",
        _SIZES,
        _EXPERTS,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_mtp_layers=0,
    ),
    "falcon": _config(
        "FalconConfig",
        _HEADS,
        alibi=False,
        multi_query=True,
        new_decoder_architecture=False,
        max_position_embeddings=POSITIONS,
    ),
}

# Position lives in the attention scores (ALiBi) or in a running state: nothing to rewind or mask.
REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": _config("BloomConfig", hidden_size=32, n_layer=LAYERS, n_head=4),
    "falcon_alibi": _config(
        "FalconConfig",
        _HEADS,
        alibi=True,
        multi_query=True,
        new_decoder_architecture=False,
        max_position_embeddings=POSITIONS,
    ),
    "mpt": _config(
        "MptConfig", d_model=32, n_layers=LAYERS, n_heads=4, max_seq_len=POSITIONS, use_cache=True
    ),
    "mamba": _config("MambaConfig", hidden_size=32, num_hidden_layers=LAYERS, state_size=8),
}

# The spread of the weight matrices, and a shift of the seed for the few whose draw at seed 0 falls
# into a loop at any spread: chosen so that greedy texts vary and no two tokens nearly tie.
DEVIATION = 0.27
_DEVIATIONS: dict[str, float] = {
    "qwen2": 0.25,
    "qwen3_sliding": 0.25,
    "gemma2": 0.35,
    "qwen3_moe": 0.3,
    "phi": 0.8,
    "gptj": 0.35,
    "opt": 0.4,
    "olmo2": 0.6,
    "olmo3": 0.65,
    "starcoder2": 0.4,
    "glm4": 0.5,
    "falcon": 0.25,
    "bloom": 0.22,
    "falcon_alibi": 0.15,
    "mpt": 0.22,
}
_SHIFTS: dict[str, int] = {"gptj": 2, "mpt": 1}


def tiny(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """The architecture `name` with random weights, on the CPU, in evaluation mode.

    The weights depend on the seed and the parameters' names only: a model in float32 has those of
    the one in float64, rounded, and two versions of transformers give the same model.
    """
    config = (ARCHITECTURES.get(name) or REFUSED[name])()
    with torch.random.fork_rng(devices=[]):  # transformers' own initialisation draws too
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    _fill(model, _DEVIATIONS.get(name, DEVIATION), seed + _SHIFTS.get(name, 0))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = None
        settings.pad_token_id = 0
    return model.eval().requires_grad_(False)


def _fill(model: PreTrainedModel, deviation: float, seed: int) -> None:
    """Redraw every parameter, each from a generator of its own."""

    def normal(name: str, like: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.rpartition(".")[2]
            if kind in ("A_log", "D"):  # a state space has to decay
                continue
            noise = normal(name, parameter)
            if kind.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif kind == "sinks":
                parameter.copy_(noise)
            elif parameter.ndim == 1:  # a norm, whose weight starts at one, or at zero (gemma)
                parameter.copy_(parameter.double() + 0.1 * noise)
            else:
                parameter.copy_(deviation * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * normal(name, buffer))


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w96, and a chat template that adds w1 to every message."""
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(prefix="##")
    template = "{% for m in messages %}{{ m['content'] }} w1 {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template)


def ragged_prompts(count: int = 4, seed: int = 0) -> list[list[int]]:
    """Prompts of unequal lengths, three to nineteen tokens each; none holds the padding id 0."""
    lengths = (3, 11, 7, 19, 5, 13, 9, 17)
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, VOCABULARY, (lengths[i % len(lengths)],), generator=generator).tolist()
        for i in range(count)
    ]


def reference(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The greedy continuation of one prompt, alone and unpadded, by transformers' `generate`.

    It is what a forward of each whole prefix gives, except for llama_dynamic past 64 tokens (the
    cache keeps keys turned by older frequencies) and, in transformers 5.17, for phi3_longrope past
    24 (each step drops the cache and sees the last token only; 5.22 recomputes the prefix): for
    that one see `greedy_by_prefixes`.
    """
    ids = torch.tensor([prompt], device=model.device)
    before = model.config._attn_implementation
    if before != "eager":
        model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            text = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
            )
    finally:
        if before != "eager":
            model.set_attn_implementation(before)
    continuation: list[int] = text[0, len(prompt) :].tolist()
    return continuation


@torch.no_grad()
def greedy_by_prefixes(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The greedy continuation of one prompt, by a forward of each whole prefix."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
