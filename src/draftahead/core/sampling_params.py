"""The sampling parameters of a request, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftahead.errors import ConfigError

Check = Callable[[Any], bool]


def _number(low: float, high: float, kinds: Any = int | float) -> Check:
    def check(value: Any) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high

    return check


def _whole(low: float, high: float = 2**31) -> Check:
    return _number(low, high, int)


def _list_of(is_item: Check) -> Check:
    def check(value: Any) -> bool:
        is_list = isinstance(value, Collection) and not isinstance(value, str)
        return is_list and all(map(is_item, value))

    return check


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_is_ids, _is_biases = _list_of(_whole(-math.inf, math.inf)), _list_of(_number(-math.inf, 1e38))
# What each field must be; one whose default is None may be None too.
_CHECKS: dict[str, tuple[Check, str]] = {
    "temperature": (_number(0, 1e4), "a number, 0 (greedy) or more"),
    "top_k": (_whole(0), "a whole number, 0 (off) or more"),
    "top_p": (_number(math.ulp(0), 1), "a number above 0 and at most 1"),
    "min_p": (_number(0, 1), "a number between 0 and 1"),
    "repetition_penalty": (_number(math.ulp(0), 1e4), "a number above 0"),
    "presence_penalty": (_number(-100, 100), "a number between -100 and 100"),
    "frequency_penalty": (_number(-100, 100), "a number between -100 and 100"),
    "logit_bias": (
        lambda bias: isinstance(bias, Mapping) and _is_ids(bias) and _is_biases(bias.values()),
        "a number for each of some token ids",
    ),
    "bad_words": (
        _list_of(lambda word: _is_text(word) or (_is_ids(word) and len(word) > 0)),
        "a list of words that are not empty, as text or token ids",
    ),
    "min_tokens": (_whole(0), "a whole number, 0 or more"),
    "max_tokens": (_whole(1), "a whole number, 1 or more"),
    "stop": (
        lambda stop: isinstance(stop, str) or _list_of(_is_text)(stop),
        "text that is not empty",
    ),
    "stop_token_ids": (_is_ids, "a list of token ids"),
    "ignore_eos": (_is_flag, "True or False"),
    "n": (_whole(1), "a whole number, 1 or more"),
    "seed": (_whole(-math.inf, math.inf), "a whole number"),
    "logprobs": (_whole(0), "a whole number, 0 or more"),
    "raw_logprobs": (_is_flag, "True or False"),
    "processors": (_list_of(callable), "a list of LogitsProcessors"),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request samples tokens, along the path of every node of a draft. A field left at None
    follows the model's generation_config."""

    temperature: float | None = None  # 0 is greedy: argmax, lowest id on ties
    top_k: int | None = None  # 0 keeps all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output
    presence_penalty: float = 0.0  # over the output, as is the next one
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()  # text or token ids that are never emitted
    min_tokens: int | None = None  # the output does not end before so many tokens
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1  # samples of a prompt
    seed: int | None = None  # None: a fresh one, found in Completion.seed
    logprobs: int | None = None  # how many of the most likely tokens; 0: the chosen one only
    raw_logprobs: bool = False  # of the model's own logits, not of the distribution sampled from
    # transformers LogitsProcessors. They are called with the whole path of a node and must be
    # stateless: drafted paths that are rejected pass through them too.
    processors: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name, (is_right, says) in _CHECKS.items():
            value, may_be_none = getattr(self, name), getattr(type(self), name) is None
            if not is_right(value) and not (value is None and may_be_none):
                raise ConfigError(f"{name} must be {says}, not {value!r}")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def modifies_logits(self) -> bool:
        """Whether the logits of a node are changed before temperature and truncation: by penalties,
        min_tokens, a bias, or a processor of the user's."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty not in (None, 1.0)
            or self.logit_bias
            or self.processors
            or self.min_tokens
        )
