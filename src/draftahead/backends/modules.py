"""A model's modules: its decoder layers, parts of its LM head, and forwards patched for a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from draftahead.errors import ConfigError


def layers_of(model: Any) -> list[Any]:
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    for module in model.modules():  # the outermost first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ConfigError(f"{type(model).__name__} has no list of {count} layers to take some of")


def is_patched(module: Any) -> bool:
    """Whether a module has hooks or a forward of its own: our kernels would leave them out."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def output_subset(layer: Any, ids: Tensor) -> Any:
    """A copy of a linear layer with some of its outputs only: ids [M]."""
    if hasattr(layer, "subset"):  # quantized, or as stored
        return layer.subset(ids)
    subset = copy.copy(layer)
    subset._parameters = {
        name: None if p is None else nn.Parameter(p.detach()[ids], requires_grad=False)
        for name, p in layer._parameters.items()
    }
    subset.out_features = len(ids)
    return subset


_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_lock_of_locks = threading.Lock()


def lock_of(model: Any) -> threading.RLock:
    """Held while a model is patched, and while patches of its owner are looked for. Several
    engines may run the same layers, whatever is wrapped around them."""
    try:
        key = layers_of(model)[0]
    except ConfigError:
        key = model
    with _lock_of_locks:
        return _locks.setdefault(key, threading.RLock())


@contextmanager
def patched_forwards(forwards: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """While entered, the modules run these forwards in this thread; in others, what they ran
    before. Restored also if patching is interrupted. Hold the model's lock."""
    before = [vars(module).get("forward") for module, _ in forwards]
    thread = threading.get_ident()
    try:
        for (module, forward), own in zip(forwards, before, strict=True):
            # Not by setattr, which nn.Module makes slow.
            vars(module)["forward"] = _ForThread(thread, forward, own, module)
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            if own is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = own


class _ForThread:
    """One forward in one thread, another one in all others."""

    __slots__ = ("forward", "module", "own", "thread")

    def __init__(
        self,
        thread: int,
        forward: Callable[..., Any],
        own: Callable[..., Any] | None,
        module: nn.Module,
    ) -> None:
        self.thread, self.forward, self.own, self.module = thread, forward, own, module

    def __call__(self, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == self.thread:
            return self.forward(*args, **options)
        if self.own is not None:
            return self.own(*args, **options)
        return type(self.module).forward(self.module, *args, **options)
