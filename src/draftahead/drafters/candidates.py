"""Draft trees from tables, without a forward: the most confident candidates. For `recycle` and
`suffix`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftahead.core import tree
from draftahead.core.draft import Draft
from draftahead.core.types import Batch, SequenceView
from draftahead.drafters.base import Drafter, positive_int

DEFAULT_TREE_NODES = 15  # without the root: with it 16, which one forward takes cheaply

Source = TypeVar("Source")


@dataclass(slots=True)
class CandidateNode(Generic[Source]):
    token: int
    parent: int  # index in the tree; the root is 0
    depth: int
    confidence: float
    source: Source  # what predicted it


class CandidateDrafter(Drafter, Generic[Source]):
    """Drafts the tree of candidates of each sequence, and keeps it until its verdict."""

    def __init__(self, num_speculative_tokens: int | None) -> None:
        """Without a number of tokens, the policy verifies as many as pay."""
        self.adaptive = num_speculative_tokens is None
        name = "num_speculative_tokens"
        self.max_nodes = positive_int(name, num_speculative_tokens, default=DEFAULT_TREE_NODES)
        self._drafts: dict[int, list[CandidateNode[Source]]] = {}  # by sequence

    def candidates(self, sequence: SequenceView, max_depth: int) -> list[CandidateNode[Source]]:
        """Nodes below the root, parents first; at most `max_nodes`."""
        raise NotImplementedError

    def propose(self, batch: Batch) -> Draft | None:
        trees, confidence = [], []
        for sequence, max_depth in zip(batch.sequences, batch.max_depths, strict=True):
            nodes = self._drafts[sequence.id] = (
                self.candidates(sequence, max_depth) if max_depth else []
            )
            trees.append([(node.token, node.parent) for node in nodes])
            confidence.append([node.confidence for node in nodes])
        if not any(trees):
            return None
        return Draft.trees(batch.roots, trees, confidence if self.adaptive else None)

    def outcomes(
        self, sequence: SequenceView, emitted: list[int]
    ) -> Iterator[tuple[CandidateNode[Source], bool]]:
        """(node, accepted) for every node whose parent was accepted."""
        nodes = self._drafts.get(sequence.id, [])
        parents = [-1, *(node.parent for node in nodes)]
        outcomes = tree.match_emitted([-1, *(node.token for node in nodes)], parents, emitted)
        for node, outcome in zip(nodes, outcomes[1:], strict=True):
            if outcomes[node.parent] and outcome is not None:
                yield node, outcome

    def release(self, sequence: SequenceView) -> None:
        self._drafts.pop(sequence.id, None)
