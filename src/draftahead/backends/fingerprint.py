"""Notices that a model was changed after a backend was bound to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftahead.backends.modules import is_patched


class WeightFingerprint:
    """The modules of a model, their tensors and those tensors' addresses, at one moment.

    `holds` is false once weights were moved, cast or replaced, modules exchanged, or hooks and
    forwards patched in. Values are not compared. It is called before each prefill and reads the
    modules' dictionaries: torch's own iterators over a model take milliseconds.
    """

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules())
        # Each module's submodules, parameters and buffers: the live dictionary and a copy.
        self._members = [
            (live, dict(live))
            for module in self._modules
            for live in (module._modules, module._parameters, module._buffers)
            if live
        ]
        members = (member for _, copied in self._members for member in copied.values())
        self._addresses = [(m, m.data_ptr()) for m in members if isinstance(m, Tensor)]

    def holds(self) -> bool:
        return (
            all(_same_members(live, copied) for live, copied in self._members)
            and all(tensor.data_ptr() == address for tensor, address in self._addresses)
            and not any(is_patched(module) for module in self._modules)
        )


def _same_members(live: dict[str, Any], copied: dict[str, Any]) -> bool:
    """The same objects under the same names: tensors are compared by identity, not by value."""
    return len(live) == len(copied) and all(live.get(name) is one for name, one in copied.items())
