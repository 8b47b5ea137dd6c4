"""A pass over some of a model's layers, with the model's own weights, cache, norm and head.

A layer that is left out hands on what it is given. The list of layers stays whole: a shorter one
would shift what each of them is, its kind of attention and its place in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.backends.base import Backend
from draftahead.backends.cpu.decoder import CpuDecoder
from draftahead.backends.cpu.linear import Int8Linear, output_subset
from draftahead.errors import ConfigError
from draftahead.models.support import text_config
from draftahead.sampling.draft_sampler import scatter_to_vocab

Exit = Callable[[Tensor], Tensor]  # states [..., H] on their way to the model's last norm


class LayerSubset:
    """Some layers of a model, the first one among them."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        *,
        exit: Exit | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """`exit` changes the states behind the last layer. `tokens`: the only ones that the head is
        asked about, and logits are over, where it is a plain linear layer."""
        self._stack = _layers_of(model)
        self.layers = tuple(sorted(set(layers)))
        if not self.layers or self.layers[0] != 0 or self.layers[-1] >= len(self._stack):
            raise ConfigError(
                f"a part of {len(self._stack)} layers starts with layer 0, not {list(layers)}"
            )
        self.exit = exit
        self.vocabulary = int(text_config(model).vocab_size)
        self._whole_head: Any = model.get_output_embeddings()
        self.tokens = tokens if type(self._whole_head) in (nn.Linear, Int8Linear) else None
        self.head: Any = (
            None if self.tokens is None else output_subset(self._whole_head, self.tokens)
        )
        self._kernels: tuple[Backend | None, Backend | None] = (None, None)
        self._rest: tuple[Any, ...] | None = None  # of what a layer returns beside the states

    @property
    def share(self) -> float:
        """Of the weights that a pass over the whole model reads, those that one over this reads."""
        sizes = [_size(layer) for layer in self._stack]
        own = sum(sizes[index] for index in self.layers) + _size(self.head or self._whole_head)
        return own / (sum(sizes) + _size(self._whole_head))

    def decoder(self, whole: Backend | None) -> Backend | None:
        """A pass over this part by our kernels, where `whole` is one of all the model by them."""
        if self._kernels[0] is not whole:
            own = None
            if isinstance(whole, CpuDecoder):
                own = whole.layer_subset(self.layers, self.exit, self.head)
            self._kernels = whole, own
        return self._kernels[1]

    def scatter_to_vocab(self, logits: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What a pass found, over the whole vocabulary: -inf for all others than its tokens."""
        if self.tokens is None:
            return logits, best
        whole = scatter_to_vocab(logits, self.tokens, self.vocabulary)
        if best is None:
            return whole, None
        return whole, torch.where(best < 0, best, self.tokens[best.clamp(min=0)])

    # ------------------------------------------------------------------ the model's own forward

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While entered, the model's forward is one of this part."""
        self._rest = None
        forwards = [
            (layer, partial(self._run, i, layer.forward)) for i, layer in enumerate(self._stack)
        ]
        if self.head is not None:
            forwards.append((self._whole_head, self.head))
        before = [module.__dict__.get("forward") for module, _ in forwards]
        try:
            for module, forward in forwards:
                module.__dict__["forward"] = forward
            yield
        finally:
            for (module, _), forward in zip(forwards, before, strict=True):
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.__dict__["forward"] = forward

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        states = args[0] if args else options["hidden_states"]
        if index in self.layers:
            found = forward(*args, **options)
            if isinstance(found, tuple):
                states, self._rest = found[0], found[1:]
            else:
                states = found
        if self.exit is not None and index == len(self._stack) - 1:
            states = self.exit(states)
        return states if self._rest is None else (states, *self._rest)


@contextmanager
def shown(model: Any, depths: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While entered, a forward leaves here what its nodes were after so many layers; after all of
    them, behind the last norm. By hooks of our own, which go again: those that transformers hangs
    up for `output_hidden_states` stay, and would make the model look like one its owner changed."""
    found: dict[int, Tensor] = {}

    def keep(depth: int, _: Any, __: Any, output: Any) -> None:
        found[depth] = output if isinstance(output, Tensor) else output[0]

    modules = [*_layers_of(model)[:-1], model.get_decoder()] if depths else []
    handles = [modules[d - 1].register_forward_hook(partial(keep, d)) for d in depths]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _size(module: Any) -> int:
    return sum(tensor.numel() for tensor in [*module.parameters(), *module.buffers()])


def _layers_of(model: Any) -> list[Any]:
    count = int(text_config(model).num_hidden_layers)
    for module in model.modules():  # the outermost first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ConfigError(f"{type(model).__name__} has no list of {count} layers to take a part of")
