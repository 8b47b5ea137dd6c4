"""Which models are supported, and what the engine must know of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from draftahead.core.checks import Kind
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.kv.cache import KVShapeProbe

# Held to transformers' own generate, token by token, in tests/models/test_parity.py.
TESTED = frozenset(
    {"cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox"}
    | {"gpt_oss", "gptj", "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3", "opt"}
    | {"phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
# Modules that do not ask; a slice of a ModuleList is a new one, in training mode.
_SAME_IN_TRAINING = (torch.nn.Linear, torch.nn.ModuleList)
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})


def _model(value: Any) -> Any:
    is_named = isinstance(value, str | Path)
    if not is_named and not (
        isinstance(value, torch.nn.Module) and isinstance(value.config, PreTrainedConfig)
    ):
        raise TypeError
    return value


MODEL = Kind("a model of transformers, or the name or path of one", _model)


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def attention_configs(model: Any) -> list[Any]:
    """Every configuration object from which a layer reads the name of its attention function."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


def refuse_unsupported(model: Any) -> None:
    """Refuses a model, as it is now, that cannot be run or not exactly; with the true reason."""
    name = type(model).__name__
    if (why := _not_exact(model)) is not None:
        raise UnsupportedModelError(f"{name} {why}; speculation cannot be exact for it")
    if (why := _not_runnable(model)) is not None:
        raise UnsupportedModelError(f"{name} {why}")
    modules = model.named_modules()
    is_training = (path for path, m in modules if m.training and type(m) not in _SAME_IN_TRAINING)
    training = next(is_training, None)
    if training is not None:
        part = f" ({training})" if training else ""
        raise ConfigError(f"{name}{part} is in training mode: call model.eval() first")


def _not_exact(model: Any) -> str | None:
    config = text_config(model)
    if getattr(model, "_is_stateful", False):
        return "keeps a recurrent state that cannot be rolled back"
    if getattr(model.config, "is_encoder_decoder", False):
        return "is an encoder-decoder model"
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return "uses ALiBi, whose biases do not follow our positions"
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS:
        return f"has layers of a kind that cannot be masked: {', '.join(sorted(unknown))}"
    return None


def _not_runnable(model: Any) -> str | None:
    can_generate = getattr(model, "can_generate", None)
    if can_generate is not None and not can_generate() and model.get_output_embeddings() is None:
        return "has no head that predicts tokens: pass a ...ForCausalLM"
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        kind = getattr(getattr(adapter, "peft_type", None), "value", "an adapter")
        if getattr(adapter, "is_prompt_learning", False):
            return f"has an adapter ({kind}) that puts virtual tokens before the prompt: remove it"
        if getattr(adapter, "alora_invocation_tokens", None):
            return (
                "has an aLoRA adapter, which starts where its invocation tokens stand in the whole "
                "prompt, and forwards here see parts of it: remove it, or use plain LoRA"
            )
    devices = sorted({str(p.device) for p in [*model.parameters(), *model.buffers()]})
    if "meta" in devices:
        return "has weights on the device meta (offloaded?): load all of it into memory"
    if len(devices) > 1:
        return f"has weights on several devices ({', '.join(devices)}): load it on one"
    return None


def why_it_fails(model: Any, token: torch.Tensor, problem: Exception) -> str:
    """Of a model that raised `problem` with our cache: whether it runs at all."""
    name = type(model).__name__

    def failure() -> str | None:
        try:
            model(input_ids=token.clone(), use_cache=False)
        except Exception as own:
            return str(own).strip() or type(own).__name__
        return None

    if (own := failure()) is None:
        return (
            f"{name} does not run with a cache that can be rolled back ({problem!s}); speculation "
            "cannot be exact for it"
        )
    with torch.inference_mode(False), torch.no_grad():
        runs_otherwise = failure() is None
    how = "in torch.inference_mode, as it must here" if runs_otherwise else "without a cache either"
    return f"{name} does not run, {how}: {own}"


