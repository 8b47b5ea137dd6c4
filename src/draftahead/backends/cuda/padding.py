"""Padding of a forward on a GPU: sequences and nodes whose output is not used.

A CUDA graph is captured for every number of sequences and of nodes, and takes as long for a few
nodes as for one. So both numbers are rounded up, and few graphs serve all batches and drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.base import DeviceTree
from draftahead.backends.cuda.layers import next_power_of_two
from draftahead.core.tree import MAX_NODES
from draftahead.kv.cache import KVCache

# Larger batches are padded to a multiple of it. A higher number wastes less of a forward, and
# captures more graphs.
PAD_SEQUENCES_TO = 8


class Padding(NamedTuple):
    """Sequences and nodes added. Their KV entries are written behind the slots' tokens."""

    num_sequences: int = 0
    num_nodes: int = 0

    @staticmethod
    def of(
        cache: KVCache, first_slot: int, num_cached: Sequence[int], num_nodes: int, *, fixed: bool
    ) -> Padding:
        """For a forward over `num_nodes` nodes behind `num_cached` entries of slots from
        `first_slot` on. `fixed`: the number of nodes stays as it is."""
        batch = len(num_cached)
        keeps_nodes = fixed or num_nodes > MAX_NODES  # more are a prompt's
        more_nodes = 0 if keeps_nodes else next_power_of_two(num_nodes) - num_nodes
        if max(num_cached) + num_nodes + more_nodes > cache.num_entries:
            more_nodes = 0
        more = -batch % PAD_SEQUENCES_TO if batch > PAD_SEQUENCES_TO else 0
        idle = cache.tokens_in[first_slot + batch : first_slot + batch + more]
        fits = all(len(slot) + num_nodes + more_nodes <= cache.num_entries for slot in idle)
        return Padding(more if len(idle) == more and fits else 0, more_nodes)

    def size(self, batch: int, num_nodes: int) -> tuple[int, int]:
        return batch + self.num_sequences, num_nodes + self.num_nodes

    def tokens(self, tokens: Tensor) -> Tensor:
        return F.pad(tokens, (0, self.num_nodes, 0, self.num_sequences)) if any(self) else tokens

    def parents(self, parents: Tensor | DeviceTree | None) -> list[list[int]] | DeviceTree | None:
        """Parents with padding nodes as children of the root; lists, unless on the device."""
        if parents is None:
            return None
        if isinstance(parents, DeviceTree):
            return parents.and_idle(self.num_sequences) if self.num_sequences else parents
        lists = [[*one, *[0] * self.num_nodes] for one in parents.tolist()]
        return lists + lists[:1] * self.num_sequences
