"""The types that flow through the engine.

Shapes: B sequences of the batch, N nodes of a draft (node 0 is the root), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar, overload

from torch import Tensor

from draftahead.core.checks import shown
from draftahead.core.detokenizer import Detokenizer
from draftahead.core.draft import DeviceDraft
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.errors import DraftaheadError

FinishReason = Literal["stop", "length", "error"]
# The output follows the target's distribution; with replay its tokens are also the same for a seed,
# whatever the drafter and the rest of the batch.
Exact = Literal["distribution", "replay"]
# Tokens [1, T] of prompt, output and path, and scores [1, V] -> scores: a LogitsProcessor.
Processor = Callable[[Tensor, Tensor], Tensor]


class ModelProcessors(NamedTuple):
    """Processors of a model's generation_config, by where transformers' order puts them among the
    sampling parameters. Those with a place beside the user's are in SamplingParams.processors."""

    before_penalties: tuple[Processor, ...] = ()
    before_top_k: tuple[Processor, ...] = ()  # of log-probabilities, as are the next ones
    after_min_p: tuple[Processor, ...] = ()


@dataclass(frozen=True)
class Request:
    """One prompt to continue; unset sampling parameters have the model's defaults."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    model_processors: ModelProcessors = field(default_factory=ModelProcessors)
    reuse: bool = False  # start from the KV entries that an idle slot still holds of the prompt
    # Requests of one namespace may draft from each other's outputs; None: from no other request's.
    namespace: str | None = None
    prompt_text: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, under the target's distribution for it."""

    token_id: int
    logprob: float
    top: dict[int, float]  # of the most likely tokens; the chosen one is not always among them
    # Of all these tokens, each as it reads in the middle of a text; empty without a tokenizer.
    texts: Mapping[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str | None:
        return self.texts.get(self.token_id)


class TokensView(Sequence[int]):
    """A growing list of tokens that cannot be written to. Slices are copies."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __repr__(self) -> str:
        return repr(self._tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceView:
    """What a drafter may read of a sequence: nothing of it can be written to. One object for as
    long as the sequence runs."""

    id: int
    prompt: tuple[int, ...]
    namespace: str | None  # see Request
    temperature: float  # 0: greedy
    modifies_logits: bool  # by processors, which depend on a node's path
    tokens: TokensView  # prompt and output; the last one is the root

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


@dataclass(eq=False)
class SequenceState:
    """The host's state of one running sequence. `tokens[-1]` is the root of the next step."""

    request: Request
    id: int
    sample: int  # which of the request's n samples
    rng_key: int  # of its noise: see sampling/noise.py
    tokens: list[int]  # prompt and output
    detokenizer: Detokenizer
    drafted: list[bool] = field(default_factory=list)  # of each output token: was it drafted
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None  # of its second token on, once it is computed
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: DraftaheadError | None = None
    # By path below the root of this step: becomes the error if the node there is reached.
    processor_errors: dict[tuple[int, ...], DraftaheadError] = field(default_factory=dict)
    # A drafter has seen the target's noise for this sequence: see DraftSampler.noise_coupled_topk.
    target_noise_used: bool = False
    # Copied from the request, because they are read at every step:
    params: SamplingParams = field(init=False)
    prompt_length: int = field(init=False)
    is_greedy: bool = field(init=False)
    modifies_logits: bool = field(init=False)  # by processors, which depend on a node's path
    takes_argmax: bool = field(init=False)  # greedy, of the logits as the model computes them
    # Tokens that end the output. They stay in token_ids; their text is not shown.
    end_ids: frozenset[int] = field(init=False)
    view: SequenceView = field(init=False)  # for drafters

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.params, self.prompt_length = params, len(request.prompt)
        self.is_greedy = params.is_greedy
        self.modifies_logits = (
            params.modifies_logits or bool(request.bad_word_ids) or any(request.model_processors)
        )
        self.takes_argmax = self.is_greedy and not self.modifies_logits
        ends = frozenset(params.stop_token_ids)
        self.end_ids = ends if params.ignore_eos else ends | request.eos_token_ids
        self.view = SequenceView(
            self.id,
            request.prompt,
            request.namespace,
            params.temperature or 0.0,
            self.modifies_logits,
            TokensView(self.tokens),
        )

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.prompt_logprobs is None


class StepCost(NamedTuple):
    """Seconds of the target's forward in a step, on this machine."""

    of: Callable[[int], float]  # of a forward over so many nodes of the whole batch


class DraftSampler(Protocol):
    """Samples drafted tokens for a drafter, and records what the acceptance rule needs.

    A drafter that samples does it here, never by itself: so the recorded distribution is the one
    sampled from, and a broken drafter cannot bias the output.
    """

    def draw(
        self, logits: Tensor, active: Tensor | None = None, argmax: Tensor | None = None
    ) -> Tensor:
        """One more token for each sequence: logits [B, V] -> tokens [B].

        `active` [B] bool: the sequences that go on; the chains of the others end here. Decide that
        from the logits, before the draw. `argmax` [B]: of the logits, if it was computed already.
        On a device the tokens may not be computed yet when this returns.
        """

    def noise_coupled_topk(
        self,
        logits: Tensor,
        sequences: Sequence[int],
        paths: Sequence[tuple[int, ...]],
        k: int,
        draft_to_target: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The tokens that the target would most likely emit if it had these logits, for drafters
        that do not draw: logits [A, V], each after a path below the root of sequence b ->
        probabilities and tokens [A, k]. `draft_to_target` [D]: the tokens of a
        draft vocabulary that logits [A, D] are over.

        The target's next token is a function of its distribution and of noise that is known
        beforehand, so drafting with the same noise is accepted more often. It stays a guess: the
        output is that of plain decoding. A drafter that has seen this noise for a sequence must not
        `draw` for it any more: its choice would depend on the noise, and bias the output.
        """

    def target_rng_keys(self, num_depths: int) -> list[list[int]]:
        """For drafts with the target's noise that a device builds: the keys of that noise, of each
        sequence at each depth. As after `noise_coupled_topk`, nothing may be drawn any more."""

    def draft(self) -> DeviceDraft | None:
        """The tokens drawn so far; None if there are none."""


OneSequence = TypeVar("OneSequence", SequenceState, SequenceView)


class _Sequences(Generic[OneSequence]):
    """Sequence b is in batch slot b."""

    sequences: tuple[OneSequence, ...]

    @property
    def roots(self) -> list[int]:
        return [sequence.tokens[-1] for sequence in self.sequences]

    @property
    def all_greedy(self) -> bool:
        return all(sequence.is_greedy for sequence in self.sequences)

    @property
    def modifies_logits(self) -> bool:
        """Whether the logits of some sequence depend on the path of a node: without processors only
        its depth matters, and a draft on a device need not be copied to the host."""
        return any(sequence.modifies_logits for sequence in self.sequences)


@dataclass(frozen=True)
class RunningBatch(_Sequences[SequenceState]):
    """The sequences of one step, as the engine holds them."""

    sequences: tuple[SequenceState, ...]
    max_depths: tuple[int, ...]  # how deep the draft of each sequence may be
    exact: Exact = "distribution"


@dataclass(frozen=True)
class Batch(_Sequences[SequenceView]):
    """The sequences of one step, as a drafter sees them."""

    sequences: tuple[SequenceView, ...]
    max_depths: tuple[int, ...]
    sampler: DraftSampler | None = None
    exact: Exact = "distribution"
    step_cost: StepCost | None = None  # for drafters that adapt to it

    @property
    def draft_sampler(self) -> DraftSampler:
        assert self.sampler is not None, "only a drafter that is asked may sample"
        return self.sampler


@dataclass(frozen=True)
class ForwardOutput:
    """What one forward computed; valid until the next one, which may reuse the memory."""

    logits: Tensor  # [B, N, V], of the target, for the token after each node
    # If the backend computed them: argmax [B, N] of the logits, -1 where they are not finite, and
    # the most likely tokens [B, N, 4], best first.
    argmax: Tensor | None = None
    topk: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """For each sequence: the accepted nodes from the root down, and the tokens this step emits."""

    paths: list[list[int]]  # [b] -> 0, then the accepted nodes
    tokens: list[list[int]]  # [b] -> the accepted tokens, then the target's own
    # By sequence: why the target has no token of its own after the accepted ones.
    errors: dict[int, DraftaheadError] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Completion:
    """The finished output of one sequence: text, tokens, finish reason and stats.

    `token_ids` are all tokens up to the one that ended the output, it included: an end token, or
    the one that completed a stop string. `text` is what the tokenizer decodes them to, without
    special tokens, and without the end token or from the stop string on; with
    `include_stop_str_in_output` both are part of it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    stats: Stats
    prompt_token_ids: list[int]
    drafted: list[bool]  # which of token_ids were drafted and accepted
    seed: int
    index: int = 0  # which prompt of the call
    sample: int = 0  # which of the n samples of that prompt
    error: DraftaheadError | None = None
    lossless: bool = True  # False: typical acceptance, which does not keep the distribution
    # The stop string or the id of stop_token_ids that ended it; None for the model's end token.
    stop_reason: str | int | None = None
    # None if token ids were given; of a conversation, the text that the chat template made.
    prompt: str | None = None
    # With SamplingParams(prompt_logprobs=...); None for the first token, which nothing predicts.
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __repr__(self) -> str:
        end = f"finish_reason={self.finish_reason!r}" if self.error is None else repr(self.error)
        return f"Completion({shown(self.text)}, {len(self.token_ids)} tokens, {end})"


@dataclass(frozen=True)
class StreamChunk:
    """What one step adds to a stream."""

    text: str
    token_ids: list[int]
    drafted: list[bool]  # which of token_ids were drafted and accepted
    finish_reason: FinishReason | None = None
