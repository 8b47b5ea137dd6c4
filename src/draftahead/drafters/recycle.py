"""Token recycling (Luo et al., arXiv 2408.08696): after each token it verifies, the target has an
opinion of what could follow; the best few are remembered for the next time that token comes up.

What was remembered of one request drafts for no other, unless the drafter shares (`shared`) and
both name the same scope. What the target says after each token by itself is nobody's text: such a
table may be given as a start (`scripts/successors.py` makes it; one for smollm2 comes with us).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from draftahead.control.rates import Rates
from draftahead.core.types import Batch, Draft, ForwardOutput, SequenceState, Verdict
from draftahead.drafters.base import Drafter, DrafterContext, positive
from draftahead.drafters.registry import register
from draftahead.errors import ConfigError

KEPT = 4  # successors of a token
RANKS = range(KEPT)
MOST = 15  # guesses to choose from
LEAST = 0.02  # likelihood below which a guess is not worth its row
KNOWN = 16384  # tokens that are remembered, of a scope or a text; the oldest go first
SCOPES = 64  # that are remembered; the one longest unused goes first
# Before anything was seen: how often the first, second, ... successor comes true, if it was
# remembered from a text, and if it stands in the table.
FIRST = {True: (0.45, 0.15, 0.08, 0.05), False: (0.25, 0.10, 0.06, 0.04)}

Memory = dict[int, list[int]]  # token -> its successors, the likeliest first


class Kind(NamedTuple):
    remembered: bool  # or from the table
    rank: int


class Node(NamedTuple):
    token: int
    parent: int
    depth: int
    kind: Kind
    likely: float  # that it is reached and right


@register("recycle")
class Recycle(Drafter):
    def __init__(
        self,
        setting: DrafterContext,
        *,
        num_speculative_tokens: int | None = None,
        successors: str | Path | None = None,
        shared: bool = False,
    ) -> None:
        """Without a number of guesses, the policy takes as many as pay."""
        self.adaptive = num_speculative_tokens is None
        self.most = positive("num_speculative_tokens", num_speculative_tokens, default=MOST)
        self.table: Mapping[int, list[int]] = {}
        if successors is not None:
            self.table = read_table(successors, setting.vocabulary)
        elif setting.successors is not None:
            with suppress(ConfigError):  # the model that it came with may have been changed
                self.table = read_table(setting.successors, setting.vocabulary)
        self.shared = shared
        self.rates: Rates[Kind] = Rates(
            lambda kind: FIRST[kind.remembered][kind.rank], worth=16.0, fade=0.99
        )
        self._own: dict[int, Memory] = {}  # by sequence
        self._shared: OrderedDict[str, Memory] = OrderedDict()  # by scope
        self._drafts: dict[int, list[Node]] = {}  # by sequence

    def propose(self, batch: Batch) -> Draft | None:
        trees, confidence = [], []
        for sequence, room in zip(batch.sequences, batch.max_depths, strict=True):
            nodes = self._grow(sequence, room) if room else []
            self._drafts[sequence.id] = nodes
            trees.append([(node.token, node.parent) for node in nodes])
            confidence.append([node.likely for node in nodes])
        if not any(trees):
            return None
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def _grow(self, sequence: SequenceState, room: int) -> list[Node]:
        """The likeliest nodes below the root; parents first."""
        memory = self._memory(sequence)
        chances = {
            remembered: [(kind, self.rates[kind]) for kind in map(Kind, [remembered] * KEPT, RANKS)]
            for remembered in (True, False)
        }
        order = itertools.count()  # the older of two equals first
        heap: list[tuple[float, int, Node]] = []

        def offer(token: int, parent: int, depth: int, likely: float) -> None:
            known = memory.get(token)
            successors = self.table.get(token, ()) if known is None else known
            for then, (kind, rate) in zip(successors, chances[known is not None], strict=False):
                chance = likely * rate
                if chance >= LEAST:
                    node = Node(then, parent, depth, kind, chance)
                    heapq.heappush(heap, (-chance, next(order), node))

        offer(sequence.tokens[-1], 0, 1, 1.0)
        chosen: list[Node] = []
        while heap and len(chosen) < self.most:
            node = heapq.heappop(heap)[2]
            chosen.append(node)
            if node.depth < room:
                offer(node.token, len(chosen), node.depth + 1, node.likely)
        return chosen

    def _memory(self, sequence: SequenceState) -> Memory:
        scope = sequence.request.scope
        if scope is None or not self.shared:
            return self._own.setdefault(sequence.id, {})
        found = self._shared.setdefault(scope, {})
        self._shared.move_to_end(scope)
        if len(self._shared) > SCOPES:
            self._shared.popitem(last=False)
        return found

    def learn(self, batch: Batch, verdict: Verdict, scores: ForwardOutput) -> None:
        draft = scores.draft
        if draft is None:
            return
        found = scores.topk
        if found is None:
            found = scores.logits.topk(min(KEPT, scores.logits.shape[-1])).indices
        tops = found.tolist()
        for row, sequence in enumerate(batch.sequences):
            self._note_what_came(sequence, verdict.tokens[row])
            memory, tokens = self._memory(sequence), draft.host_tokens[row]
            path = verdict.paths[row]
            guesses = sorted(set(range(draft.num_nodes[row])) - set(path))
            for node in [*guesses, *path]:  # what became text has the last word
                if tops[row][node][0] >= 0:  # there are logits to speak of
                    memory.pop(tokens[node], None)  # to be the newest
                    memory[tokens[node]] = [token for token in tops[row][node] if token >= 0]
            while len(memory) > KNOWN:
                del memory[next(iter(memory))]

    def _note_what_came(self, sequence: SequenceState, said: list[int]) -> None:
        """At each node that the walk reached, every successor was right or was not."""
        nodes, at = self._drafts.get(sequence.id, []), 0
        for token in said:
            went = -1
            for index, node in enumerate(nodes, start=1):
                if node.parent == at:
                    self.rates.note(node.kind, node.token == token)
                    went = index if node.token == token else went
            if went == -1:
                return
            at = went

    def release(self, sequence: SequenceState) -> None:
        self._own.pop(sequence.id, None)
        self._drafts.pop(sequence.id, None)


def read_table(file: str | Path, vocabulary: int) -> Mapping[int, list[int]]:
    """token -> successors, as scripts/successors.py writes them."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)["successors"].long()
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{file} is no table of successors: {error}") from None
    fits = found.ndim == 2 and len(found) == vocabulary
    if not fits or int(found.min()) < 0 or int(found.max()) >= vocabulary:
        raise ConfigError(f"{file} is a table for another vocabulary than one of {vocabulary}")
    return dict(enumerate(found[:, :KEPT].tolist()))
