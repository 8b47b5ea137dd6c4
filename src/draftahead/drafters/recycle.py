"""Token recycling (Luo et al., arXiv 2408.08696): after each token that it verifies, the target has
logits for what could follow; the best few are remembered for the next time that token occurs.

What was remembered of one request drafts for no other, unless the drafter shares (`shared`) and
both name the same namespace. What the target predicts after each token by itself depends on no
text: such a table may be given as a start (`scripts/successors.py` makes it; one comes with
smollm2).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file

from draftahead.control.rates import Rates
from draftahead.core import tree
from draftahead.core.draft import Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceState, Verdict
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.registry import register
from draftahead.errors import ConfigError

SUCCESSORS = 4  # remembered of a token; further ones are hardly ever right
MAX_NODES = 15  # drafted nodes, where the number is not asked for: what one forward takes cheaply
MIN_CONFIDENCE = 0.02  # nodes below it do not repay their share of the verification
MAX_TOKENS = 16384  # remembered of a namespace or a sequence; the oldest are dropped
MAX_NAMESPACES = 64  # remembered; the least recently used is dropped
# Before anything was observed: how often the first, second, ... successor is accepted, if it was
# remembered from a text, and if it comes from the table.
INITIAL_RATES = {True: (0.45, 0.15, 0.08, 0.05), False: (0.25, 0.10, 0.06, 0.04)}

Memory = dict[int, list[int]]  # token -> its successors, the most likely first


class Source(NamedTuple):
    """Where a guess comes from."""

    remembered: bool  # or from the table
    rank: int  # among the successors


class Guess(NamedTuple):
    token: int
    parent: int
    depth: int
    source: Source
    confidence: float


@register("recycle")
class Recycle(Drafter):
    """Drafts the successors that the target predicted when a token last occurred."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        num_speculative_tokens: int | None = None,
        successors: str | Path | None = None,
        shared: bool = False,
    ) -> None:
        """Without a number of tokens, the policy verifies as many as pay."""
        self.adaptive = num_speculative_tokens is None
        self.max_nodes = positive(
            "num_speculative_tokens", num_speculative_tokens, default=MAX_NODES
        )
        self.table: Mapping[int, list[int]] = {}
        if successors is not None:
            self.table = read_table(successors, context.vocab_size)
        elif context.successors is not None:
            with suppress(ConfigError):  # the model that it came with may have been changed
                self.table = read_table(context.successors, context.vocab_size)
        self.shared = shared
        self.rates: Rates[Source] = Rates(
            lambda source: INITIAL_RATES[source.remembered][source.rank], worth=16.0, fade=0.99
        )
        self._own: dict[int, Memory] = {}  # by sequence
        self._shared: OrderedDict[str, Memory] = OrderedDict()  # by namespace
        self._drafts: dict[int, list[Guess]] = {}  # by sequence

    def propose(self, batch: Batch) -> Draft | None:
        trees, confidence = [], []
        for sequence, max_depth in zip(batch.sequences, batch.max_depths, strict=True):
            guesses = self._tree(sequence, max_depth) if max_depth else []
            self._drafts[sequence.id] = guesses
            trees.append([(guess.token, guess.parent) for guess in guesses])
            confidence.append([guess.confidence for guess in guesses])
        if not any(trees):
            return None
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def _tree(self, sequence: SequenceState, max_depth: int) -> list[Guess]:
        memory = self._memory(sequence)
        sources = {
            remembered: [Source(remembered, rank) for rank in range(SUCCESSORS)]
            for remembered in (True, False)
        }

        def children(token: int, parent: int, depth: int, confidence: float) -> Iterator[Guess]:
            known = memory.get(token)
            successors = self.table.get(token, ()) if known is None else known
            for then, source in zip(successors, sources[known is not None], strict=False):
                yield Guess(then, parent, depth, source, confidence * self.rates[source])

        def expand(guess: Guess, index: int) -> Iterator[Guess]:
            if guess.depth < max_depth:
                yield from children(guess.token, index, guess.depth + 1, guess.confidence)

        roots = children(sequence.tokens[-1], 0, 1, 1.0)
        return tree.best_first(roots, expand, self.max_nodes, MIN_CONFIDENCE)

    def _memory(self, sequence: SequenceState) -> Memory:
        namespace = sequence.request.namespace
        if namespace is None or not self.shared:
            return self._own.setdefault(sequence.id, {})
        found = self._shared.setdefault(namespace, {})
        self._shared.move_to_end(namespace)
        if len(self._shared) > MAX_NAMESPACES:
            self._shared.popitem(last=False)
        return found

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        top = output.topk
        if top is None:
            top = output.logits.topk(min(SUCCESSORS, output.logits.shape[-1])).indices
        successors = top.tolist()
        for b, sequence in enumerate(batch.sequences):
            self._observe(sequence, verdict.tokens[b])
            memory, path = self._memory(sequence), verdict.paths[b]
            rejected = sorted(set(range(draft.num_nodes[b])) - set(path))
            for node in [*rejected, *path]:  # the accepted tokens have the last word
                token, following = draft.tokens[b][node], successors[b][node]
                if following[0] >= 0:  # the logits were finite
                    memory.pop(token, None)  # to become the newest
                    memory[token] = [successor for successor in following if successor >= 0]
            while len(memory) > MAX_TOKENS:
                del memory[next(iter(memory))]

    def _observe(self, sequence: SequenceState, emitted: list[int]) -> None:
        """Of every guess whose parent was right, whether it was right as well."""
        guesses = self._drafts.get(sequence.id, [])
        tokens = [-1, *(guess.token for guess in guesses)]
        parents = [-1, *(guess.parent for guess in guesses)]
        outcomes = tree.outcomes(tokens, parents, emitted)
        for guess, outcome in zip(guesses, outcomes[1:], strict=True):
            if outcomes[guess.parent] and outcome is not None:
                self.rates.note(guess.source, outcome)

    def release(self, sequence: SequenceState) -> None:
        self._own.pop(sequence.id, None)
        self._drafts.pop(sequence.id, None)


def read_table(file: str | Path, vocab_size: int) -> Mapping[int, list[int]]:
    """token -> successors, as scripts/successors.py writes them."""
    try:
        found = load_file(file)["successors"].long()
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{file} is no table of successors: {error}") from None
    fits = found.ndim == 2 and len(found) == vocab_size
    if not fits or int(found.min()) < 0 or int(found.max()) >= vocab_size:
        raise ConfigError(f"{file} is a table for another vocabulary than one of {vocab_size}")
    return dict(enumerate(found[:, :SUCCESSORS].tolist()))
