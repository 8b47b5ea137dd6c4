"""EAGLE heads as files: loads the two published layouts, saves the speculators layout.

A published head is a folder with config.json and one file of weights. SafeAILab's layout has the
layer's fields at the top of the configuration, vLLM-speculators' has a configuration of the layer
inside. Both leave out the target's embedding. Ours is the second, and leaves out the lm_head
weights as well while they are the target's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftahead.backends.modules import output_subset
from draftahead.drafters.eagle import screening
from draftahead.drafters.eagle.head import EagleConfig, EagleHead
from draftahead.drafters.head_files import (
    check_fits,
    check_tokens,
    config_beside,
    config_refused_clearly,
    dequantized_state,
    fill,
    find_weights,
    tensors_in,
    write_head,
)
from draftahead.errors import ConfigError, HeadMismatchError
from draftahead.loader.stored import widened
from draftahead.models.support import text_config

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Tensors that are the target's, or computed from the configuration.
IGNORED = ("verifier_", "rotary", "t2d", "midlayer.self_attn.rotary", "layers.0.self_attn.rotary")
# Fields of the layer's configuration that are saved as they are.
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "initializer_range",
)


# ----------------------------------------------------------------------------------- loading


def load(source: str | Path, model: Any) -> EagleHead:
    """A head from a folder, a file or a hub id, for a target: in its dtype and on its device."""
    file = find_weights(source, WEIGHTS, extras=[screening.FILE])
    folder = file.parent
    with config_refused_clearly(folder, "EAGLE-3 head"):
        config = _read_config(folder, config_beside(file), model)
    check_target(config, model, str(folder))
    tensors = tensors_in(file, lambda names: [n for n in names if not n.startswith(IGNORED)])
    weights = {  # by the names of the head's modules
        name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
    }
    weights["draft_to_target"] = _draft_to_target(weights.pop("d2t", None), config, folder)
    own_embedding = "embed_tokens.weight" in weights
    shares_lm_head = "lm_head.weight" not in weights
    if config.layer.num_hidden_layers > len(weights):
        raise ConfigError(f"{folder} holds fewer layers than its config.json counts")
    # Nothing is allocated by a configuration that does not fit.
    with config_refused_clearly(folder, "EAGLE-3 head"), torch.device("meta"):
        head = EagleHead(config, own_embedding=own_embedding)
    if shares_lm_head:
        weights["lm_head.weight"] = head.lm_head.weight
    check_fits(head.state_dict(), weights, folder, what="EAGLE-3 head", by="by config.json")
    head = EagleHead(config, own_embedding=own_embedding)
    if shares_lm_head:
        weights["lm_head.weight"] = head.lm_head.weight
    fill(head.state_dict(), weights, folder, what="EAGLE-3 head", by="by config.json")
    head.screening = screening.load(folder, int(config.layer.hidden_size))
    head = head.to(device=model.device, dtype=model.dtype).eval()
    if shares_lm_head:
        # In float32, which the runner quantizes for its kernels: drafts may be approximate.
        subset = output_subset(model.get_output_embeddings(), head.draft_to_target)
        head.lm_head = widened(subset)
    return head


def _read_config(folder: Path, stated: dict[str, Any], model: Any) -> EagleConfig:
    """An EagleConfig from either layout."""
    is_speculators = "speculators_model_type" in stated or "speculators_config" in stated
    if is_speculators and stated.get("speculators_model_type", "eagle3") != "eagle3":
        raise ConfigError(f"{folder} is of type {stated['speculators_model_type']!r}, not eagle3")
    eagle = stated.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise ConfigError(
            f"{folder} reads the last layer's hidden states alone, which is not EAGLE-3"
        )
    layer = dict(stated.get("transformer_layer_config", {}) if is_speculators else stated)
    _check_layer(layer, folder)
    layer.setdefault("num_hidden_layers", 1)
    vocab_size = int(layer.setdefault("vocab_size", text_config(model).vocab_size))
    return EagleConfig(
        LlamaConfig(**layer),
        draft_vocab_size=int(stated.get("draft_vocab_size") or vocab_size),
        aux_layers=_aux_layers(stated, int(text_config(model).num_hidden_layers)),
        target_hidden_size=int(stated.get("target_hidden_size") or 0),
        # The two layouts have different defaults.
        norm_before_residual=bool(stated.get("norm_before_residual", is_speculators)),
        norm_before_fc=bool(stated.get("norm_before_fc") or eagle.get("norm_before_fc")),
        fc_norm=bool(stated.get("fc_norm")),
        norm_output=bool(stated.get("norm_output")) and is_speculators,
    )


def _check_layer(layer: dict[str, Any], folder: Path) -> None:
    if not {"hidden_size", "num_attention_heads", "intermediate_size"} <= layer.keys():
        raise ConfigError(f"{folder}/config.json does not describe an EAGLE-3 head")
    if layer.get("model_type", "llama") != "llama":
        raise ConfigError(f"{folder}: layers of type {layer['model_type']!r} are not supported")
    if layer.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{folder}: activation {layer['hidden_act']!r} is not supported")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ConfigError(f"{folder}: a head with a sliding window is not supported")


def _aux_layers(stated: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """After how many layers of the target the hidden states are taken."""
    ids = stated.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (stated.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
        if [*ids][:1] == [
            1
        ]:  # these are indices of layers: the output of layer 1 is that after 2 layers
            ids = [layer + 1 for layer in ids]
    # vLLM and SGLang also concatenate them in the order of the layers, not of the list.
    return tuple(sorted(ids or (2, num_layers // 2, num_layers - 3)))


def check_target(config: EagleConfig, model: Any, name: str) -> None:
    """Refuses a head that was trained for another target."""
    text, vocab_size = text_config(model), int(config.layer.vocab_size)
    hidden_size, num_layers = int(text.hidden_size), int(text.num_hidden_layers)
    unknown = [layer for layer in config.aux_layers if not 1 <= layer <= num_layers]
    if config.target_hidden_size != hidden_size:
        reason = f"one with hidden size {config.target_hidden_size}; this one has {hidden_size}"
    elif vocab_size != text.vocab_size:
        reason = f"one with a vocabulary of {vocab_size}; this one has {text.vocab_size}"
    elif unknown:
        reason = (
            f"it reads hidden states after layer {unknown[0]}, and this one has layers 1 to "
            f"{num_layers}"
        )
    else:
        return
    raise HeadMismatchError(f"{name} was trained for another model: {reason}")


def _draft_to_target(offsets: Tensor | None, config: EagleConfig, folder: Path) -> Tensor:
    """The target's token of each draft token [D]. `offsets` (d2t): by how much they differ."""
    size, vocab_size = config.draft_vocab_size, int(config.layer.vocab_size)
    if offsets is None:
        if size != vocab_size:
            raise ConfigError(f"{folder} has a smaller draft vocabulary and no d2t that maps it")
        return torch.arange(size)
    if len(offsets) != size:
        raise ConfigError(
            f"{folder}: d2t has {len(offsets)} tokens, and draft_vocab_size is {size}"
        )
    draft_to_target = torch.arange(size) + offsets.long()
    check_tokens(draft_to_target, vocab_size, f"{folder}: d2t")
    return draft_to_target


