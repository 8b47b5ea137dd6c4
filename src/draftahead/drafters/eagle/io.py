"""EAGLE heads as files: published layouts in, the speculators layout out.

Published heads come as a folder with config.json and one file of weights: SafeAILab's (and those
made like it) with the layer's fields at the top of the configuration, vLLM-speculators' with a
configuration of the layer inside. Both leave out what they take from the target. Ours is the
second, and leaves out the vocabulary's rows as well while they are the target's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftahead.backends.cpu.linear import output_subset
from draftahead.drafters.eagle import screening
from draftahead.drafters.eagle.head import EagleConfig, EagleHead
from draftahead.drafters.head_files import (
    config_beside,
    located,
    plain_state,
    tensors_in,
    write_config,
    write_tensors,
)
from draftahead.errors import ConfigError, HeadMismatchError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Of the target, or computed from the configuration.
IGNORED = ("verifier_", "rotary", "t2d", "midlayer.self_attn.rotary", "layers.0.self_attn.rotary")


def load(source: str | Path, model: Any) -> EagleHead:
    """A head for this target, in its dtype and on its device."""
    file = located(source, WEIGHTS, beside=[screening.FILE])
    folder = file.parent
    config, said = _read_config(folder, model)
    held = tensors_in(file, lambda names: [n for n in names if not n.startswith(IGNORED)])
    weights = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): value
        for name, value in held.items()
    }
    offsets = weights.pop("d2t", None)
    head = EagleHead(config, own_embedding="embed_tokens.weight" in weights)
    if offsets is not None:
        if len(offsets) != config.draft_vocabulary:
            raise ConfigError(
                f"{folder}: d2t has {len(offsets)} tokens, and draft_vocab_size is "
                f"{config.draft_vocabulary}"
            )
        weights["tokens"] = torch.arange(len(offsets)) + offsets.long()
    elif config.draft_vocabulary != config.layer.vocab_size:
        raise ConfigError(f"{folder} has a smaller draft vocabulary and no d2t that maps it")
    else:
        weights["tokens"] = torch.arange(config.draft_vocabulary)
    if not 0 <= int(weights["tokens"].min()) <= int(weights["tokens"].max()) < said:
        raise ConfigError(f"{folder}: d2t points outside the vocabulary of {said}")
    shares_rows = "lm_head.weight" not in weights
    if shares_rows:
        weights["lm_head.weight"] = head.lm_head.weight
    _fill(head, weights, folder)
    head.screening = screening.load(folder, int(config.layer.hidden_size))
    head = head.to(device=model.device, dtype=model.dtype).eval()
    if shares_rows:
        head.lm_head = output_subset(model.get_output_embeddings(), head.tokens)
    return head


def _read_config(folder: Path, model: Any) -> tuple[EagleConfig, int]:
    """The configuration, and the vocabulary of the target it says it is for."""
    said = config_beside(folder / WEIGHTS[0])
    target = model.config.get_text_config(decoder=True)
    layers = int(target.num_hidden_layers)
    is_ours = "speculators_model_type" in said or "speculators_config" in said
    if is_ours and said.get("speculators_model_type", "eagle3") != "eagle3":
        raise ConfigError(f"{folder} is of type {said['speculators_model_type']!r}, not eagle3")
    inner = dict(said.get("transformer_layer_config", {}) if is_ours else said)
    if not {"hidden_size", "num_attention_heads", "intermediate_size"} <= inner.keys():
        raise ConfigError(f"{folder}/config.json does not describe an EAGLE-3 head")
    inner.setdefault("num_hidden_layers", 1)
    if inner.get("model_type", "llama") != "llama":
        raise ConfigError(f"{folder}: layers of type {inner['model_type']!r} are not known here")
    if "sliding_attention" in (inner.get("layer_types") or ()):
        raise ConfigError(f"{folder}: a head with a sliding window is not known here")
    eagle = said.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{folder} goes by the last state alone, which is not EAGLE-3")
    depths = said.get("eagle_aux_hidden_state_layer_ids")
    if depths is None:
        depths = list(eagle.get("eagle_aux_hidden_state_layer_ids") or ())
        if depths[:1] == [1]:  # there the layers themselves are counted, from 0
            depths = [depth + 1 for depth in depths]
    depths = tuple(sorted(depths or (2, layers // 2, layers - 3)))
    vocabulary = int(inner.setdefault("vocab_size", target.vocab_size))
    config = EagleConfig(
        LlamaConfig(**inner),
        draft_vocabulary=int(said.get("draft_vocab_size") or vocabulary),
        depths=depths,
        target_hidden=said.get("target_hidden_size"),
        # Where this is left out, the two families mean different things.
        norm_before_residual=bool(said.get("norm_before_residual", is_ours)),
        norm_before_fuse=bool(said.get("norm_before_fc") or eagle.get("norm_before_fc")),
        norm_each=bool(said.get("fc_norm")),
        norm_output=bool(said.get("norm_output")) and is_ours,
    )
    check_fits(config, model, str(folder))
    return config, vocabulary


def check_fits(config: EagleConfig, model: Any, name: str) -> None:
    """Refuses a head that was made for another model."""
    target = model.config.get_text_config(decoder=True)
    asked = {
        "states of {} numbers": (config.target_hidden, int(target.hidden_size)),
        "a vocabulary of {}": (int(config.layer.vocab_size), int(target.vocab_size)),
    }
    for what, (its, ours) in asked.items():
        if its != ours:
            raise HeadMismatchError(
                f"{name} was trained for another model: one with {what.format(its)}; this one has "
                f"{ours}"
            )
    layers = int(target.num_hidden_layers)
    if strange := [depth for depth in config.depths if not 1 <= depth <= layers]:
        raise HeadMismatchError(
            f"{name} was trained for another model: it goes by layer {strange[0]}, and this one "
            f"has 1 to {layers}"
        )


def _fill(head: EagleHead, weights: dict[str, Tensor], folder: Path) -> None:
    needed = head.state_dict()
    if missing := sorted(needed.keys() - weights.keys()):
        raise ConfigError(f"{folder} lacks {missing[0]}: it is no whole EAGLE-3 head")
    if extra := sorted(weights.keys() - needed.keys()):
        raise ConfigError(f"{folder} holds {extra[0]}, which no EAGLE-3 head known here has")
    for name, value in weights.items():
        if value.shape != needed[name].shape:
            raise ConfigError(
                f"{folder}: {name} is {list(value.shape)} and by config.json should be "
                f"{list(needed[name].shape)}"
            )
    head.load_state_dict(weights)


# Of the layer's configuration, as it is.
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


def save(
    head: EagleHead, folder: Path, *, with_vocabulary: bool, target: str = "", guesses: int = 5
) -> None:
    """The speculators layout. `with_vocabulary` stores the draft vocabulary's rows, as others that
    serve it need; ours come from the target where they are left out."""
    if with_vocabulary and getattr(head.lm_head, "bias", None) is not None:
        raise ConfigError("the target's head has a bias, and no file of heads a place for it")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.to(torch.bfloat16)
        for name, value in plain_state(head).items()
        if name != "tokens" and (with_vocabulary or not name.startswith("lm_head."))
    }
    tokens, vocabulary = head.tokens.cpu(), int(head.config.layer.vocab_size)
    if len(tokens) != vocabulary:
        weights["d2t"] = tokens - torch.arange(len(tokens))
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
        weights["t2d"][tokens] = True
    screening.remove(folder)
    write_tensors(weights, folder / WEIGHTS[0])
    if head.screening is not None:
        screening.save(head.screening, folder)
    write_config(_written_config(head.config, target, guesses), folder)


def _written_config(c: EagleConfig, target: str, guesses: int) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": guesses}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": c.draft_vocabulary,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fuse,
        "fc_norm": c.norm_each,
        "norm_output": c.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(c.depths),
        "target_hidden_size": None if c.target_hidden == c.layer.hidden_size else c.target_hidden,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **{name: getattr(c.layer, name) for name in LAYER_FIELDS},
            "head_dim": c.width,
            "rope_parameters": dict(c.layer.rope_parameters),
            "tie_word_embeddings": False,
        },
    }
