"""Whether all code of a model is transformers' and torch's own, so that our kernels, which never
call it, compute the same.

A class or function can say that it is another's: `__module__`, `__name__` and `__wrapped__` can be
written. What cannot be written by accident is where its code was compiled: `co_filename` and
`co_qualname` of its code object. So each class must be found under its own name in a module of
these packages, each of its methods must have been compiled from a file of theirs, through all
decorators, and `forward` in the very class that has it. Functions that the model's file calls by
name (`apply_rotary_pos_emb`) can be replaced as well, and are checked too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import draftahead
from draftahead.backends.modules import is_patched

# Where their code was compiled from; contextmanager is one of the decorators.
_FILES = (
    *(
        f"{Path(str(package.__file__)).parent}{os.sep}"
        for package in (torch, transformers, draftahead)
    ),
    contextlib.__file__,
)
_OF_MODULE = ("_forward_unimplemented", "Module._wrapped_call_impl")  # nn.Module's own
# No part of a forward; torch.compile replaces them in nn.Module when it is first used.
_NO_FORWARD = ("__init__", "__setstate__")
_MODELS = "transformers.models."  # one file each, with the functions that it calls


def autocast_of(device_type: str) -> torch.dtype | None:
    """The dtype that autocast gives to matrix products in this thread; None if it is off."""
    known = torch.amp.is_autocast_available(device_type)  # not for meta
    on = known and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


class Code(NamedTuple):
    """The code that a model's forward is made of."""

    classes: list[type]  # of its modules, with their bases
    functions: list[FunctionType]  # their methods and what those call, with what decorators wrap
    names: list[tuple[dict[str, Any], str, Any]]  # globals, name, value: what methods call by name


def code_of(model: nn.Module) -> Code:
    kinds = dict.fromkeys(type(module) for module in model.modules())
    classes = list(dict.fromkeys(c for kind in kinds for c in kind.__mro__ if c is not object))
    functions = [f for one in classes for f in functions_of(vars(one))]
    names: list[tuple[dict[str, Any], str, Any]] = []
    checked: set[FunctionType] = set()
    called = [f for f in functions if f.__module__.startswith(_MODELS)]
    while called:
        function = called.pop()
        if function in checked:
            continue
        checked.add(function)
        for name, value in _called_by_name(function):
            names.append((function.__globals__, name, value))
            unwrapped = list(_unwrapped(value))
            functions += unwrapped
            called += [f for f in unwrapped if str(f.__module__).startswith(_MODELS)]
    return Code(classes, list(dict.fromkeys(functions)), names)


def functions_of(members: Any) -> list[FunctionType]:
    """The functions among a class's members, and what their decorators wrap."""
    found: list[FunctionType] = []
    for name, value in members.items():
        if name in _NO_FORWARD:
            continue
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        found += [f for part in parts for f in _unwrapped(part)]
    return found


def foreign_code(model: nn.Module) -> str | None:
    """What is not transformers' or torch's own, or None."""
    if any(global_hooks()):
        return "global module hooks"
    modules = list(model.modules())
    if patched := {type(module).__name__: 0 for module in modules if _has_own_code(module)}:
        return f"hooks or a patched forward on {_few(patched)}"
    code = code_of(model)
    for one in code.classes:
        if not _is_known(one):
            return f"{one.__name__} is not a class of transformers or torch"
        if not has_own_forward(one):
            return f"{one.__name__}.forward is patched"
    found = {f.__qualname__: f.__code__.co_filename for f in code.functions}
    changed = [name for name, file in found.items() if not file.startswith(_FILES)]
    return f"{_few(changed)} is patched" if changed else None


def global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """torch's hooks of all modules, which run before and after each forward."""
    module = torch.nn.modules.module
    return module._global_forward_pre_hooks, module._global_forward_hooks


def _has_own_code(module: nn.Module) -> bool:
    """Whether one module has hooks, or a method that is not its class's."""
    return is_patched(module) or any(
        isinstance(value, FunctionType | MethodType | partial)
        and hasattr(type(module), name)
        and name != "extra_repr"  # how it is printed
        for name, value in vars(module).items()
    )


def _few(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3])


def _is_known(one: type) -> bool:
    """Whether a class is the one of that name in a module of the known packages."""
    module = sys.modules.get(one.__module__)
    found: Any = module
    for part in one.__qualname__.split("."):
        found = getattr(found, part, None)
    file = str(getattr(module, "__file__", ""))
    return found is one and file.startswith(_FILES)


def has_own_forward(one: type) -> bool:
    """Whether `forward` and `__call__`, if it has them, are what the class statement defined."""
    file = str(sys.modules[one.__module__].__file__)
    for name in {"forward", "__call__"} & vars(one).keys():
        codes = [function.__code__ for function in _unwrapped(vars(one)[name])]
        names = _OF_MODULE if one is nn.Module else (f"{one.__qualname__}.{name}",)
        if not codes or codes[-1].co_filename != file or codes[-1].co_qualname not in names:
            return False
        if not all(code.co_filename.startswith(_FILES) for code in codes):
            return False
    return True


def _unwrapped(function: Any) -> Iterator[FunctionType]:
    """A function, and those that its decorators wrap; nothing for other objects."""
    while isinstance(function, FunctionType):
        yield function
        function = getattr(function, "__wrapped__", None)


def _called_by_name(function: FunctionType) -> list[tuple[str, Any]]:
    found = [(name, function.__globals__.get(name)) for name in function.__code__.co_names]
    return [(name, value) for name, value in found if isinstance(value, FunctionType)]