# ------------------------------------------------------------------------------------ saving


def save(
    head: EagleHead,
    folder: Path,
    *,
    with_lm_head: bool,
    target: str = "",
    num_speculative_tokens: int = 5,
) -> None:
    """Saves the speculators layout in bfloat16. `with_lm_head`: stores the lm_head weights, which
    other servers need; without them, `load` takes the target's. `target`: its name."""
    if with_lm_head and getattr(head.lm_head, "bias", None) is not None:
        raise ConfigError("the target's lm_head has a bias, and files of heads cannot store one")
    weights = {
        name: value.to(torch.bfloat16)
        for name, value in dequantized_state(head).items()
        if name != "draft_to_target" and (with_lm_head or not name.startswith("lm_head."))
    }
    draft_to_target, vocab_size = head.draft_to_target.cpu(), int(head.config.layer.vocab_size)
    if len(draft_to_target) != vocab_size:
        weights["d2t"] = draft_to_target - torch.arange(len(draft_to_target))
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        weights["t2d"][draft_to_target] = True
    write_head(folder, WEIGHTS[0], weights, _config_of(head.config, target, num_speculative_tokens))
    screening.save(head.screening, folder)


def _config_of(c: EagleConfig, target: str, num_speculative_tokens: int) -> dict[str, Any]:
    """config.json of the speculators layout."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": c.draft_vocab_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
        "target_hidden_size": None
        if c.target_hidden_size == c.layer.hidden_size
        else c.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **{name: getattr(c.layer, name) for name in LAYER_FIELDS},
            "head_dim": c.layer.head_dim,
            "rope_parameters": dict(c.layer.rope_parameters),
            "tie_word_embeddings": False,
        },
    }
