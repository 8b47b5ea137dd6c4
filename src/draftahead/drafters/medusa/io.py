"""Medusa heads as files: loads the published layouts, saves one that other servers load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from draftahead.drafters.head_files import (
    check_tokens,
    config_beside,
    dequantized_state,
    fill,
    find_weights,
    tensors_in,
    write_head,
)
from draftahead.drafters.medusa.heads import MedusaHeads
from draftahead.drafters.medusa.tree import validated_choices
from draftahead.errors import ConfigError
from draftahead.models.support import text_config

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
# A published lm_head may be padded to a multiple of this number of tokens.
VOCAB_PADDING = 128
PREFIX = re.compile(r"medusa_heads?\.")
# Published names, and vLLM's -> those of `MedusaHeads.published_tensors`.
NAMES = {
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"): r"\1.\2.linear.\3",
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"): r"\1.\2.linear.\3",
    re.compile(r"(\d+)\.\d+\.weight"): r"lm_heads.\1.weight",
    re.compile(r"lm_heads\.(\d+)\.weight"): r"lm_heads.\1.weight",
    re.compile(r"lm_head\.weight"): r"lm_heads.0.weight",
    re.compile(r"token_map"): "token_map",
}


# ----------------------------------------------------------------------------------- loading


def load(source: str | Path, model: Any) -> MedusaHeads:
    """Heads from a folder, a file or a hub id, for a target: in its dtype and on its device."""
    file = find_weights(source, WEIGHTS)
    tensors = {_own_name(name): value for name, value in tensors_in(file, _select).items()}
    heads = _empty_heads(tensors, file, model)
    published = heads.published_tensors()
    biases = {name: zeros for name, zeros in published.items() if name.endswith(".bias")}
    by = f"for this target, whose hidden size is {heads.hidden_size},"
    fill(published, {**biases, **tensors}, file, what="Medusa head", by=by)  # some have no biases
    choices = config_beside(file).get("medusa_choices")
    if choices is not None:
        heads.choices = tuple(validated_choices("medusa_choices", choices, len(heads)))
    return heads.to(model.device).eval().requires_grad_(False)


def _select(names: list[str]) -> list[str]:
    """The names of the heads. Medusa-2 files hold a whole model beside prefixed names; all names of
    another file must be known."""
    prefixed = [name for name in names if PREFIX.match(name)]
    unknown = [name for name in prefixed or names if _own_name(name) == ""]
    if unknown:
        raise ConfigError(f"these are no Medusa heads: unknown tensors {', '.join(unknown[:3])}")
    return prefixed or names


def _own_name(name: str) -> str:
    """Our name for one in a file; empty if heads have none such."""
    name = PREFIX.sub("", name, count=1)
    for pattern, ours in NAMES.items():
        if match := pattern.fullmatch(name):
            return match.expand(ours)
    return ""


def _empty_heads(tensors: dict[str, Tensor], file: Path, model: Any) -> MedusaHeads:
    """Heads with the sizes of the tensors. Published configurations state fewer heads than the file
    holds, so they are not asked."""
    indices = [name.split(".") for name in tensors if ".linear." in name]
    if not indices:
        raise ConfigError(f"{file} holds no Medusa heads")
    num_heads = 1 + max(int(parts[0]) for parts in indices)
    num_layers = 1 + max(int(parts[1]) for parts in indices)
    if num_heads * num_layers > len(tensors):  # each has a tensor
        raise ConfigError(
            f"{file} is incomplete: it numbers {num_heads} heads of {num_layers} layers, and holds "
            f"{len(tensors)} tensors"
        )
    draft_to_target, vocab_size = tensors.get("token_map"), int(text_config(model).vocab_size)
    if draft_to_target is not None:
        check_tokens(draft_to_target, vocab_size, f"{file}: token_map")
    lm_heads = [name for name in tensors if name.startswith("lm_heads.")]
    if len(lm_heads) not in (0, 1, num_heads):
        raise ConfigError(f"{file} has {num_heads} heads and {len(lm_heads)} lm_heads")
    if draft_to_target is not None and len(lm_heads) == 1:
        # An lm_head over all tokens beside a token_map: only its tokens are used, as by vLLM.
        vocab_rows = tensors[lm_heads[0]]
        size = len(vocab_rows)
        if len(draft_to_target) < size and int(draft_to_target.max()) < size:
            tensors[lm_heads[0]] = vocab_rows[draft_to_target]
    sizes = [len(tensors[name]) for name in lm_heads]
    size, slack = (
        (vocab_size, VOCAB_PADDING) if draft_to_target is None else (len(draft_to_target), 1)
    )
    if other := [stated for stated in sizes if abs(stated - size) >= slack]:
        raise ConfigError(f"{file} holds heads for {other[0]} tokens, and the target has {size}")
    return MedusaHeads(
        int(text_config(model).hidden_size),
        num_heads,
        num_layers=num_layers,
        lm_head_sizes=sizes,
        draft_to_target=draft_to_target,
    ).to(model.dtype)


# ------------------------------------------------------------------------------------ saving


def save(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    vocab_size: int,
    target: str = "",
    lm_head: nn.Module | None = None,
) -> None:
    """Saves published names with a configuration that text-generation-inference and vLLM read.
    `vocab_size`, `target`: the target's size and name. `lm_head`: the target's, for servers that
    need it in the file (vLLM); `load` then takes it for the heads' own."""
    tensors = heads.published_tensors()
    is_shared = len(heads.lm_heads) < len(heads)
    for index in range(len(heads.lm_heads)):
        name = "lm_head.weight" if is_shared else f"{index}.{heads.num_layers}.weight"
        tensors[name] = tensors.pop(f"lm_heads.{index}.weight")
    if lm_head is not None:
        tensors["lm_head.weight"] = dequantized_state(lm_head)["weight"]
    config = _config_of(heads, vocab_size, target, is_shared)
    write_head(Path(folder), WEIGHTS[0], tensors, config)


def _config_of(heads: MedusaHeads, vocab_size: int, target: str, is_shared: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": target or None,
        "hidden_size": heads.hidden_size,
        "vocab_size": vocab_size,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": is_shared,
    }
    if is_shared:
        config["version"] = "2"
    if heads.draft_to_target is not None:
        config["truncated_vocab_size"] = len(heads.draft_to_target)
    if heads.choices:
        config["medusa_choices"] = [list(choice) for choice in heads.choices]
    return config
