"""x"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class WeightFingerprint:
    """Whether a model is still what was bound: its owner may have moved, cast or replaced weights
    since, or hung hooks on its modules. To be asked before each text, and so in few steps: torch's
    own ways through a model's parts take milliseconds."""

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules())
        # What each of them consists of, as it is looked up, and as it was.
        self._parts = [
            (part, dict(part))
            for module in self._modules
            for part in (module._modules, module._parameters, module._buffers)
            if part
        ]
        tensors = (thing for _, parts in self._parts for thing in parts.values())
        self._tensors = [(t, t.data_ptr()) for t in tensors if isinstance(t, Tensor)]

    def holds(self) -> bool:
        return (
            all(_same(now, then) for now, then in self._parts)
            and all(tensor.data_ptr() == address for tensor, address in self._tensors)
            and not any(is_patched(module) for module in self._modules)
        )


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """The same things by the same names. Tensors are compared for what they are, not by value."""
    return len(now) == len(then) and all(now.get(name) is part for name, part in then.items())


def is_patched(module: Any) -> bool:
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)
