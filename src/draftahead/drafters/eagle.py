"""An EAGLE-3 head drafts from the target's own states (Li et al., arXiv 2503.01840).

Asked for a number of guesses, it draws a chain of so many. Left to itself it grows a tree as far as
its time pays.

The target's states of every token lie in the target's cache. The head keeps keys of its own for the
pairs of a state and the token after it, and makes up at each step for those it lacks: what the
target accepted is fed again with the target's true states, in place of what the head had imagined.
So it can be skipped, switched off or faulty for a while and still be right the next time.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftahead import attention, tree
from draftahead.drafters import Drafter, Setting, positive, register
from draftahead.errors import ConfigError
from draftahead.growth import DEEPEST, Grower, draw_chain
from draftahead.heads import eagle_files
from draftahead.heads.eagle import EagleHead
from draftahead.kvcache import CacheWindow, KVCache, LayerShape, Tenants
from draftahead.passes import PREFILL_CHUNK, CachedModel
from draftahead.runtime import build
from draftahead.runtime.linear import round_linears
from draftahead.sampling import placed, spread
from draftahead.types import Batch, Draft

AT_ONCE = 16  # pairs that a text may lack and still go with the others'


@register("eagle", synonyms=("eagle3",))
class Eagle(Drafter):
    def __init__(
        self, setting: Setting, *, model: Any = None, num_speculative_tokens: int | None = None
    ) -> None:
        self.guided = num_speculative_tokens is None
        self.count = positive("num_speculative_tokens", num_speculative_tokens, default=DEEPEST)
        self.grower = Grower(self.count)
        self.target = setting.own_passes("eagle")
        self.head = _head(model if model is not None else setting.head, self.target.model)
        self.target.watch(self.head.config.depths)
        nodes = self.grower.most_nodes if self.guided else 1 + self.count
        self.passes = HeadPasses(self.head, self.target, setting.max_batch, nodes)
        whole = len(self.head.tokens) == self.target.vocabulary
        self._spoken = None if whole else self.head.tokens

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Draft | None:
        able = [len(sequence.tokens) > 1 for sequence in batch.sequences]  # a root and one before
        rooms = [room if can else 0 for room, can in zip(batch.rooms, able, strict=True)]
        if not any(rooms):
            return None
        self.passes.catch_up(batch, able)
        logits = self.passes.logits()[:, 0]
        if self.guided:
            return self.grower.grow(batch, logits, self._expand, rooms, self._spoken)
        going = None if all(rooms) else torch.tensor([room > 0 for room in rooms])
        logits = self._spread(logits)
        draw_chain(batch, min(self.count, max(rooms)), logits, None, self._feed, going)
        return None  # the dice hold the draft

    def _expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.passes.go_on(tokens, parents)
        return self.passes.logits()

    def _feed(self, tokens: Tensor) -> tuple[Tensor, None]:
        self.passes.append(tokens)
        return self._spread(self.passes.logits()[:, -1]), None

    def _spread(self, logits: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        if self._spoken is None:
            return logits
        return spread(logits, self._spoken, self.target.vocabulary)


class HeadPasses:
    """Passes of a head over pairs of the text, and over nodes of a tree behind them."""

    def __init__(self, head: EagleHead, target: CachedModel, rows: int, nodes: int) -> None:
        self.head, self.target, self.device = head, target, target.device
        c = head.config.layer
        keys, width = int(c.num_key_value_heads), head.config.width
        shapes = [LayerShape(keys, width, keys, width)] * int(c.num_hidden_layers)
        length = target.max_context + nodes
        kind = head.norm.weight.dtype
        if target.device.type == "cpu" and build.library() is not None:
            round_linears(head.float())  # guesses may be rough: a quarter of the bytes to read
            kind = torch.float32
        self.cache = KVCache(shapes, rows, length, kind, target.device)
        self._tenants = Tenants(self.cache)
        own = getattr(head, "embed_tokens", None)
        self._embed = target.model.get_input_embeddings() if own is None else own
        # Of the trees under way: nodes so far, what became of them, and where their roots lie.
        self._tokens: list[list[int]] = []
        self._parents: list[list[int]] = []
        self._outputs = torch.empty(0)  # [B, N, H]
        self._logits = torch.empty(0)  # [B, N, D]
        self._roots: list[int] = []

    def logits(self) -> Tensor:
        """After every node, [B, N, D]."""
        return self._logits

    # ------------------------------------------------------------------------- pairs of the text

    def catch_up(self, batch: Batch, able: list[bool]) -> None:
        """Feeds every row the pairs that it lacks, its last one at least: that of the root."""
        cache, pending = self.cache, []
        for row, sequence in enumerate(batch.sequences):
            self._tenants.place(sequence.id, row)
            tokens = sequence.tokens if able[row] else [0, 0]
            known = min(cache.matched(row, tokens[1:]), len(tokens) - 2)
            del cache.contents[row][known:]
            if len(tokens) - 1 - known > AT_ONCE:
                self._read(row, tokens)
            pending.append(tokens[1 + len(cache.contents[row]) :])
        width = max(map(len, pending))
        block = [tokens + [0] * (width - len(tokens)) for tokens in pending]
        held = [len(row) for row in cache.contents[: len(pending)]]
        out = self._pairs(0, torch.tensor(block), held)
        for row, tokens in enumerate(pending):
            cache.contents[row].extend(tokens)
        self._roots = [len(row) - 1 for row in cache.contents[: len(pending)]]
        last = placed([[len(tokens) - 1] for tokens in pending], torch.int64, self.device)
        self._outputs = out[torch.arange(len(pending), device=self.device)[:, None], last]
        self._logits = self.head.logits(self._outputs)
        self._tokens, self._parents = [[-1]] * len(pending), [[-1]] * len(pending)

    def _read(self, row: int, tokens: list[int]) -> None:
        """A new text, or many steps without this drafter: all pairs but the last few."""
        held = self.cache.contents[row]
        end = len(tokens) - 2
        while len(held) < end:
            part = tokens[1 + len(held) : 1 + min(end, len(held) + PREFILL_CHUNK)]
            self._pairs(row, torch.tensor([part]), [len(held)], wanted=1)
            held.extend(part)

    def _pairs(
        self, first: int, tokens: Tensor, held: list[int], wanted: int | None = None
    ) -> Tensor:
        """Tokens [B, N] of rows from `first` on, each beside the target's state before it."""
        texts, width = tokens.shape
        lengths = placed(held, torch.int64, self.device)
        slots = lengths[:, None] + torch.arange(width, device=self.device)
        rows = torch.arange(first, first + texts, device=self.device)
        states = self.target.states(self.head.config.depths, rows, slots)
        depths = torch.arange(width, device=self.device).expand(texts, width)
        mask = attention.distances(lengths, depths, None, max(held) + width)
        features = self.head.feature(states.to(self.cache.keys[0].dtype))
        return self._run(first, tokens, features, slots, slots, mask, wanted)

    # ------------------------------------------------------------------------- nodes of the trees

    def go_on(self, tokens: Tensor, parents: Tensor) -> None:
        """Nodes [B, N] of trees, of which those that were there before need not be computed."""
        said, above = tokens.tolist(), parents.tolist()
        old = len(self._tokens[0])
        known = min(
            next((i for i in range(1, old) if (t[i], p[i]) != (u[i], q[i])), old)
            for t, p, u, q in zip(said, above, self._tokens, self._parents, strict=True)
        )
        self._nodes(tokens, above, known)
        self._tokens, self._parents = said, above

    def append(self, tokens: Tensor) -> None:
        """One more node [B] of every chain; it may still be under way on a device."""
        old = self._outputs.shape[1]
        chain = list(range(-1, old))
        block = torch.zeros(len(tokens), old + 1, dtype=torch.int64, device=self.device)
        block[:, -1] = tokens
        self._nodes(block, [chain] * len(tokens), old)

    def _nodes(self, tokens: Tensor, above: list[list[int]], known: int) -> None:
        texts, width = tokens.shape
        roots = placed(self._roots, torch.int64, self.device)
        depths = placed([tree.depths(row) for row in above], torch.int64, self.device)
        parents = placed(above, torch.int64, self.device)
        places = torch.arange(known, width, device=self.device)
        slots = roots[:, None] + places
        live = max(self._roots) + width
        mask = attention.distances(roots, depths, tree.ancestors(parents), live)[:, :, known:]
        outputs, logits = self._outputs[:, :known], self._logits[:, :known]
        # A node's parent may be new itself where a batch's trees grew unevenly: level by level.
        start = known
        while start < width:
            end = start + 1
            while end < width and all(row[end] < start for row in above):
                end += 1
            rows = torch.arange(texts, device=self.device)[:, None]
            hidden = outputs[rows, parents[:, start:end]]
            part = slice(start - known, end - known)
            at = (roots[:, None] + depths)[:, start:end]
            new = self._run(0, tokens[:, start:end], hidden, at, slots[:, part], mask[:, :, part])
            outputs = torch.cat([outputs, new], 1)
            logits = torch.cat([logits, self.head.logits(new)], 1)
            start = end
        self._outputs, self._logits = outputs, logits

    def _run(
        self,
        first: int,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        wanted: int | None = None,
    ) -> Tensor:
        window = CacheWindow(self.cache, first, slots, mask.shape[-1], real=0)
        seen = mask if wanted is None else mask[:, :, -wanted:]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = window.update(key, value, layer)
            rows = seen if query.shape[2] == seen.shape[2] else mask
            mixed, _ = attention.grouped_attention(self.head, query, keys, values, rows)
            return mixed.transpose(1, 2)

        embedded = self._embed(tokens.to(self.device)).to(hidden.dtype)
        found: Tensor = self.head(embedded, hidden, positions, attend, wanted)
        return found


def _head(wanted: Any, target: Any) -> EagleHead:
    if wanted is None:
        raise ConfigError("drafter 'eagle' needs 'model': the folder, file or hub id of its head")
    if isinstance(wanted, str | Path):
        return eagle_files.load(wanted, target)
    if not isinstance(wanted, EagleHead):
        raise ConfigError(f"drafter 'eagle': {wanted!r} is no EAGLE head and no path of one")
    eagle_files.check_fits(wanted.config, target, "this head")
    return copy.deepcopy(wanted)  # it will be changed
