"""What the lower layers made of drafted nodes, so that the pass that verifies them need not do it
again. Only for kernels that give a token the same bits in every pass.

Nobody is taken at his word for it. A decoder notes by itself what its last passes over the lower
layers were about; any other pass, and anything that happens to the rows, makes that void; and a
node counts as the same only if the text before it and the tokens on its path are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftahead.kv.cache import KVCache


@dataclass(frozen=True)
class LowerLayerCache:
    layers: int
    first: int  # row of the cache
    texts: list[list[int]]  # that the rows held
    version: int  # of the cache, until then
    tokens: list[list[int]]  # of the nodes behind them
    parents: list[list[int]]
    states: Tensor  # [B, N, H] after these layers, before any norm

    @property
    def nodes(self) -> int:
        return len(self.tokens[0])

    @staticmethod
    def before(
        last: LowerLayerCache | None,
        layers: int,
        cache: KVCache,
        first: int,
        lengths: Sequence[int],
    ) -> LowerLayerCache | None:
        """What a pass behind so many slots goes on from: nothing, behind the rows' texts; the nodes
        of the last passes, where it follows them as a chain; None if it does neither."""
        texts = [list(cache.tokens_in[first + row]) for row in range(len(lengths))]
        held = [len(text) for text in texts]
        if held == list(lengths):
            none: list[list[int]] = [[] for _ in texts]
            return LowerLayerCache(layers, first, texts, cache.version, none, none, torch.empty(0))
        if last is None or last.layers != layers or not last._is_of(cache, first, len(texts)):
            return None
        chain = list(range(-1, last.nodes - 1))
        follows = [length + last.nodes for length in held] == list(lengths)
        return last if follows and all(row == chain for row in last.parents) else None

    def and_then(
        self, tokens: list[list[int]], parents: Sequence[Sequence[int]], states: Tensor
    ) -> LowerLayerCache:
        """With the nodes of one more pass."""
        count = self.nodes
        return replace(
            self,
            tokens=[[*a, *b] for a, b in zip(self.tokens, tokens, strict=True)],
            parents=[
                [*a, *(count + parent for parent in b)]
                for a, b in zip(self.parents, parents, strict=True)
            ],
            states=torch.cat([self.states, states], 1) if count else states,
        )

    def places(
        self, cache: KVCache, first: int, tokens: list[list[int]], parents: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """For every node of these trees which node here it is, or -1; None if none is."""
        if not self._is_of(cache, first, len(tokens)):
            return None
        found = [self._row(row, tokens[row], parents[row]) for row in range(len(tokens))]
        return found if any(at != -1 for row in found for at in row) else None

    def _row(self, row: int, tokens: list[int], parents: Sequence[int]) -> list[int]:
        own = zip(self.parents[row], self.tokens[row], strict=True)
        known = {node: place for place, node in enumerate(own)}  # (parent, token)
        found: list[int] = []
        for token, parent in zip(tokens, parents, strict=True):
            above = -1 if parent == -1 else found[parent]
            is_known = parent == -1 or above != -1
            found.append(known.get((above, token), -1) if is_known else -1)
        return found

    def _is_of(self, cache: KVCache, first: int, rows: int) -> bool:
        held = cache.tokens_in[first : first + rows]
        return (first, held, cache.version) == (self.first, self.texts, self.version)
