"""Texts and nodes of no use that go along on a GPU.

A pass is recorded for every number of texts and of nodes, and costs as much for a few as for one.
Texts end one by one, and drafts are of all sizes: so both are rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from draftahead.backends.base import DeviceTree
from draftahead.backends.cuda.layers import power_of_two
from draftahead.core.device import device_of
from draftahead.kv.cache import KVCache

ALONE = 8  # texts up to which every number of them is recorded; beyond, multiples
MOST_NODES = 64  # that are rounded up


class Padding(NamedTuple):
    """What they write lies behind what their rows hold."""

    texts: int = 0
    nodes: int = 0

    @staticmethod
    def of(cache: KVCache, first: int, held: Sequence[int], nodes: int, *, fixed: bool) -> Padding:
        """For a pass over so many nodes of rows from `first` on, that hold so many tokens; `fixed`:
        their number is as it is."""
        if not device_of(cache.keys[0].device).is_gpu:
            return Padding()
        texts, more = len(held), 0 if fixed or nodes > MOST_NODES else power_of_two(nodes) - nodes
        if max(held) + nodes + more > cache.num_entries:
            more = 0
        extra = -texts % ALONE if texts > ALONE else 0
        idle = cache.tokens_in[first + texts : first + texts + extra]
        fits = all(len(row) + nodes + more <= cache.num_entries for row in idle)
        return Padding(extra if len(idle) == extra and fits else 0, more)

    def size(self, texts: int, nodes: int) -> tuple[int, int]:
        return texts + self.texts, nodes + self.nodes

    def tokens(self, tokens: Tensor) -> Tensor:
        return F.pad(tokens, (0, self.nodes, 0, self.texts)) if any(self) else tokens

    def parents(self, parents: Tensor | DeviceTree | None) -> list[list[int]] | DeviceTree | None:
        """As lists, where they are known. Nodes of no use hang below the root."""
        if parents is None or isinstance(parents, DeviceTree):
            return parents.and_idle(self.texts) if parents and self.texts else parents
        above: list[list[int]] = parents.tolist()
        above = [row + [0] * self.nodes for row in above]
        return above + above[:1] * self.texts
