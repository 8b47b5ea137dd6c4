"""What a parameter may be. Every type and range is checked here, whoever takes the parameter."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from draftahead.errors import ConfigError, nearest, similar

MAX_ITEMS = 1_000_000  # of a list: a `range` may have any number


class Kind(NamedTuple):
    """What a parameter may be: in words, and as a function to its plain Python value, which raises
    anything for any other value."""

    says: str
    read: Callable[[Any], Any]
    names: tuple[str, ...] = ()  # if it is one of these

    def of(self, name: str, value: Any) -> Any:
        """The plain value: numpy's numbers become Python's, lists become tuples."""
        value = str.__str__(value) if isinstance(value, str) else value
        try:
            return self.read(value)
        except Exception:  # also what an object of the user's raises when it is looked at
            hint = similar(value, self.names) if isinstance(value, str) else ""
            raise ConfigError(f"{name} must be {self.says}, not {shown(value)}{hint}") from None

    def __or__(self, other: Kind) -> Kind:
        def read(value: Any) -> Any:
            try:
                return self.read(value)
            except Exception:
                return other.read(value)

        return Kind(f"{self.says} or {other.says}", read, self.names + other.names)


def whole(low: int | None = None, high: int | None = None, note: str = "") -> Kind:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError
        plain: int = _within(operator.index(value), low, high)
        return plain

    return Kind(_range("a whole number", low, high, note), read)


def number(low: float | None = None, high: float | None = None, note: str = "") -> Kind:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError
        plain: float = _within(float(value), low, high)
        if plain != plain:  # NaN
            raise ValueError
        return plain

    return Kind(_range("a number", low, high, note), read)


def choice(*names: str) -> Kind:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Kind(" or ".join(map(repr, names)), read, names)


def instance(types: type | tuple[type, ...], says: str) -> Kind:
    def read(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return Kind(says, read)


def list_of(item: Kind, says: str, at_least: int = 0, at_most: int = MAX_ITEMS) -> Kind:
    """Any collection that is no text, no bytes and no mapping, as a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        found = as_list(value)
        _within(len(found), at_least, at_most)
        return tuple(map(item.read, found))

    return Kind(says, read)


def mapping_of(key: Kind, value: Kind, says: str) -> Kind:
    def read(given: Any) -> dict[Any, Any]:
        if not isinstance(given, Mapping):
            raise TypeError
        return {key.read(name): value.read(number) for name, number in given.items()}

    return Kind(says, read)


def as_list(value: Any) -> Collection[Any]:
    """A collection of items; arrays and tensors as lists of Python's numbers."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError
    found = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(found, Collection):
        raise TypeError
    return found


def _within(value: Any, low: float | None, high: float | None) -> Any:
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError
    return value


def _range(what: str, low: float | None, high: float | None, note: str) -> str:
    limits = ""
    if low is not None:
        limits = f", {low} or more" if high is None else f" from {low} to {high}"
    return what + limits + (f" ({note})" if note else "")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    plain = str.__str__(value)  # of a class of the user's, or numpy's
    if not plain:
        raise ValueError
    plain.encode()  # half a surrogate pair is no text: no tokenizer takes it
    return plain


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _function(value: Any) -> Any:
    if isinstance(value, type) or not callable(value):
        raise TypeError
    return value


TEXT = Kind("text that is not empty", _text)
NAME = Kind("a name or a path", (TEXT | instance(Path, "")).read)
FLAG = Kind("True or False", _flag)
FUNCTION = Kind("a function", _function)
TOKEN_IDS = list_of(whole(), "a list of token ids")


# --------------------------------------------------------------------------------- dataclasses


class Parameters:
    """Base of frozen dataclasses whose fields are checked when one is made. None is the default of
    a field that has one."""

    owner: ClassVar[str]  # what the user calls it
    kinds: ClassVar[Mapping[str, Kind]]
    advice: ClassVar[Mapping[str, str]] = {}  # what to write for names of other libraries

    def __new__(cls, *values: Any, **given: Any) -> Self:
        if values:
            raise ConfigError(f"{cls.owner} takes its parameters by name: name=value")
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                hint = f": {cls.advice[name]}" if name in cls.advice else nearest(name, known)
                raise ConfigError(f"{cls.owner} has no parameter {name!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in self.kinds.items():
            value = getattr(self, name)
            is_default = value is None and hasattr(type(self), name)
            plain = getattr(type(self), name) if is_default else kind.of(name, value)
            object.__setattr__(self, name, plain)

    def __repr__(self) -> str:
        """The fields that differ from their defaults."""
        found = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, default = getattr(self, field.name), field.default
            if type(value) is not type(default) or value != default:
                found.append(f"{field.name}={shown(value)}")
        return f"{type(self).__name__}({', '.join(found)})"


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_instance(self, x: Any, level: int) -> str:
        found = super().repr_instance(x, level)
        return f"<{type(x).__name__}>" if "..." in found else found


def shown(value: Any) -> str:
    """A value in an error: one short line, whatever it is."""
    try:
        return " ".join(_ShortRepr().repr(value).split())
    except Exception:  # a number of 5,000 digits, an object that cannot be shown
        return f"this {type(value).__name__}"
