"""The static key-value cache: fixed tensors, a length a row, rollback by moving a pointer.

Row i of every tensor belongs to row i of the batch. A pass writes the keys of its N nodes into
the N slots after a row's length; only those of the accepted path then count. What lies behind a
row's length is garbage that no mask lets through, and that the next pass overwrites.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from draftahead.errors import CacheMemoryError
from draftahead.sampling.noise import small_tensor

ALIGNED = 64  # bytes, for vectors that are loaded whole


class LayerKVShape(NamedTuple):
    """What one layer stores for one token. Keys and values may differ (DeepSeek's latents)."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int


class KVCache:
    def __init__(
        self,
        shapes: Sequence[LayerKVShape],
        rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes, self.rows, self.length = tuple(shapes), rows, length
        per_token = sum(s.key_heads * s.key_width + s.value_heads * s.value_width for s in shapes)
        self.bytes = per_token * dtype.itemsize * rows * length
        _check_memory(self.bytes, rows, length, device)

        # (heads, width) of keys and values, layer by layer. Those alike are parts of one tensor:
        # what moves in all layers moves at once.
        self._sizes = [size for s in shapes for size in (s[:2], s[2:])]
        counts = Counter(self._sizes)
        self._stacks = {
            (heads, width): _zeros((count, rows, heads, length, width), dtype, device)
            for (heads, width), count in counts.items()
        }
        parts = {size: iter(stack) for size, stack in self._stacks.items()}
        each = [next(parts[size]) for size in self._sizes]
        self.keys, self.values = each[::2], each[1::2]
        # [rows, 1, slots, watched * hidden]: what tokens were between the layers, for drafters that
        # go by it. It lies beside the keys, and goes wherever they go.
        self.states: Tensor | None = None
        # The tokens whose keys each row holds, from slot 0: its length and what it can be
        # reused for.
        self.tokens_in: list[list[int]] = [[] for _ in range(rows)]
        self.version = 0  # of what lies in the slots, other than by passes
        self.far = [False] * rows  # which frequencies rotated a row's keys: see passes.py
        # A quicker way to move (row, to, from) of all that is stored; False where it cannot. Where
        # there is one, what is kept stays where it lies, (row, to) -> from, until someone looks.
        self.mover: Callable[[Sequence[tuple[int, int, int]]], bool] | None = None
        self._unmoved: dict[tuple[int, int], int] = {}

    def watch(self, width: int) -> None:
        """Makes room for so many numbers a token, of the states that passes leave."""
        like = self.keys[0]
        _check_memory(
            self.rows * self.length * width * like.element_size(),
            self.rows,
            self.length,
            like.device,
        )
        self.states = _zeros((self.rows, 1, self.length, width), like.dtype, like.device)
        self.tokens_in = [[] for _ in range(self.rows)]  # nothing is known of what they hold

    def store(self, states: Tensor, first: int | Tensor, slots: Tensor) -> None:
        """States [B, N, W, H] of nodes that lie in `slots` [B, N] of rows [first, first + B)."""
        assert self.states is not None
        rows = slots_from(first, slots)
        self.states[rows[:, None], 0, slots] = states.flatten(2).to(self.states.dtype)

    def stored(self, layers: int | None = None) -> list[Tensor]:
        """Tensors [parts, rows, heads, slots, width]: all that is stored, or the keys and values of
        the first few layers."""
        self.settle()
        if layers is not None:
            counts = Counter(self._sizes[: 2 * layers])
            return [self._stacks[size][:count] for size, count in counts.items()]
        states = [] if self.states is None else [self.states[None]]
        return [*self._stacks.values(), *states]

    def matched(self, row: int, tokens: Sequence[int]) -> int:
        """How many of `tokens` the row already holds, from the first on."""
        held = self.tokens_in[row]
        count = min(len(held), len(tokens))
        if held[:count] == list(tokens[:count]):
            return count
        return next(i for i in range(count) if held[i] != tokens[i])

    def keep(
        self, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], first: int = 0
    ) -> None:
        """Keeps the nodes of a path (from the root, node 0) a row, rows from `first` on, out of the
        last pass over them.

        For a chain the kept keys already lie where they belong; a tree's are moved up.
        """
        self.move(
            [
                (row, to, node)
                for row, path in enumerate(paths, first)
                for to, node in enumerate(path)
                if to != node
            ]
        )
        if self.mover is None:
            self.settle()
        for row, new in enumerate(tokens, first):
            self.tokens_in[row].extend(new)

    def move(self, moved: Sequence[tuple[int, int, int]], layers: int | None = None) -> None:
        """Nodes (row, to, from) behind the row's length, all of what is stored for them or the keys
        of the first few layers."""
        self.settle()
        self.version += 1
        lengths = [len(held) for held in self.tokens_in]
        slots = {(row, lengths[row] + to): lengths[row] + node for row, to, node in moved}
        if layers is None:
            self._unmoved = slots
        elif slots:
            self._move(slots, layers)

    def physical_entry(self, row: int, slot: int) -> int:
        """Where what belongs in a slot lies now."""
        return self._unmoved.get((row, slot), slot)

    def settle(self) -> None:
        """Moves what is not where it belongs, before somebody looks. If that is interrupted, nobody
        knows what moved, and the rows hold these tokens no longer."""
        if self._unmoved:
            slots, self._unmoved = self._unmoved, {}
            try:
                self._move(slots, None)
            except BaseException:
                for row, to in slots:
                    del self.tokens_in[row][to:]
                raise

    def _move(self, slots: dict[tuple[int, int], int], layers: int | None) -> None:
        moves = [(row, to, come) for (row, to), come in slots.items()]
        if layers is None and self.mover is not None and self.mover(moves):
            return
        rows, to, come = small_tensor(
            list(zip(*moves, strict=True)), torch.int64, self.keys[0].device
        )
        compact(self.stored(layers), rows, to, come)

    def copy_slot(self, source: int, to: int) -> None:
        """Row `to` holds what row `source` holds."""
        if source == to:
            return
        self.version += 1
        held = len(self.tokens_in[source])
        for stored in self.stored():
            stored[:, to, :, :held] = stored[:, source, :, :held]
        self.tokens_in[to] = list(self.tokens_in[source])
        self.far[to] = self.far[source]

    def clear_slot(self, row: int) -> None:
        """Forgets a row whose keys may not be finite: nothing of it may stay behind a mask."""
        self.version += 1
        for stored in self.stored():
            stored[:, row] = 0
        self.tokens_in[row].clear()

    def swap_slots(self, one: int, other: int) -> None:
        if one == other:
            return
        self.version += 1
        held = max(len(self.tokens_in[one]), len(self.tokens_in[other]))
        for stored in self.stored():
            spare = stored[:, one, :, :held].clone()
            stored[:, one, :, :held] = stored[:, other, :, :held]
            stored[:, other, :, :held] = spare
        tokens_in, far = self.tokens_in, self.far
        tokens_in[one], tokens_in[other] = tokens_in[other], tokens_in[one]
        far[one], far[other] = far[other], far[one]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not garbage: a masked NaN would still poison a sum (0 * NaN). On a CPU they take
    memory where something is written, and not before: few texts fill their context."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    needed = math.prod(size) * dtype.itemsize
    block = np.zeros(needed + ALIGNED, np.uint8)
    start = -block.ctypes.data % ALIGNED
    return torch.from_numpy(block[start : start + needed]).view(dtype).view(size)


def compact(stored: Sequence[Tensor], rows: Tensor, to: Tensor, come: Tensor) -> None:
    """Slots [M] of rows [M] become what other slots are, in all parts of these tensors."""
    for tensor in stored:
        tensor[:, rows, :, to] = tensor[:, rows, :, come]


class SlotOwners:
    """Which sequence each row of a drafter's own cache is for. Rows follow the batch: what another
    row holds for a sequence comes along."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.sequences = [-1] * cache.rows

    def place(self, sequence: int, row: int) -> bool:
        """Whether what the row holds now is of this sequence, and not of another before it."""
        rows = self.sequences
        if rows[row] == sequence:
            return True
        known = sequence in rows
        if known:
            at = rows.index(sequence)
            self._cache.swap_slots(at, row)
            rows[at] = rows[row]
        rows[row] = sequence
        return known


def slots_from(first: int | Tensor, slots: Tensor) -> Tensor:
    """Rows [B] from the first on, unless they are given one by one."""
    if isinstance(first, Tensor):
        return first
    return torch.arange(first, first + len(slots), device=slots.device)


class LayerCacheView:
    """One layer of the cache as one pass sees it: rows [first, first + B), slots [0, live).

    Stands in for transformers' Cache object, of which a layer needs only these methods.
    """

    is_compileable = False

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        first: int | Tensor,
        slots: Tensor,
        live: int,
        guesses: Tensor,
    ) -> None:
        self.keys, self.values, self.first, self.live = keys, values, first, live
        self.slots = slots  # [B, N], where the new keys go
        self.guesses = guesses  # [N, 1, 1] or [B, N, 1, 1]: which nodes are no part of a text

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        rows = slots_from(self.first, self.slots)
        for stored, new in (
            (self.keys, key.transpose(1, 2)),
            (self.values, value.transpose(1, 2)),
        ):
            # A guess may overflow (half precision) and is then rejected, but behind the mask its
            # NaN would still reach the other nodes of the row: 0 * NaN. So that of a guess is not
            # stored. That of the text itself is: it is the target's own, and must show.
            clean = new.nan_to_num(0.0, 0.0, 0.0)
            stored[rows[:, None], :, self.slots] = clean.where(self.guesses, new)
        held = self.keys[:, :, : self.live], self.values[:, :, : self.live]
        if isinstance(self.first, Tensor):
            return held[0].index_select(0, rows), held[1].index_select(0, rows)
        part = slice(self.first, self.first + len(self.slots))
        return held[0][part], held[1][part]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions come with the call

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.live, 0


class CacheView:
    """All layers of the cache as one pass sees them."""

    is_compileable = False

    def __init__(
        self,
        cache: KVCache,
        first: int | Tensor,
        slots: Tensor,
        live: int,
        real: int | Tensor | Sequence[int],
    ) -> None:
        """`first`: the first row, or [B] all of them where only the device knows. `real`: nodes
        that belong to the text, of all rows or of each."""
        self._cache, self.first, self.slots, self.live = cache, first, slots, live
        nodes = torch.arange(slots.shape[1], device=slots.device)[:, None, None]
        known = isinstance(real, int | Tensor)
        text: Any = real if known else small_tensor(real, torch.int64, slots.device)
        guesses = nodes >= (text if isinstance(text, int) else text[:, None, None, None])
        self._layers = [
            LayerCacheView(keys, values, first, slots, live, guesses)
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]

    def store(self, states: Tensor) -> None:
        """What the nodes of this pass were between the layers, [B, N, W, H]."""
        self._cache.store(states, self.first, self.slots)

    def of_layer(self, index: int) -> LayerCacheView:
        return self._layers[index]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return self._layers[layer_idx].update(key, value)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.live, 0

    def __len__(self) -> int:
        return len(self._layers)


class KVShapeProbe:
    """A cache that stores nothing and notes what each layer would store."""

    is_compileable = False

    def __init__(self) -> None:
        self.found: dict[int, LayerKVShape] = {}
        self.dtype = torch.float32

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        shape = LayerKVShape(key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        self.found[layer_idx], self.dtype = shape, key.dtype
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    @property
    def shapes(self) -> list[LayerKVShape]:
        return [self.found[layer] for layer in sorted(self.found)]


def _check_memory(needed: int, rows: int, length: int, device: torch.device) -> None:
    free = free_memory(device)
    if free is not None and needed > free:
        raise CacheMemoryError(
            f"the key-value cache needs {needed / 2**30:.1f} GiB ({rows} rows of {length} tokens) "
            f"but {free / 2**30:.1f} GiB are free on {device}: "
            f"lower max_batch (now {rows}) or max_context (now {length}), or use a smaller dtype"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes free on a device, or None where the system does not tell."""
    if device.type == "cuda":
        # What the allocator keeps for itself but does not use is free for us too.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return None
