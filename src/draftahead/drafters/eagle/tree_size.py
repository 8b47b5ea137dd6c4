"""Size of the trees that a GPU builds: the number of nodes with the most expected tokens per
second, from the confidence by rank in trees of the largest size and the cost of a step."""

from __future__ import annotations

from collections import defaultdict

from draftahead.backends.cuda.layers import MAX_FORWARD_NODES
from draftahead.control.rates import Usual
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch

# Nodes of a sequence, the root included. Each further size is one more CUDA graph per shape.
SIZES = (2, 4, 8, 16, 32)
# Trees after which the largest size is built again: a smaller tree gives no statistics of the nodes
# that it lacks. A lower number notices a change of the text sooner, and costs more large trees.
REMEASURE_EVERY = 16


class TreeSize:
    """Chooses a size from SIZES by the number of sequences."""

    def __init__(self) -> None:
        self._confidence: defaultdict[int, Usual] = defaultdict(Usual)  # by rank, by largest size
        self._seconds = 0.0  # of building a tree
        self._chosen: dict[int, int] = {}  # by number of sequences
        self._since_largest = 0

    def choose(self, batch: Batch) -> int:
        batch_size, cost = len(batch.sequences), batch.step_cost
        is_due = self._since_largest >= REMEASURE_EVERY
        if not is_due and batch_size in self._chosen:
            return self._chosen[batch_size]
        largest = largest_size(batch_size)
        confidence = self._confidence[largest]
        if cost is None or is_due or not confidence.known:
            return largest

        def tokens_per_second(size: int) -> float:
            tokens = 1 + sum(confidence.by_rank[: size - 1])
            return tokens / (self._seconds + cost.of(batch_size * size))

        sizes = SIZES[: SIZES.index(largest) + 1]
        self._chosen[batch_size] = max(sizes, key=tokens_per_second)
        return self._chosen[batch_size]

    def note(self, launched: DeviceDraft, draft: Draft) -> None:
        """`launched` was verified; `draft` is the same, on the host."""
        if draft.confidence is None or launched.timer is None:
            return
        self._seconds = launched.timer.laps()[0]
        self._since_largest += 1
        if draft.width == largest_size(len(draft.tokens)):
            for confidence in draft.confidence:
                self._confidence[draft.width].note(sorted(confidence, reverse=True))
            self._since_largest = 0
            self._chosen.clear()


def largest_size(batch_size: int) -> int:
    """The largest size with which the batch fits one forward of the target."""
    return max((size for size in SIZES if batch_size * size <= MAX_FORWARD_NODES), default=SIZES[0])
