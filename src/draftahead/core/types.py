"""What flows through the engine. Every other file speaks in these words.

Shapes: B rows of the batch, N nodes of a draft (node 0 is the root), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from draftahead.core.draft import Draft as Draft
from draftahead.core.stats import Stats
from draftahead.errors import DraftaheadError

if TYPE_CHECKING:
    from draftahead.core.detokenizer import Detokenizer
from draftahead.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]
Exact = Literal["law", "replay"]


@dataclass(frozen=True)
class Request:
    """One prompt to continue. Its sampling has no unset field any more."""

    prompt: tuple[int, ...]
    params: SamplingParams
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
        ends = frozenset(self.params.stop_token_ids)
        return ends if self.params.ignore_eos else ends | self.eos_token_ids


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: dict[int, float]  # the likeliest tokens, the chosen one not always among them


@dataclass(eq=False)
class SequenceState:
    """The host's state of one running text. `tokens[-1]` is the root of the next step."""

    request: Request
    id: int
    sample: int  # which of the request's n
    rng_key: int  # of its noise: see sampling.py
    tokens: list[int]  # prompt and output
    tail: Detokenizer
    drafted: list[bool] = field(default_factory=list)  # of each output token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
    error: DraftaheadError | None = None
    fault: DraftaheadError | None = None  # why there may be no law: becomes the error if reached
    target_noise_used: bool = False  # a drafter knows the target's noise: see Dice.outlook

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @cached_property
    def has_processors(self) -> bool:
        """Whether its law depends on more than the logits at a node: on the path to it."""
        s = self.params
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


class StepCost(Protocol):
    """What a pass costs on this machine."""

    def of(self, rows: int) -> float:
        """Seconds, for a pass that scores so many nodes."""


class DraftSampler(Protocol):
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

    def noise_coupled_topk(
        self,
        logits: Tensor,
        rows: Sequence[int],
        paths: Sequence[tuple[int, ...]],
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
    sequences: tuple[SequenceState, ...]
    max_depths: tuple[int, ...]  # how deep a draft of this row may be
    draft_sampler: DraftSampler
    exact: Exact = "law"
    step_cost: StepCost | None = None  # for drafters that weigh what they do

    @property
    def roots(self) -> list[int]:
        return [sequence.tokens[-1] for sequence in self.sequences]


@dataclass(frozen=True)
class ForwardOutput:
    logits: Tensor  # [B, N, V], of the target, for the token after each node
    argmax: Tensor | None = None  # [B, N] of the logits, if a pass found it, -1 where not finite
    topk: Tensor | None = None  # [B, N, 4] the likeliest tokens, if a pass found them
    hidden: Tensor | None = None
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
class StreamChunk:
    """What one step of a stream adds."""

    text: str
    token_ids: list[int]
    drafted: list[bool]  # which of token_ids a drafter guessed
    finish_reason: FinishReason | None = None
