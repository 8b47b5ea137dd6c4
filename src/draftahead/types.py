"""What flows through the engine. Every other file speaks in these words.

Shapes: B rows of the batch, N nodes of a draft (node 0 is the root), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from draftahead.drafts import Draft as Draft
from draftahead.errors import ConfigError, DraftaheadError
from draftahead.stats import Stats

if TYPE_CHECKING:
    from draftahead.text import TextTail

FinishReason = Literal["stop", "length", "error"]
Exact = Literal["law", "replay"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose tokens. A field left at None follows the model's generation_config."""

    temperature: float | None = None  # 0 is greedy: argmax, lowest id on ties
    top_k: int | None = None  # 0 keeps all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output
    presence_penalty: float = 0.0  # over the output, as the next one
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Seq[str | Seq[int]] = ()  # text, or token ids, never to be written
    min_tokens: int | None = None  # no end before so many tokens
    max_tokens: int | None = None
    stop: str | Seq[str] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None  # None: a fresh one, told in Completion.seed
    logprobs: int | None = None  # how many of the likeliest tokens to tell; 0: the chosen one only
    raw_logprobs: bool = False  # of the model's own law instead of the one sampled from
    # transformers LogitsProcessors. They are called with the whole path of a node and must be
    # stateless: drafted paths that are later rejected pass through them too.
    processors: Seq[Any] = ()

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
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Request:
    """One prompt to continue. Its sampling has no unset field any more."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    reuse: bool = False  # start from keys and values that an idle row still holds
    scope: str | None = (
        None  # whose earlier texts may draft for it, and it for theirs; None: nobody
    )

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the text. They stay in token_ids; their text is not shown."""
        ends = frozenset(self.sampling.stop_token_ids)
        return ends if self.sampling.ignore_eos else ends | self.eos_token_ids


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: dict[int, float]  # the likeliest tokens, the chosen one not always among them


@dataclass(eq=False)
class Sequence:
    """The host's state of one running text. `tokens[-1]` is the root of the next step."""

    request: Request
    id: int
    sample: int  # which of the request's n
    key: int  # of its noise: see sampling.py
    tokens: list[int]  # prompt and output
    tail: TextTail
    drafted: list[bool] = field(default_factory=list)  # of each output token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
    error: DraftaheadError | None = None
    fault: DraftaheadError | None = None  # why there may be no law: becomes the error if reached
    foreseen: bool = False  # a drafter knows the target's noise: see Dice.outlook

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @cached_property
    def has_processors(self) -> bool:
        """Whether its law depends on more than the logits at a node: on the path to it."""
        s = self.sampling
        penalties = (
            s.presence_penalty,
            s.frequency_penalty,
            s.repetition_penalty not in (None, 1.0),
        )
        lists = (s.logit_bias, s.processors, self.request.bad_word_ids, s.min_tokens)
        return any(penalties) or any(lists)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class Price(Protocol):
    """What a pass costs on this machine."""

    def of(self, rows: int) -> float:
        """Seconds, for a pass that scores so many nodes."""


class Dice(Protocol):
    """Draws drafted tokens for a drafter, and keeps the record that the acceptance rule needs.

    A drafter that samples does it here, never by itself: so the recorded law is the one drawn
    from, and a broken drafter cannot bend the output.
    """

    def draw(
        self, logits: Tensor, rows: Tensor | None = None, best: Tensor | None = None
    ) -> Tensor:
        """One more token for each row: logits [B, V] -> tokens [B].

        `rows` [B] bool says which rows go on; the others' chains end here. Decide that from
        the logits, before the draw. `best` [B]: their argmax, if that is known already. The
        tokens may still be under way on a device.
        """

    def outlook(
        self,
        logits: Tensor,
        rows: Seq[int],
        paths: Seq[tuple[int, ...]],
        count: int,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the target would say next if it thought so, for drafters that do not draw: logits
        [A, V], each after a path below the root of a row -> weights and tokens [A, count].
        `tokens` [D]: what logits [A, D] over a draft vocabulary are for.

        The target's next token is settled by its law and noise that is known beforehand. With that
        noise a guess is a good one, and still only a guess: the text stays that of plain decoding.
        Who has asked once for a text may not draw for it any more: chosen with this knowledge,
        what is drawn would not follow its law.
        """

    @property
    def chains(self) -> list[list[int]]:
        """What was drawn, by row. Costs a wait until the verdict of the step is known."""


@dataclass(frozen=True)
class Batch:
    sequences: tuple[Sequence, ...]
    rooms: tuple[int, ...]  # how deep a draft of this row may be
    dice: Dice
    exact: Exact = "law"
    price: Price | None = None  # for drafters that weigh what they do

    @property
    def roots(self) -> list[int]:
        return [sequence.tokens[-1] for sequence in self.sequences]


@dataclass(frozen=True)
class Scores:
    logits: Tensor  # [B, N, V], of the target, for the token after each node
    best: Tensor | None = None  # [B, N] their argmax if a pass found it, -1 where not finite
    top: Tensor | None = None  # [B, N, 4] the likeliest tokens, if a pass found them
    draft: Draft | None = None  # what was scored: of what a drafter proposed, the part that pays


@dataclass(frozen=True)
class Verdict:
    """For each row: the kept nodes from the root down, and the tokens this step emits."""

    paths: list[list[int]]  # [b] -> 0, then the accepted nodes
    tokens: list[list[int]]  # [b] -> the accepted tokens, then the target's own
    errors: dict[int, DraftaheadError] = field(default_factory=dict)  # by row: no tokens there


@dataclass(frozen=True)
class Completion:
    """A finished text."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    stats: Stats
    prompt_token_ids: list[int]
    drafted: list[bool]  # which of token_ids a drafter guessed
    seed: int
    index: int = 0  # which prompt of the call
    sample: int = 0  # which of the n samples of that prompt
    error: DraftaheadError | None = None
    lossless: bool = True  # False: guesses were kept for being likely, not for being drawn


@dataclass(frozen=True)
class Piece:
    """What one step of a stream adds."""

    text: str
    token_ids: list[int]
    drafted: list[bool]  # which of token_ids a drafter guessed
    finish_reason: FinishReason | None = None
