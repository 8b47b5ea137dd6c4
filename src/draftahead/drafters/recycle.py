"""Token recycling (Luo et al., arXiv 2408.08696): the target's best few next tokens after each
verified token are remembered, and drafted when that token occurs again.

They are used within the same request, or with `shared` within the same namespace. A table of the
target's predictions after each token alone, without a text, may be given for tokens that have not
occurred (`scripts/successors.py` makes it; one comes with smollm2).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from draftahead.control.rates import Rates
from draftahead.core import tree
from draftahead.core.checks import FLAG, NAME
from draftahead.core.draft import Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceView, Verdict
from draftahead.drafters.base import MIN_CONFIDENCE, DrafterContext
from draftahead.drafters.candidates import CandidateDrafter, CandidateNode
from draftahead.drafters.registry import register
from draftahead.errors import ConfigError

SUCCESSORS = 4  # remembered of a token; further ones are hardly ever right
MAX_TOKENS = 16384  # remembered of a namespace or a sequence; the oldest are dropped
MAX_NAMESPACES = 64  # remembered; the least recently used is dropped
# Prior acceptance rates of the first, second, ... successor: remembered from a text (True), and
# from the table (False).
INITIAL_RATES = {True: (0.45, 0.15, 0.08, 0.05), False: (0.25, 0.10, 0.06, 0.04)}

Successors = dict[int, list[int]]  # token -> its successors, the most likely first
Source = tuple[bool, int]  # remembered, or from the table; rank among the successors


@register("recycle")
class Recycle(CandidateDrafter[Source]):
    """Drafts the successors that the target predicted when a token last occurred."""

    def __init__(
        self,
        context: DrafterContext,
        *,
        num_speculative_tokens: int | None = None,
        successors: str | Path | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(num_speculative_tokens)
        self.table: Mapping[int, list[int]] = {}
        if successors is not None:
            file = NAME.of("successors", successors)
            self.table = read_table(file, context.vocab_size)
        elif context.successors is not None:
            with suppress(ConfigError):  # the model that it came with may have been changed
                self.table = read_table(context.successors, context.vocab_size)
        self.shared = FLAG.of("shared", shared)
        self.rates: Rates[Source] = Rates(
            lambda source: INITIAL_RATES[source[0]][source[1]], prior_weight=16.0, decay=0.99
        )
        self._by_sequence: dict[int, Successors] = {}  # by id
        self._by_namespace: OrderedDict[str, Successors] = OrderedDict()

    def candidates(self, sequence: SequenceView, max_depth: int) -> list[CandidateNode[Source]]:
        memory = self._memory(sequence)

        def children(node: CandidateNode[Source], index: int) -> Iterator[CandidateNode[Source]]:
            is_remembered = node.token in memory
            successors = memory[node.token] if is_remembered else self.table.get(node.token, ())
            for rank, token in enumerate(successors if node.depth < max_depth else ()):
                source = is_remembered, rank
                confidence = node.confidence * self.rates[source]
                yield CandidateNode(token, index, node.depth + 1, confidence, source)

        root = CandidateNode(sequence.tokens[-1], -1, 0, 1.0, (True, 0))
        return tree.best_first(children(root, 0), children, self.max_nodes, MIN_CONFIDENCE)

    def _memory(self, sequence: SequenceView) -> Successors:
        namespace = sequence.namespace
        if namespace is None or not self.shared:
            return self._by_sequence.setdefault(sequence.id, {})
        memory = self._by_namespace.setdefault(namespace, {})
        self._by_namespace.move_to_end(namespace)
        if len(self._by_namespace) > MAX_NAMESPACES:
            self._by_namespace.popitem(last=False)
        return memory

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        top = output.topk
        if top is None:
            top = output.logits.topk(min(SUCCESSORS, output.logits.shape[-1])).indices
        successors = top.tolist()
        for b, sequence in enumerate(batch.sequences):
            for candidate, accepted in self.outcomes(sequence, verdict.tokens[b]):
                self.rates.note(candidate.source, accepted)
            memory, path = self._memory(sequence), verdict.paths[b]
            rejected = sorted(set(range(draft.num_nodes[b])) - set(path))
            for node in [*rejected, *path]:  # accepted ones last: they overwrite the others
                token, following = draft.tokens[b][node], successors[b][node]
                if following[0] >= 0:  # the logits were finite
                    memory.pop(token, None)  # re-inserted as the newest
                    memory[token] = [successor for successor in following if successor >= 0]
            while len(memory) > MAX_TOKENS:
                del memory[next(iter(memory))]

    def release(self, sequence: SequenceView) -> None:
        super().release(sequence)
        self._by_sequence.pop(sequence.id, None)


def read_table(file: str | Path, vocab_size: int) -> Mapping[int, list[int]]:
    """token -> successors, as scripts/successors.py writes them."""
    try:
        table = load_file(file)["successors"].long()
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{file} is no table of successors: {error}") from None
    fits = table.ndim == 2 and len(table) == vocab_size
    if not fits or int(table.min()) < 0 or int(table.max()) >= vocab_size:
        raise ConfigError(f"{file} is a table for another vocabulary than one of {vocab_size}")
    return dict(enumerate(table[:, :SUCCESSORS].tolist()))
