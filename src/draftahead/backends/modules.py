"""A model's modules: its decoder layers, and forwards patched in for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

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


@contextmanager
def patched_forwards(forwards: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """While entered, the modules run these forwards. Restored also if patching is interrupted."""
    before = [vars(module).get("forward") for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward  # not by setattr, which nn.Module makes slow
        yield
    finally:
        for (module, _), forward in zip(forwards, before, strict=True):
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward
