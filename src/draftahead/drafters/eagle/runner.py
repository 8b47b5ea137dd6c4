"""Passes of an EAGLE head: over pairs of the text, and over nodes of a tree behind them.

A pair is a state of the target and the token after it. Pair j of a text holds the state of token j,
lies in slot j of the head's own cache, and says what comes after token j + 1. The last pair is that
of the text's root. Nodes of a tree follow in the slots behind it; they hold outputs of the head in
place of states, and are forgotten at the next step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftahead.backends.cpu import build
from draftahead.backends.cpu.linear import quantize_linears
from draftahead.backends.cuda.hf_graph import GraphedPrefill
from draftahead.backends.cuda.timing import TimerCache
from draftahead.core import tree
from draftahead.core.device import device_of, small_tensor
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch, SequenceState
from draftahead.drafters.eagle.cpu import (
    MissingInputs,
    TreeOptions,
    can_build_trees,
    cpu_eagle_head,
)
from draftahead.drafters.eagle.cuda import CudaEagleHead, Plan, gpu_kernels
from draftahead.drafters.eagle.head import EagleHead
from draftahead.drafters.eagle.spec import InputProjection, head_spec, input_projection
from draftahead.drafters.tree_builder import CHILDREN, MIN_CONFIDENCE, TreeBuilder
from draftahead.kv import attention
from draftahead.kv.cache import CacheView, KVCache, LayerKVShape, SlotOwners, slots_from
from draftahead.models.runner import PREFILL_CHUNK, ModelRunner
from draftahead.sampling.noise import NodeContext, target_rng_key

AT_ONCE = 16  # pairs that a text may lack and still go with the others'
CPU_CHUNK = 64  # pairs of a pass by our kernels


class EagleRunner:
    def __init__(self, head: EagleHead, target: ModelRunner, rows: int, nodes: int) -> None:
        """`nodes`: of the largest tree."""
        self.head, self.target, self.device = head, target, target.device
        c = head.config.layer
        keys, width = int(c.num_key_value_heads), head.config.width
        shapes = [LayerKVShape(keys, width, keys, width)] * int(c.num_hidden_layers)
        is_rounded = device_of(self.device).is_cpu and build.library() is not None
        if is_rounded:
            quantize_linears(head.float())  # guesses may be rough: a quarter of the bytes to read
        kind = head.norm.weight.dtype
        length = target.max_context + max(nodes, 2 * AT_ONCE)  # a pass may be padded
        self.cache = KVCache(shapes, rows, length, kind, self.device)
        spec = head_spec(head)
        self._kernels = cpu_eagle_head(head, spec, self.cache) if is_rounded else None
        self._tenants = SlotOwners(self.cache)
        own = getattr(head, "embed_tokens", None)
        self._embed = target.model.get_input_embeddings() if own is None else own
        places = torch.arange(length, device=self.device)[None]
        turns = head.rotary(head.norm.weight[None], places)
        self._turns = [turn[0].contiguous() for turn in turns]  # [length, width]
        embed: Any = self._embed
        whole = len(head.tokens) == target.vocab_size
        self._gpu: CudaEagleHead | None = None
        self._times = TimerCache(self.device)
        self._fill: GraphedPrefill | None = None
        self._states = target.cache.hidden  # that it was recorded with
        self._last = length - 1  # position that padding may point to
        if device_of(self.device).is_gpu:
            self._gpu = gpu_kernels(head, spec, self.cache, embed, self._turns, whole)
            self._fill = GraphedPrefill("the head", self._fill_pass, self.cache)
        self._entrance: InputProjection | None = None
        if self._kernels is not None:
            projection = input_projection(head, embed, whole)
            self._entrance = projection if can_build_trees(projection) else None
        # Of the trees under way: their nodes, what became of them, and where their roots lie.
        self._tokens: list[list[int]] = []
        self._above: list[list[int]] = []
        self._roots: list[int] = []
        self._outputs = torch.empty(0)  # [B, N, H]
        self.logits = torch.empty(0)  # [B, N, D] after every node

    # ------------------------------------------------------------------------- pairs of the text

    def catch_up(self, sequences: tuple[SequenceState, ...], able: list[bool]) -> None:
        """Feeds every row the pairs that it lacks, its last one at least: the root of a tree."""
        held, pending = self.cache.tokens_in, self._lacking(sequences, able, AT_ONCE)
        width, count = max(map(len, pending)), len(pending)
        block = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in pending])
        outputs, logits = self._pairs(0, block, [len(row) for row in held[:count]])
        for row, tokens in enumerate(pending):
            held[row].extend(tokens)
        self._roots = [len(row) - 1 for row in held[:count]]
        if all(len(tokens) == width for tokens in pending):
            self._outputs, self.logits = outputs[:, -1:], logits[:, -1:]
        else:
            last = small_tensor([[len(tokens) - 1] for tokens in pending], torch.int64, self.device)
            rows = torch.arange(count, device=self.device)[:, None]
            self._outputs, self.logits = outputs[rows, last], logits[rows, last]
        self._tokens, self._above = [[-1]] * count, [[-1]] * count

    def _lacking(
        self, sequences: tuple[SequenceState, ...], able: list[bool], at_once: int
    ) -> list[list[int]]:
        """The pairs' tokens that every row lacks, so many at most and its last at least. Rows that
        are not able have none, and get some nonsense."""
        held, pending = self.cache.tokens_in, []
        for row, sequence in enumerate(sequences):
            is_own = self._tenants.place(sequence.id, row)
            tokens = sequence.tokens if able[row] else [0, 0]
            # A text only grows: what is its own needs no second look.
            same = is_own and able[row]
            matched = len(held[row]) if same else self.cache.matching_prefix(row, tokens[1:])
            known = min(matched, len(tokens) - 2)
            del held[row][known:]
            if len(tokens) - 1 - known > at_once:
                self._read(row, tokens)
            pending.append(tokens[1 + len(held[row]) :])
        return pending

    def _read(self, row: int, tokens: list[int]) -> None:
        """A new text, or many steps without this drafter: the keys of all pairs but the last."""
        held, end = self.cache.tokens_in[row], len(tokens) - 2
        chunk = PREFILL_CHUNK if self._kernels is None else CPU_CHUNK
        self.target.cache.flush()
        if self._fill is not None and self._states is not self.target.cache.hidden:
            self._fill.graphs.forget()  # others lie elsewhere
            self._states = self.target.cache.hidden
        while len(held) < end:
            part = tokens[1 + len(held) : 1 + min(end, len(held) + chunk)]
            if self._fill is None or not self._fill.run(row, part, len(held), self._last):
                self._pairs(row, torch.tensor([part]), [len(held)], keys_only=True)
            held.extend(part)

    def _fill_pass(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, window: CacheView, _: bool
    ) -> Tensor:
        """The keys of pairs that a device knows the place of."""
        rows = slots_from(window.first_slot, window.entries)
        # Padding may reach beyond what the target has; nobody reads what comes of it.
        slots = window.entries.clamp(max=self.target.cache.num_entries - 1)
        states = self.target.hidden_states(self.head.config.depths, rows, slots)
        features = self.head.feature(states.to(self.cache.keys[0].dtype))
        embedded = self._embed(tokens).to(features.dtype)
        return self._forward(embedded, features, positions, mask, window, wanted=1)

    def _pairs(
        self, first: int, tokens: Tensor, held: list[int], *, keys_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, N] of rows from `first` on, each beside the target's state before it."""
        texts, width = tokens.shape
        lengths = small_tensor(held, torch.int64, self.device)
        slots = lengths[:, None] + torch.arange(width, device=self.device)
        rows = torch.arange(first, first + texts, device=self.device)
        states = self.target.hidden_states(self.head.config.depths, rows, slots)
        features = self.head.feature(states.to(self.cache.keys[0].dtype))
        chains = [list(range(-1, width - 1))] * texts
        return self._run(first, tokens, features, held, chains, range(width), keys_only)

    # ----------------------------------------------------------------------- nodes of the trees

    def go_on(self, tokens: Tensor, parents: Tensor) -> None:
        """Nodes [B, N] of trees; those that were there before are not computed again."""
        said, above = tokens.tolist(), parents.tolist()
        old = len(self._tokens[0])
        known = min(
            next((i for i in range(1, old) if (t[i], p[i]) != (u[i], q[i])), old)
            for t, p, u, q in zip(said, above, self._tokens, self._above, strict=True)
        )
        self._nodes(tokens, above, known)
        self._tokens, self._above = said, above

    def append(self, tokens: Tensor) -> None:
        """One more node [B] of every chain; it may still be under way on a device."""
        old = self._outputs.shape[1]
        block = torch.zeros(len(tokens), old + 1, dtype=torch.int64, device=tokens.device)
        block[:, -1] = tokens
        self._nodes(block, [list(range(-1, old))] * len(tokens), old)

    def _nodes(self, tokens: Tensor, above: list[list[int]], known: int) -> None:
        texts, width = tokens.shape
        rows = torch.arange(texts, device=self.device)[:, None]
        outputs, logits = self._outputs[:, :known], self.logits[:, :known]
        # A node's parent may be new itself where a batch's trees grew unevenly: level by level.
        start = known
        while start < width:
            end = start + 1
            while end < width and all(row[end] < start for row in above):
                end += 1
            parents = small_tensor([row[start:end] for row in above], torch.int64, self.device)
            part = tokens[:, start:end]
            hidden = outputs[rows, parents]
            new, said = self._run(0, part, hidden, self._roots, above, range(start, end))
            outputs, logits = torch.cat([outputs, new], 1), torch.cat([logits, said], 1)
            start = end
        self._outputs, self.logits = outputs, logits

    @property
    def drafts_on_device(self) -> bool:
        return self._gpu is not None and self._gpu.graphs.works

    def ahead(self, batch: Batch, able: list[bool], plan: Plan) -> DeviceDraft | None:
        """Trees that a GPU grows without being waited for: after the pairs that are lacking, in one
        go. None where it cannot; then nothing has been fed."""
        gpu, texts = self._gpu, len(batch.sequences)
        states = self.target.cache.hidden
        assert gpu is not None and states is not None
        most = min(AT_ONCE, gpu.most_pairs(texts))
        held, pending = self.cache.tokens_in, self._lacking(batch.sequences, able, most)
        keys, warmth = [], []
        if plan.sampled:
            for sequence in batch.sequences:
                warmth.append(sequence.params.temperature or 0.0)
                paths = (NodeContext(sequence, (0,) * depth) for depth in range(plan.deepest))
                keys.append([target_rng_key(context) for context in paths])
                sequence.target_noise_used = True  # as by Dice.outlook, which guesses the same way
        clock = self._times.clock((texts, plan))
        trees = gpu.grow(
            pending,
            [len(row) for row in held[:texts]],
            [self._slots(row, tokens) for row, tokens in enumerate(pending)],
            states,
            self.target.captured_index(self.head.config.depths),
            plan,
            clock=clock,
            keys=keys,
            warmth=warmth,
        )
        if trees is None:
            return None
        for row, tokens in enumerate(pending):
            held[row].extend(tokens)
        return DeviceDraft.of_trees(batch.roots, trees, clock)

    def _slots(self, row: int, tokens: list[int]) -> list[int]:
        """Where the target's states before these next tokens of a row lie."""
        start, cache = len(self.cache.tokens_in[row]), self.target.cache
        return [cache.physical_entry(row, slot) for slot in range(start, start + len(tokens))]

    def can_draft_on_device(self, batch: Batch, plan: Plan) -> bool:
        """Whether `ahead` may be tried: nothing but the path's length decides what is likely."""
        if self._gpu is None or any(s.has_processors for s in batch.sequences):
            return False
        return self._gpu.takes(len(batch.sequences), plan)

    def grown(
        self, batch: Batch, able: list[bool], grower: TreeBuilder, max_depths: list[int]
    ) -> Draft | None:
        """What `catch_up` feeds and `grower` would grow then, in one call of our kernels; for
        greedy texts without processors, whose guesses depend on the logits alone."""
        states = self.target.cache.hidden
        assert self._kernels is not None and self._entrance is not None and states is not None
        most = min(AT_ONCE, CPU_CHUNK // len(batch.sequences))
        held, pending = self.cache.tokens_in, self._lacking(batch.sequences, able, most)
        self.target.cache.flush()
        found = self._kernels.build_trees(
            self._entrance,
            (self._turns[0], self._turns[1]),
            MissingInputs(states, self.target.captured_index(self.head.config.depths), pending),
            root_entries=[len(held[row]) + len(tokens) - 1 for row, tokens in enumerate(pending)],
            max_depths=max_depths,
            options=TreeOptions(
                max_levels=grower.max_depth,
                nodes_per_level=grower.expanded_per_level,
                num_children=CHILDREN,
                min_confidence=MIN_CONFIDENCE,
                min_level_confidence=grower.needed_confidence(batch),
            ),
        )
        for row, tokens in enumerate(pending):
            held[row].extend(tokens)
        if found.levels:
            grower.note_level(found.seconds / found.levels)
        if found.levels < grower.max_depth - 1:
            grower.note_stop()
        if not any(found.trees):
            return None
        return Draft.trees(batch.roots, found.trees, found.confidence)

    def grows(self, batch: Batch, grower: TreeBuilder) -> bool:
        """Whether `grown` can do it."""
        plain = all(s.params.is_greedy and not s.has_processors for s in batch.sequences)
        nodes, states = len(batch.sequences) * grower.expanded_per_level, self.target.cache.hidden
        read = states is not None and states.dtype == torch.float32
        return read and plain and self._entrance is not None and nodes <= CPU_CHUNK

    # ---------------------------------------------------------------------------------- the pass

    def _run(
        self,
        first: int,
        tokens: Tensor,
        hidden: Tensor,
        bases: list[int],
        above: list[list[int]],
        which: range,
        keys_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Nodes [B, N] beside states or outputs [B, N, H]; they are `which` of blocks that begin in
        slots `bases` of the rows from `first` on. Returns outputs, and logits [B, N, D]."""
        embedded = self._embed(tokens.to(self.device)).to(hidden.dtype)
        depths = [tree.depths(row) for row in above]
        texts, nodes = tokens.shape
        if self._kernels is not None and self._kernels.supports(texts, nodes, len(above[0])):
            at = [[base + row[i] for i in which] for base, row in zip(bases, depths, strict=True)]
            seen, x = self.head.layers[0].entrance(embedded, hidden)  # type: ignore[operator]
            x = x.clone(memory_format=torch.contiguous_format)
            cos, sin = (turn[torch.tensor(at)] for turn in self._turns)
            logits = self._kernels.forward(
                x,
                seen.contiguous(),
                (cos, sin),
                first_slot=first,
                kv_lens=bases,
                depths=depths,
                ancestors=[tree.ancestor_bits(row) for row in above],
                tree_nodes=None if len(which) == len(above[0]) else [list(which)] * len(above),
                kv_only=keys_only,
            )
            return (self.head.norm(x) if self.head.config.norm_output else x), logits
        base = small_tensor(bases, torch.int64, self.device)
        deep = small_tensor(depths, torch.int64, self.device)
        places = slice(which.start, which.stop)
        chain = list(range(-1, which.stop - 1))
        is_chain = which.start == 0 and all(row == chain for row in above)
        # To follow parents up takes a device one step after the other.
        known = None if is_chain else small_tensor(above, torch.int64, self.device)
        ancestors = None if known is None else tree.ancestors(known)
        live = max(bases) + which.stop
        mask = attention.distances(base, deep, ancestors, live)[:, :, places]
        slots = base[:, None] + torch.arange(which.start, which.stop, device=self.device)
        window = CacheView(self.cache, first, slots, live, 0)
        positions = (base[:, None] + deep)[:, places]
        wanted = 1 if keys_only else len(which)
        out = self._forward(embedded, hidden, positions, mask, window, wanted)
        return out, out if keys_only else self.head.logits(out)

    def _forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        window: CacheView,
        wanted: int,
    ) -> Tensor:
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = window.update(key, value, layer)
            seen = mask[:, :, -query.shape[2] :]
            mixed, _ = attention.grouped_attention(self.head, query, keys, values, seen)
            return mixed.transpose(1, 2)

        return self.head(embedded, hidden, positions, attend, wanted)  # type: ignore[no-any-return]
