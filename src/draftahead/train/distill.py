"""Distils a draft model: a smaller model of the target's architecture and vocabulary.

With the target's hidden size it starts as some of the target's layers between its embedding, norm
and LM head; with another size it starts from random weights. The result is an ordinary model.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftahead.backends.modules import layers_of
from draftahead.errors import ConfigError
from draftahead.loader.progress import quiet_transformers
from draftahead.loader.stored import float_state
from draftahead.models.support import text_config
from draftahead.train.batches import TrainBatch
from draftahead.train.task import NextTokenTask


def new_draft_model(
    model: Any,
    *,
    num_layers: int,
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
    num_target_layers = int(text.num_hidden_layers)
    if not 1 <= num_layers <= num_target_layers:
        raise ConfigError(
            f"--layers must be 1 to the target's {num_target_layers}, not {num_layers}"
        )
    step = (num_target_layers - 1) / max(1, num_layers - 1)
    kept = [round(i * step) for i in range(num_layers)]
    config = copy.deepcopy(text)
    for key, value in list(config.to_dict().items()):
        if isinstance(value, list) and len(value) == num_target_layers:  # one entry per layer
            setattr(config, key, [value[i] for i in kept])
    config.num_hidden_layers = num_layers
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
    _copy_fitting(model, draft)  # layers of other indices among them, which the next lines replace
    target_layers = layers_of(model)
    for index, layer in zip(kept, layers_of(draft), strict=True):
        _copy_fitting(target_layers[index], layer)
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
def _copy_fitting(source: nn.Module, module: nn.Module) -> None:
    """Copies the tensors of the same name and shape."""
    tensors = module.state_dict()
    for name, tensor in float_state(source):
        if name in tensors and tensors[name].shape == tensor.shape:
            tensors[name].copy_(tensor)


class DistillTask(NextTokenTask):
    method = "draft_model"

    def __init__(self, draft: Any, model: Any, *, tokenizer: Any = None, depth: int = 5) -> None:
        lm_head = draft.get_output_embeddings().weight
        super().__init__(draft, model, depth=depth, lm_head=lm_head)
        self.draft, self._tokenizer, self._dtype = draft, tokenizer, model.dtype

    def hidden(self, batch: TrainBatch, at: Any) -> Tensor:
        output = self.draft.get_decoder()(
            input_ids=batch.tokens,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.position_ids,
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[at]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.draft.get_output_embeddings()(hidden)
        return logits

    def save(self, folder: Path) -> None:
        """In the target's dtype, with its tokenizer. Each file is replaced when complete."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part, quiet_transformers():
            copy.deepcopy(self.draft).to(self._dtype).save_pretrained(part)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(part)
            for file in Path(part).iterdir():
                file.replace(folder / file.name)
