"""Forwards over some of a model's layers, with the model's own weights, cache, norm and LM head.

A layer that is left out passes its input on. The list of layers stays whole: a shorter one would
shift each layer's index, and with it its kind of attention and its place in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.backends.base import Backend
from draftahead.backends.cpu.decoder import CpuDecoder, ExitTransform
from draftahead.backends.cpu.linear import Int8Linear
from draftahead.backends.modules import layers_of, output_subset, patched_forwards
from draftahead.errors import ConfigError
from draftahead.loader.stored import StoredLinear
from draftahead.models.support import text_config
from draftahead.sampling.draft_sampler import scatter_to_vocab


class LayerSubset:
    """Some layers of a model, the first one among them."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        *,
        exit_transform: ExitTransform | None = None,
        draft_to_target: Tensor | None = None,
    ) -> None:
        """`exit_transform`: of the hidden states after the last layer. `draft_to_target` [D]: the
        draft vocabulary that logits are over, if the LM head is a plain linear layer."""
        self._stack = layers_of(model)
        self.layers = tuple(sorted(set(layers)))
        if not self.layers or self.layers[0] != 0 or self.layers[-1] >= len(self._stack):
            raise ConfigError(
                f"a subset of {len(self._stack)} layers starts with layer 0, not {list(layers)}"
            )
        self.exit_transform = exit_transform
        self.vocab_size = int(text_config(model).vocab_size)
        self._whole_head: Any = model.get_output_embeddings()
        is_linear = type(self._whole_head) in (nn.Linear, Int8Linear, StoredLinear)
        self.draft_to_target = draft_to_target if is_linear else None
        self.head: Any = (
            None
            if self.draft_to_target is None
            else output_subset(self._whole_head, self.draft_to_target)
        )
        self._backends: tuple[Backend | None, Backend | None] = (None, None)  # whole, subset
        self._extra_outputs: tuple[Any, ...] | None = (
            None  # what a layer returns beside hidden states
        )

    @property
    def weight_share(self) -> float:
        """The weights that its forward reads, as a share of those of the whole model."""
        sizes = [_num_weights(layer) for layer in self._stack]
        subset = sum(sizes[index] for index in self.layers)
        subset += _num_weights(self.head or self._whole_head)
        return subset / (sum(sizes) + _num_weights(self._whole_head))

    def backend_for(self, whole: Backend | None) -> Backend | None:
        """The backend of this subset, if that of the whole model can run some of its layers."""
        if self._backends[0] is not whole:
            subset = None
            if isinstance(whole, CpuDecoder):
                subset = whole.layer_subset(self.layers, self.exit_transform, self.head)
            self._backends = whole, subset
        return self._backends[1]

    def scatter(self, logits: Tensor, argmax: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits and argmax over the whole vocabulary: -inf outside of the draft vocabulary."""
        if self.draft_to_target is None:
            return logits, argmax
        whole = scatter_to_vocab(logits, self.draft_to_target, self.vocab_size)
        if argmax is None:
            return whole, None
        return whole, torch.where(argmax < 0, argmax, self.draft_to_target[argmax.clamp(min=0)])

    # ------------------------------------------------------------------ the model's own forward

    def patched(self) -> AbstractContextManager[None]:
        """While entered, the model's forward runs this subset."""
        self._extra_outputs = None
        forwards: list[tuple[Any, Callable[..., Any]]] = [
            (layer, partial(self._layer_forward, i, layer.forward))
            for i, layer in enumerate(self._stack)
        ]
        if self.head is not None:
            forwards.append((self._whole_head, self.head))
        return patched_forwards(forwards)

    def _layer_forward(
        self, index: int, forward: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        hidden = args[0] if args else options["hidden_states"]
        if index in self.layers:
            output = forward(*args, **options)
            if isinstance(output, tuple):
                hidden, self._extra_outputs = output[0], output[1:]
            else:
                hidden = output
        if self.exit_transform is not None and index == len(self._stack) - 1:
            hidden = self.exit_transform(hidden)
        return hidden if self._extra_outputs is None else (hidden, *self._extra_outputs)


@contextmanager
def aux_hidden_states(model: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While entered, a forward leaves its hidden states after these layers in the dict; those after
    the last one normed. By hooks of our own, which are removed again: those that
    transformers registers for `output_hidden_states` stay, and would look like a patched model."""
    found: dict[int, Tensor] = {}
    thread = threading.get_ident()

    def keep(layer: int, _: Any, __: Any, output: Any) -> None:
        if threading.get_ident() == thread:  # another's belongs to the model's owner
            found[layer] = output if isinstance(output, Tensor) else output[0]

    modules = [*layers_of(model)[:-1], model.get_decoder()] if layers else []
    handles = [modules[i - 1].register_forward_hook(partial(keep, i)) for i in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _num_weights(module: Any) -> int:
    return sum(tensor.numel() for tensor in [*module.parameters(), *module.buffers()])
