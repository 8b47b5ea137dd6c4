"""Distils a draft model: a smaller model of the target's architecture and vocabulary.

With the target's hidden size it starts as some of the target's layers between its embedding, norm
and LM head; with another size it starts from random weights. The result is an ordinary model.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftahead.errors import ConfigError
from draftahead.loader.progress import quiet_transformers
from draftahead.models.support import text_config
from draftahead.train.acceptance import Acceptance, next_token_acceptance
from draftahead.train.batches import TrainBatch, TrainBatches
from draftahead.train.losses import next_token_targets, soft_cross_entropy


def new_draft_model(
    model: Any,
    *,
    layers: int,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> Any:
    """A draft model for a target, in float32 on its device. Sizes that are not given are the
    target's, or in proportion to another hidden size."""
    text, name = text_config(model), type(model).__name__
    if text is not model.config:
        raise ConfigError(f"{name} is more than a language model, which distill does not support")
    num_layers = int(text.num_hidden_layers)
    if not 1 <= layers <= num_layers:
        raise ConfigError(f"--layers must be 1 to the target's {num_layers}, not {layers}")
    kept = [round(i * (num_layers - 1) / max(1, layers - 1)) for i in range(layers)]
    config = copy.deepcopy(text)
    for key, value in list(config.to_dict().items()):
        if isinstance(value, list) and len(value) == num_layers:  # one entry per layer
            setattr(config, key, [value[i] for i in kept])
    config.num_hidden_layers = layers
    if hidden_size is not None and hidden_size != text.hidden_size:
        _resize(config, hidden_size, num_heads, num_kv_heads)
    elif num_heads is not None or num_kv_heads is not None:
        raise ConfigError("another number of heads needs another size: give --hidden-size as well")
    if intermediate_size is not None:
        if not hasattr(config, "intermediate_size"):
            raise ConfigError(f"{name} has no intermediate size: leave out --intermediate-size")
        config.intermediate_size = intermediate_size
    try:
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as problem:  # each architecture has checks of its own
        raise ConfigError(f"{name} cannot have these sizes: {problem}") from problem
    _copy(model, draft, kept)
    return draft.to(model.device).eval()  # eval: no dropout


def _resize(config: Any, hidden_size: int, num_heads: int | None, num_kv_heads: int | None) -> None:
    old, old_heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    group = old_heads // (getattr(config, "num_key_value_heads", None) or old_heads)
    num_heads = num_heads or max(1, hidden_size // (head_dim or old // old_heads))
    num_kv_heads = num_kv_heads or max(1, num_heads // group)
    if hidden_size % num_heads or num_heads % num_kv_heads:
        raise ConfigError(
            f"a hidden size of {hidden_size} with {num_heads} heads and {num_kv_heads} KV heads "
            "does not divide: give --num-heads and --num-kv-heads that do"
        )
    config.hidden_size, config.num_attention_heads = hidden_size, num_heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = num_kv_heads
    if head_dim is not None:
        config.head_dim = hidden_size // num_heads
    if hasattr(config, "intermediate_size"):  # others derive it from the hidden size
        config.intermediate_size = max(1, round(config.intermediate_size * hidden_size / old))


@torch.no_grad()
def _copy(model: Any, draft: Any, kept: list[int]) -> None:
    """Copies all tensors of the target that fit; layer i of the draft is layer kept[i]."""
    source: Mapping[str, Tensor] = model.state_dict()
    prefix = _layers_prefix(draft, len(kept))
    for name, tensor in draft.state_dict().items():
        if name.startswith(prefix):
            index, _, rest = name.removeprefix(prefix).partition(".")
            name = f"{prefix}{kept[int(index)]}.{rest}"
        if name in source and source[name].shape == tensor.shape:
            tensor.copy_(source[name])


def _layers_prefix(model: Any, count: int) -> str:
    children = {id(module) for module in model.get_decoder().children()}
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == count
        if is_list and id(module) in children:
            return f"{name}."
    raise ConfigError(f"{type(model).__name__} has no list of {count} layers where one is expected")


class DistillTask:
    """`depth`: drafted tokens of a chain, in evaluations."""

    def __init__(
        self,
        draft: Any,
        model: Any,
        held_out: TrainBatches,
        *,
        tokenizer: Any = None,
        depth: int = 5,
    ) -> None:
        self.module: nn.Module = draft
        self.draft, self._tokenizer = draft, tokenizer
        self._held_out, self._depth, self._dtype = held_out, depth, model.dtype
        self._lm_head: Tensor = model.get_output_embeddings().weight.detach()

    def loss(self, batch: TrainBatch) -> Tensor:
        predicts, probs = next_token_targets(batch, self._lm_head)
        hidden = self._hidden(batch)[:, :-1][predicts]
        return soft_cross_entropy(hidden, self.draft.get_output_embeddings().weight, probs)

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        return next_token_acceptance(self._held_out, self._depth, self._predict)

    def _predict(self, batch: TrainBatch, part: slice) -> Tensor:
        token: Tensor = self.draft.get_output_embeddings()(self._hidden(batch)[:, part]).argmax(-1)
        return token

    def _hidden(self, batch: TrainBatch) -> Tensor:
        """After the draft model's final norm, [B, T, H]."""
        hidden: Tensor = self.draft.get_decoder()(
            input_ids=batch.tokens,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state
        return hidden

    def save(self, folder: Path) -> None:
        """In the target's dtype, with its tokenizer. Each file is replaced when complete."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part, quiet_transformers():
            copy.deepcopy(self.draft).to(self._dtype).save_pretrained(part)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(part)
            for file in Path(part).iterdir():
                file.replace(folder / file.name)