def refuse_other_cache(runner: Any, probe: KVShapeProbe) -> None:
    """After a change of the model: refuses one for which another KV cache is needed."""
    cache, device = runner.cache, runner.model.device
    same = probe.shapes == cache.shapes and probe.dtype == cache.dtype
    if not same or device != runner.device:
        raise ConfigError(
            f"{type(runner.model).__name__} was changed after LLM(): it is {probe.dtype} on "
            f"{device} now, and the KV cache {cache.dtype} on {runner.device}; make a new "
            "LLM of it"
        )


def _rope(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


# Tokens of a slot by default; more memory must be requested with max_context.
DEFAULT_CONTEXT = 8192
MAX_CONTEXT = 2**31  # positions are exact up to here, whatever a configuration says


def context_limit(model: Any) -> int:
    """How many positions the model has. Dynamic RoPE is limited to its original length: beyond it
    its frequencies depend on the longest sequence of the batch, drafts included."""
    config = text_config(model)
    for name in ("max_position_embeddings", "max_target_positions"):
        if (limit := int(getattr(config, name, None) or 0)) > 0:
            return min(limit, MAX_CONTEXT)
    return DEFAULT_CONTEXT


def resolve_max_context(limit: int, wanted: int | None) -> int:
    if wanted is None:
        return min(limit, DEFAULT_CONTEXT)
    if not 1 <= wanted <= limit:
        raise ConfigError(f"max_context must be 1 to {limit} for this model, not {wanted}")
    return wanted


def final_norm(model: Any) -> Any:
    """The norm between the last layer and the LM head."""
    for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
        if (norm := getattr(model.get_decoder(), name, None)) is not None:
            return norm
    raise UnsupportedModelError(f"{type(model).__name__} has no final norm of a known name")


def long_rope_threshold(model: Any) -> int | None:
    """The length beyond which longrope uses its second set of frequencies."""
    for rope in _rope(text_config(model)):
        if rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None


@torch.inference_mode()
def check_against_plain_forward(runner: Any) -> None:
    """For an architecture that is not in TESTED: its logits through our cache and mask, in chunks,
    of a chain and of a tree, must be those of one plain forward."""
    name = type(runner.model).__name__
    if not runner.uses_attention_interface:
        raise UnsupportedModelError(
            f"{name} has an attention of its own that is not tested here with trees and ragged "
            "batches"
        )
    generator = torch.Generator().manual_seed(0)
    count = min(48, runner.max_context)
    if count < 3:
        raise ConfigError(f"max_context must be 3 or more for {name}, which is checked at load")
    ids = torch.randint(0, runner.vocab_size, (1, count), generator=generator)
    own = runner.model(input_ids=ids.to(runner.device), use_cache=False).logits.float()
    half = count // 2
    runner.prefill(0, ids[0, :half].tolist())
    # As a chain that reads more KV entries than are used, and behind a branch of other tokens.
    chain = runner.forward(ids[:, half:], kv_len=count + 8).logits.float().clone()
    width = count - half + 1
    parents = torch.tensor([[-1, 0, 0, *range(2, width - 1)]])
    nodes = torch.cat([ids[:, half : half + 1], ids[:, :1], ids[:, half + 1 :]], 1)
    branch = runner.forward(nodes, parents=parents).logits.float()
    runner.cache.erase(0, 0, count + 8)
    ours = torch.cat([chain, branch[:, :1], branch[:, 2:]], 1)
    own = torch.cat([own[:, half:], own[:, half:]], 1)
    gap = (own - ours).abs().max() / own.abs().max().clamp(min=1e-6)
    bound = 1e-3 if runner.model.dtype in (torch.float32, torch.float64) else 0.1
    if not gap <= bound:
        raise UnsupportedModelError(
            f"{name} gives other logits with our cache and mask than by itself (by "
            f"{float(gap):.1e} of their size): its attention is not supported"
        )
