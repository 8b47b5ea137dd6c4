"""Any value of any parameter: what a caller could pass, from the plain to the hostile."""

from __future__ import annotations

import array
import enum
import itertools
import os
from collections import UserDict, UserList, deque
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st

from draftahead import SamplingParams
from draftahead.core.checks import shown

# Examples of each test on every push, and with `slow`.
FEW, MANY = 60, 20_000


def examples(count: int) -> Any:
    """Settings of a property test. Values may take long to show, and none is slow to refuse."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=count < MANY // 3,
        database=None,
    )


def profiles() -> Any:
    """Parametrizes a test by its number of examples: few on every push, many with `slow`."""
    return pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


class Hostile:
    """Raises when it is looked at in one of these ways."""

    def __init__(self, way: str) -> None:
        self.way = way

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("hostile")


def _hostile(*ways: str) -> Any:
    return type("Hostile", (), dict.fromkeys(ways, Hostile._raise))()


WAYS = (
    *("__repr__", "__str__", "__eq__", "__hash__", "__len__", "__bool__", "__iter__"),
    *("__getitem__", "__getattr__", "__index__", "__int__", "__float__", "__contains__"),
    *("__fspath__", "__call__", "__lt__", "tolist", "keys", "items"),
)


class HostileList(list[Any]):
    """Lists that say so and cannot be read."""

    __iter__ = __getitem__ = __repr__ = Hostile._raise  # type: ignore[assignment]


class HostileDict(dict[Any, Any]):
    __iter__ = __getitem__ = __repr__ = items = keys = Hostile._raise  # type: ignore[assignment]


class HostileText(str):
    __repr__ = __str__ = __eq__ = __len__ = encode = Hostile._raise  # type: ignore[assignment]
    __hash__ = str.__hash__


class HostileNumber(int):
    __repr__ = __str__ = __index__ = __lt__ = __gt__ = __eq__ = Hostile._raise  # type: ignore[assignment]
    __hash__ = int.__hash__


class Whole(enum.IntEnum):
    ONE = 1


class Named(enum.StrEnum):
    CPU = "cpu"


ODD: list[Any] = [
    *(_hostile(way) for way in WAYS),
    _hostile(*WAYS),
    *(HostileList([1]), HostileDict(a=1), HostileText("cpu"), HostileNumber(3)),
    *(Whole.ONE, Named.CPU, Decimal("0.5"), Decimal("nan"), Fraction(1, 3), 1 + 2j, ..., object()),
    *(int, str, Hostile, len, lambda *_: None, lambda a, b: b, os, SamplingParams(), settings),
    *(range(3), range(10**12), range(10**30), iter([1]), (i for i in [1])),
    *({1, 2}, frozenset({"a"}), deque([1]), UserList([1]), UserDict(a=1), {}.keys()),
    *(Path("x"), Path("x" * 5000), array.array("q", [1]), memoryview(b"ab"), bytearray(b"ab")),
    *(np.float32(0.5), np.float64("nan"), np.int8(3), np.uint64(2**64 - 1), np.bool_(True)),
    *(np.str_("cpu"), np.datetime64("2020-01-01"), np.complex64(1j), np.void(b"ab")),
    *(np.array(3), np.array([1, 2]), np.array([[1], [2]]), np.array([]), np.array(["a"])),
    *(np.array([None, "a"], object), np.array([0.5, np.nan]), np.float16("inf")),
    *(torch.tensor(3), torch.tensor([1, 2]), torch.tensor([[1.5]]), torch.tensor(True)),
    *(torch.tensor([]), torch.empty(2, device="meta"), torch.tensor([1.0]).bfloat16()),
    torch.tensor([1, 2]).to_sparse(),
    *(torch.float16, torch.int8, torch.device("cpu"), torch.device("meta"), torch.nn.Linear(1, 1)),
    itertools.count(),
]


def one_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """`sampled_from`, for values that cannot be shown."""
    return st.integers(0, len(values) - 1).map(lambda index: values[index])


NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.integers(),
    one_of([2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, -(10**5000)]),
    st.floats(),
    st.floats(-2, 3),
    st.sampled_from([0.0, -0.0, 1e-300, 5e-324, 1e30, 1e38, 1e300]),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.text(st.characters(), max_size=4),  # half characters, too
    st.sampled_from(["", " ", "\0", "\ud800", "x" * 5000, "cpu", "cuda:9", "auto", "none", "w5"]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.binary(max_size=4), one_of(ODD))
KEYS = st.one_of(TEXTS, st.integers(-3, 200), st.sampled_from(["role", "content", "prompt"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=6,
)


def or_any(*likely: Any) -> st.SearchStrategy[Any]:
    """Any value, and half of the time one that is likely to be accepted."""
    return st.one_of(one_of(likely), VALUES) if likely else VALUES


class Case:
    """A value that hypothesis is to show, whatever it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        if type(self.value) is dict:
            return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in self.value.items()) + "}"
        return f"{shown(self.value)} of {type(self.value)}"


def draw(data: st.DataObject, values: st.SearchStrategy[Any]) -> Any:
    case = data.draw(values.map(Case))
    note(repr(case))
    return case.value
