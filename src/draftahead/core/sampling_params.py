"""How to choose tokens: the sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftahead.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request chooses tokens from probs. A field left at None follows the model's
    generation_config."""

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
        def check(ok: bool, name: str, says: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {says}, not {getattr(self, name)!r}")

        whole = ("top_k", "max_tokens", "min_tokens", "n", "seed", "logprobs")
        numbers = ("temperature", "top_p", "min_p", "repetition_penalty")
        for name in (*whole, *numbers, "presence_penalty", "frequency_penalty"):
            value, kind = getattr(self, name), int if name in whole else int | float
            right = isinstance(value, kind) and not isinstance(value, bool)
            check(value is None or right, name, "a whole number" if name in whole else "a number")
        check(not isinstance(self.bad_words, str), "bad_words", "a list of words")
        ids = [*(self.logit_bias or {}), *self.stop_token_ids]
        if not all(isinstance(i, int) for i in ids):
            raise ConfigError("logit_bias and stop_token_ids take token ids, which are numbers")

        def within(value: float | None, low: float, high: float) -> bool:
            return value is None or (math.isfinite(value) and low <= value <= high)

        check(within(self.temperature, 0, 1e4), "temperature", "0 (greedy) or more")
        check(within(self.top_k, 0, 2**31), "top_k", "0 (off) or more")
        check(within(self.top_p, 0, 1) and self.top_p != 0, "top_p", "above 0 and at most 1")
        check(within(self.min_p, 0, 1), "min_p", "between 0 and 1")
        positive = within(self.repetition_penalty, 0, 1e4) and self.repetition_penalty != 0
        check(positive, "repetition_penalty", "above 0")
        check(within(self.presence_penalty, -100, 100), "presence_penalty", "finite")
        check(within(self.frequency_penalty, -100, 100), "frequency_penalty", "finite")
        check(within(self.max_tokens, 1, 2**31), "max_tokens", "1 or more")
        check(within(self.min_tokens, 0, 2**31), "min_tokens", "0 or more")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        check(self.n >= 1, "n", "1 or more")
        check(within(self.logprobs, 0, 2**31), "logprobs", "0 or more")
        check(all(self.stops), "stop", "text that is not empty")
        check(all(self.bad_words), "bad_words", "words that are not empty")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def modifies_logits(self) -> bool:
        """Whether the distribution at a node depends on more than its logits: on the tokens before
        it, on a bias, or on a processor of the user's."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty not in (None, 1.0)
            or self.logit_bias
            or self.processors
            or self.min_tokens
        )
