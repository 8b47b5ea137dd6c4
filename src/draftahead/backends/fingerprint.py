"""Notices that a model is no longer the one that something was computed with or bound to.

Bound are backends (addresses, constants, graphs); computed are the KV entries of earlier texts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from draftahead.backends.own_code import Code, autocast_of, code_of, functions_of, global_hooks
from draftahead.loader.stored import stored_layers

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PARTS = ("_modules", "_parameters", "_buffers")
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Of a configuration: what it is saved with or generates with, and the attention function, which is
# ours while a forward runs.
_NO_EFFECT = frozenset({"name_or_path", "_name_or_path", "transformers_version"})
_ATTENTION = "_attn_implementation"
_SAMPLE = 8  # numbers of each tensor that are compared
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelFingerprint:
    """All that a model's forward depends on, at one moment: its modules, their code, hooks and
    attributes, its configuration, its tensors, and autocast.

    `holds` is false once any of it has changed. It is called at every request, so it may take a
    millisecond, and torch's own iterators over a model take several: it compares dictionaries with
    copies, which Python does by identity first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._device_type = str(getattr(model, "device", torch.device("cpu")).type)
        self._autocast = autocast_of(self._device_type)
        self._modules = modules = list(model.modules())
        self._types = list(map(type, modules))
        steady = [module for module in modules if not _rewrites_itself(module)]
        self._members = [vars(m)[name] for m in modules for name in _HOOKS]
        self._members += [vars(m)[name] for m in steady for name in _PARTS]
        self._members += global_hooks()
        self._identities = _identities(self._members)
        self._attributes = _Copies([vars(module) for module in steady])
        self._containers = _Copies([c for module in steady for c in _containers(module)])
        configs = {id(c): c for m in modules if (c := vars(m).get("config")) is not None}
        self._configs = [vars(c) for c in configs.values() if hasattr(c, "__dict__")]
        self._configs_before = copy.deepcopy(self._effects())
        self._code = _CodeFingerprint(code_of(model))
        self._tensors = _Tensors(
            (t for module in steady for t in _tensors_of(module)),
            mapped={id(layer.rows) for layer in stored_layers(model)},
        )

    def holds(self) -> bool:
        return (
            autocast_of(self._device_type) == self._autocast
            and list(map(type, self._modules)) == self._types
            and _identities(self._members) == self._identities
            and self._attributes.are_equal()
            and self._containers.are_equal()
            and self._effects() == self._configs_before
            and self._code.holds()
            and self._tensors.are_unchanged()
        )

    def _effects(self) -> list[dict[str, Any]]:
        """The configurations without what changes no forward."""
        return [
            {k: v for k, v in one.items() if k not in _NO_EFFECT and not k.startswith(_ATTENTION)}
            for one in self._configs
        ]


class _Copies:
    """Dictionaries and lists, beside copies of them as they were."""

    def __init__(self, live: list[Any]) -> None:
        self._live, self._before = live, [copy.copy(one) for one in live]

    def are_equal(self) -> bool:
        try:
            return bool(self._live == self._before)
        except Exception:  # tensors and arrays that are not the same have no truth value
            return False


class _CodeFingerprint:
    """Methods of classes, what they call by name, and the code of both."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._classes_before = [dict(vars(one)) for one in code.classes]
        self._methods = [functions_of(vars(one)) for one in code.classes]
        self._codes = [function.__code__ for function in code.functions]
        self._values = [value for _, _, value in code.names]

    def holds(self) -> bool:
        code = self._code
        return (
            [function.__code__ for function in code.functions] == self._codes
            and [names.get(name) for names, name, _ in code.names] == self._values
            and all(map(self._has_its_methods, range(len(code.classes))))
        )

    def _has_its_methods(self, index: int) -> bool:
        members = vars(self._code.classes[index])
        if members == self._classes_before[index]:
            return True
        return functions_of(members) == self._methods[index]  # another attribute has changed


class _Tensors:
    """Where tensors lie, and what was written into them.

    A tensor's version counts changes in place. Writes through `tensor.data` are not counted, nor
    those to tensors made in inference mode; so a few numbers of each tensor on the CPU are compared
    too, which shows changes of whole tensors, as by a merged adapter. Single numbers written
    through `data` are not noticed, and on a GPU none. Of `mapped` tensors (their ids) no numbers
    are compared: each would bring pages of a file into memory that are not needed otherwise.
    """

    def __init__(self, tensors: Iterable[Tensor], *, mapped: Set[int] = frozenset()) -> None:
        self._tensors = list({id(t): t for t in tensors if _has_memory(t)}.values())
        self._counted = [t for t in self._tensors if not t.is_inference()]
        self._before = self._state()
        sampled = [t for t in self._tensors if id(t) not in mapped]
        self._samples = [s for t in sampled if (s := _sample(t)) is not None]
        self._sampled = [sample.tobytes() for sample in self._samples]

    def are_unchanged(self) -> bool:
        # Memory that was sampled may be freed: then its address has changed.
        return self._state() == self._before and (
            [sample.tobytes() for sample in self._samples] == self._sampled
        )

    def _state(self) -> list[Any]:
        found: list[Any] = list(map(Tensor.data_ptr, self._tensors))
        return found + [t.dtype for t in self._tensors] + [t._version for t in self._counted]


def _identities(members: list[dict[Any, Any]]) -> list[int]:
    """Of all values of dictionaries: parameters are compared by identity, not by value."""
    return [*map(len, members), *map(id, chain.from_iterable(map(dict.values, members)))]


def _rewrites_itself(module: nn.Module) -> bool:
    """Whether a module's forward changes it: rotary frequencies that follow the length."""
    kind = str(getattr(module, "rope_type", ""))
    return "dynamic" in kind or "longrope" in kind


def _containers(module: nn.Module) -> list[Any]:
    """Lists, dictionaries and sets of a module's own."""
    own = [value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
    return [value for value in own if isinstance(value, list | dict | set)]


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    members = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    for member in members:
        if isinstance(member, Tensor):
            yield from _stored_in(member)


def _stored_in(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or those in which one of a subclass holds its numbers."""
    yield tensor
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _stored_in(getattr(tensor, name))


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # no memory of its own
        return False


def _sample(tensor: Tensor) -> Any:
    """A few numbers of a tensor on the CPU, as a numpy view."""
    bits = _BITS.get(tensor.itemsize)
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_cpu or bits is None:
        return None
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_quantized:
        return None
    flat = tensor.detach().view(-1).view(bits)
    return flat[:: max(1, len(flat) // _SAMPLE)].numpy()
