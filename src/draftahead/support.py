"""Which models can be taken, and what must be known of them."""

from __future__ import annotations

from typing import Any

from draftahead.errors import ConfigError, UnsupportedModelError

# Held to transformers' own generate, token by token, in tests/test_parity.py.
TESTED = frozenset(
    {"cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox"}
    | {"gpt_oss", "gptj", "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3", "opt"}
    | {"phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def attention_configs(model: Any) -> list[Any]:
    """Every configuration object that some layer reads its attention's name from."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


def refuse_unsupported(model: Any) -> None:
    name, config = type(model).__name__, text_config(model)
    why = None
    if getattr(model, "_is_stateful", False):
        why = "keeps a recurrent state that cannot be rolled back"
    elif getattr(model.config, "is_encoder_decoder", False):
        why = "is an encoder-decoder model"
    elif config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        why = "uses ALiBi, whose biases do not follow our positions"
    elif unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS:
        why = f"has layers of a kind that we cannot mask: {', '.join(sorted(unknown))}"
    if why:
        raise UnsupportedModelError(f"{name} {why}; speculation cannot be exact for it")
    if model.training:
        raise ConfigError(f"{name} is in training mode: call model.eval() first")


def _rope(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def context_limit(model: Any) -> int:
    """How many positions the model can take. Beyond a dynamic RoPE's own length every pass
    changes the frequencies, and with them what a draft or a batch mate may not touch."""
    limit = int(getattr(text_config(model), "max_position_embeddings", None) or 0)
    return limit if limit > 0 else 8192


def longrope_switch(model: Any) -> int | None:
    """The length beyond which longrope takes its other set of frequencies."""
    for rope in _rope(text_config(model)):
        if rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None
