"""Lower-layer hidden states of drafted tokens, reused by verification.

A drafter that runs the target's first layers (early_exit) has already computed a part of the
verification. The decoder records its last forwards over its first layers, and reuses them: its
kernels give a token the same bits in every forward. Any other forward or cache write invalidates
the record, and a node is reused only if its slot's tokens and the tokens on its path are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftahead.core import tree
from draftahead.kv.cache import KVCache


@dataclass(frozen=True)
class LowerLayerCache:
    """Nodes that the first `num_layers` layers were run over, behind B slots of the KV cache."""

    num_layers: int
    first_slot: int
    tokens_in: list[list[int]]  # [B] tokens that the slots held
    write_count: int  # of the KV cache
    tokens: list[list[int]]  # [B][N]
    parents: list[list[int]]  # [B][N]
    hidden: Tensor  # [B, N, H] after these layers, before any norm

    @property
    def num_nodes(self) -> int:
        return len(self.tokens[0])

    @staticmethod
    def to_extend(
        last: LowerLayerCache | None,
        num_layers: int,
        cache: KVCache,
        first_slot: int,
        num_cached: Sequence[int],
    ) -> LowerLayerCache | None:
        """The record to which a forward over the first layers behind `num_cached` entries adds:
        a new one if its nodes follow the slots' tokens, `last` if they continue its chains."""
        tokens_in = [list(cache.tokens_in[first_slot + b]) for b in range(len(num_cached))]
        if [len(tokens) for tokens in tokens_in] == list(num_cached):
            empty: list[list[int]] = [[] for _ in tokens_in]
            nothing = torch.empty(0, dtype=torch.float32, device="cpu")
            return LowerLayerCache(
                num_layers, first_slot, tokens_in, cache.write_count, empty, empty, nothing
            )
        if last is None or last.num_layers != num_layers:
            return None
        if not last._is_valid(cache, first_slot, len(tokens_in)):
            return None
        continues = [len(tokens) + last.num_nodes for tokens in tokens_in] == list(num_cached)
        return last if continues and all(map(tree.is_chain, last.parents)) else None

    def with_nodes(
        self, tokens: list[list[int]], parents: Sequence[Sequence[int]] | None, hidden: Tensor
    ) -> LowerLayerCache:
        """A copy with the nodes [B, M] of one more forward; `parents` index its own nodes."""
        count, parents = self.num_nodes, parents or _chains(tokens)
        return replace(
            self,
            tokens=[[*old, *new] for old, new in zip(self.tokens, tokens, strict=True)],
            parents=[
                [*old, *(count + parent for parent in new)]
                for old, new in zip(self.parents, parents, strict=True)
            ],
            hidden=torch.cat([self.hidden, hidden], 1) if count else hidden,
        )

    def find(
        self,
        cache: KVCache,
        first_slot: int,
        tokens: list[list[int]],
        parents: Sequence[Sequence[int]] | None,
    ) -> list[list[int]] | None:
        """For every node [B][M] of these trees the index of the recorded node with the same path,
        or -1. None if the record is invalid or has none of them."""
        if not self._is_valid(cache, first_slot, len(tokens)):
            return None
        parents = parents or _chains(tokens)
        found = [self._find(b, tokens[b], parents[b]) for b in range(len(tokens))]
        return found if any(index != -1 for one in found for index in one) else None

    def _find(self, b: int, tokens: list[int], parents: Sequence[int]) -> list[int]:
        recorded = zip(self.parents[b], self.tokens[b], strict=True)
        index_of = {node: index for index, node in enumerate(recorded)}  # by (parent, token)
        found: list[int] = []
        for token, parent in zip(tokens, parents, strict=True):
            parent_index = -1 if parent == -1 else found[parent]
            has_path = parent == -1 or parent_index != -1
            found.append(index_of.get((parent_index, token), -1) if has_path else -1)
        return found

    def _is_valid(self, cache: KVCache, first_slot: int, num_sequences: int) -> bool:
        tokens_in = cache.tokens_in[first_slot : first_slot + num_sequences]
        now = (first_slot, tokens_in, cache.write_count)
        return now == (self.first_slot, self.tokens_in, self.write_count)


def _chains(tokens: list[list[int]]) -> list[list[int]]:
    """The parents of trees without branches."""
    return [tree.chain(len(chain)) for chain in tokens]
