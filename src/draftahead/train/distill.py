"""Distilling a draft model: a smaller one of the target's architecture learns to say what it says.

With the target's own width it starts as some of the target's layers between its embedding, norm and
head; with another width it starts from nothing. Either way it is an ordinary model in the end.
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
from draftahead.loader.gguf import quiet_transformers
from draftahead.models.support import text_config
from draftahead.train.blocks import Block, Blocks
from draftahead.train.loop import Acceptance
from draftahead.train.losses import chained, law_over, soft_cross_entropy, walked


def new_student(
    model: Any,
    *,
    layers: int,
    hidden: int | None = None,
    inner: int | None = None,
    heads: int | None = None,
    key_heads: int | None = None,
) -> Any:
    """A draft model for a target, in float32 on its device. What is not given is the target's own
    where the width is, and in proportion to the width elsewhere."""
    text = text_config(model)
    if text is not model.config:
        raise ConfigError(f"{type(model).__name__} is more than a language model: not known here")
    count, width = int(text.num_hidden_layers), int(text.hidden_size)
    if not 1 <= layers <= count:
        raise ConfigError(f"--layers must be 1 to the target's {count}, not {layers}")
    kept = [round(i * (count - 1) / max(1, layers - 1)) for i in range(layers)]
    config = copy.deepcopy(text)
    for name, value in list(config.to_dict().items()):
        if isinstance(value, list) and len(value) == count:  # something said of every layer
            setattr(config, name, [value[i] for i in kept])
    config.num_hidden_layers = layers
    if hidden is not None and hidden != width:
        _narrow(config, hidden, heads, key_heads)
    elif heads is not None or key_heads is not None:
        raise ConfigError("heads of another number need another width: give --hidden as well")
    if inner is not None:
        if not hasattr(config, "intermediate_size"):
            raise ConfigError(f"{type(model).__name__} has no width inside known here: no --inner")
        config.intermediate_size = inner
    try:
        student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as problem:  # of any kind: it is for the architecture to say
        raise ConfigError(f"{type(model).__name__} cannot be of this size: {problem}") from problem
    _copy(model, student, kept)
    return student.to(model.device).eval()  # no dropout: a few laws are all there is to learn


def _narrow(config: Any, hidden: int, heads: int | None, key_heads: int | None) -> None:
    old, share = config.hidden_size, hidden / config.hidden_size
    per_head = getattr(config, "head_dim", None) or old // config.num_attention_heads
    groups = config.num_attention_heads // (
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    heads = heads or max(1, hidden // per_head)
    key_heads = key_heads or max(1, heads // groups)
    if hidden % heads or heads % key_heads:
        raise ConfigError(
            f"a width of {hidden} with {heads} heads and {key_heads} for keys does not divide: "
            "give --heads and --key-heads that do"
        )
    config.hidden_size, config.num_attention_heads = hidden, heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = key_heads
    if getattr(config, "head_dim", None) is not None:
        config.head_dim = hidden // heads
    if hasattr(config, "intermediate_size"):  # others take it from the width
        config.intermediate_size = max(1, round(config.intermediate_size * share))


@torch.no_grad()
def _copy(model: Any, student: Any, kept: list[int]) -> None:
    """All tensors of the target that fit, layer by layer."""
    source: Mapping[str, Tensor] = model.state_dict()
    prefix = _layers_name(student, len(kept))
    for name, tensor in student.state_dict().items():
        if name.startswith(prefix):
            index, _, rest = name.removeprefix(prefix).partition(".")
            name = f"{prefix}{kept[int(index)]}.{rest}"
        if name in source and source[name].shape == tensor.shape:
            tensor.copy_(source[name])


def _layers_name(model: Any, count: int) -> str:
    body = {id(module) for module in model.get_decoder().children()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and id(module) in body:
            return f"{name}."
    raise ConfigError(f"{type(model).__name__} has no list of {count} layers known here")


class DistillTask:
    """`depth`: guesses of a chain, in evaluations."""

    def __init__(
        self, student: Any, model: Any, held_out: Blocks, *, tokenizer: Any = None, depth: int = 5
    ) -> None:
        self.module: nn.Module = student
        self.student, self._tokenizer = student, tokenizer
        self._held_out, self._depth, self._kind = held_out, depth, model.dtype
        self._rows: Tensor = model.get_output_embeddings().weight.detach()

    def loss(self, block: Block) -> Tensor:
        before = block.learnt[:, 1:]  # at a token, the next one is foretold
        law = law_over(block.last[:, :-1][before], self._rows)
        said = self._states(block)[:, :-1][before]
        return soft_cross_entropy(said, self.student.get_output_embeddings().weight, law)

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        """It reads the text alone, so what it guesses after a right prefix is the same in a text as
        in a draft."""
        found: list[tuple[Tensor, list[int]]] = []
        for block in self._held_out.once():
            window = min(block.tokens.shape[1] - 1, block.window + 1)
            states = self._states(block)[:, -1 - window : -1]
            guess = self.student.get_output_embeddings()(states).argmax(-1)
            hit = guess == block.tokens[:, -window:]
            found.append((chained(hit, self._depth).cpu(), block.learnt.sum(1).tolist()))
        return walked(found)

    def _states(self, block: Block) -> Tensor:
        """Behind its last norm, [B, T, H]."""
        out: Tensor = self.student.get_decoder()(
            input_ids=block.tokens,
            attention_mask=block.real.long(),
            position_ids=block.positions,
            use_cache=False,
        ).last_hidden_state
        return out

    def save(self, folder: Path) -> None:
        """In the target's dtype, with its tokenizer; file by file at once or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part, quiet_transformers():
            copy.deepcopy(self.student).to(self._kind).save_pretrained(part)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(part)
            for file in Path(part).iterdir():
                file.replace(folder / file.name)
