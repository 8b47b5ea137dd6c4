"""A verifier without a model: notes what it is told to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftahead.core.types import SequenceState


class Recording:
    """In place of a verifier, its runner and its cache: notes what it is told to do."""

    def __init__(self, slots: int, held: Sequence[int] = (), max_depth: int = 99) -> None:
        self.cache = self.runner = self
        self.num_slots, self.limit = slots, max_depth
        self.held = dict(enumerate(held))  # KV entries of any prompt
        self.tokens_in: list[list[int]] = [[] for _ in range(slots)]
        self.last_used = [0] * slots
        self.calls: list[Any] = []
        self.clock = [0.0]

    def max_depth(self, sequence: SequenceState) -> int:
        return self.limit

    def prefill_slots(self, first_slot: int, sequences: list[SequenceState]) -> None:
        self.calls.append(("prefill", first_slot, [one.id for one in sequences]))
        for slot, one in enumerate(sequences, start=first_slot):
            self.tokens_in[slot] = one.tokens[:-1]

    def prefill(self, slot: int, sequence: SequenceState) -> int:
        self.calls.append(("reuse", slot, sequence.id))
        return 1

    def matching_prefix(self, slot: int, tokens: Sequence[int]) -> int:
        return self.held.get(slot, 0)

    def copy_slot(self, source: int, to: int) -> None:
        self.calls.append(("copy", source, to))
        self.tokens_in[to] = list(self.tokens_in[source])

    def swap_slots(self, one: int, other: int) -> None:
        self.calls.append(("swap", one, other))

    def clear_slot(self, slot: int) -> None:
        self.calls.append(("clear", slot))

    def give_back(self, slot: int, start: int) -> None:
        self.calls.append(("give back", slot, start))

    def synchronize(self) -> None:
        """The forward is done now."""
        self.clock[0] += 1.0
