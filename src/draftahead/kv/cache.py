"""The static KV cache: fixed tensors, and the tokens that each batch slot holds.

Batch slot b of every tensor belongs to sequence b of the batch. A forward writes the KV entries of
its N nodes behind those of the slot's tokens; `commit` then adds the tokens of the accepted path.
Entries behind them are masked, and the next forward overwrites them: there is no rollback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftahead.core.device import device_of, small_tensor
from draftahead.errors import CacheMemoryError, UnsupportedModelError
from draftahead.kv import memory
from draftahead.kv.formats import from_rows, mixed, overflows, row_width, to_rows

# Bytes of a slot that are worth giving back to the system, which takes 1 to 10 ms. Smaller: more
# time; larger: more memory is kept in case that the slot's next sequence needs it.
MIN_GIVEN_BACK = 16 * 2**20


class LayerKVShape(NamedTuple):
    """What one layer stores for one token. Keys and values may differ (DeepSeek's latents)."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int


Move = tuple[int, int, int]  # slot, to, from: nodes, or entries


class KVCache:
    def __init__(
        self,
        shapes: Sequence[LayerKVShape],
        num_slots: int,
        num_entries: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stored_dtype: torch.dtype | None = None,
    ) -> None:
        """`num_slots` sequences of up to `num_entries` tokens of a model that computes in `dtype`.
        `stored_dtype`: of the rows in which keys and values are stored, see formats.py; None: the
        same."""
        self.shapes, self.num_slots, self.num_entries = shapes, num_slots, num_entries
        self.dtype, self.stored_dtype = dtype, stored_dtype or dtype
        dtype = self.stored_dtype
        per_token = sum(
            s.num_key_heads * row_width(s.key_dim, dtype)
            + s.num_value_heads * row_width(s.value_dim, dtype)
            for s in shapes
        )
        self.bytes_per_token = per_token * dtype.itemsize
        self.bytes = self.bytes_per_token * num_slots * num_entries
        _check_memory(self.bytes, num_slots, num_entries, device)

        # (heads, head_dim) of keys and values, layer by layer. Tensors of equal shape are stacked:
        # compaction then copies the entries of all layers at once.
        self._sizes = [size for s in shapes for size in (s[:2], s[2:])]
        counts = Counter(self._sizes)
        self._stacks = {
            (heads, dim): _zeros(
                (count, num_slots, heads, num_entries, row_width(dim, dtype)), dtype, device
            )
            for (heads, dim), count in counts.items()
        }
        parts = {size: iter(stack) for size, stack in self._stacks.items()}
        tensors = [next(parts[size]) for size in self._sizes]
        # By layer: [slots, heads, entries, row_width].
        self.keys, self.values = tensors[::2], tensors[1::2]
        # [slots, 1, entries, W * hidden_size]: auxiliary hidden states of the tokens, for
        # drafters that read them. They lie beside the KV entries, and are moved with them.
        self.hidden: Tensor | None = None
        # The tokens of each slot's KV entries, from entry 0 on; their number is the slot's length.
        self.tokens_in: list[list[int]] = [[] for _ in range(num_slots)]
        self.write_count = 0  # changes of entries other than by forwards
        self.long_rope = [False] * num_slots  # which frequencies rotated a slot: see runner.py
        # Entries of each slot that forwards have written and whose memory was not given back, from
        # entry 0 on; and the admission at which the slot was last used (see scheduler.py).
        self.written = [0] * num_slots
        self.last_used = [0] * num_slots
        # Slots whose prompt may have left NaN: no logits that read its entries were seen yet.
        self.is_unverified = [False] * num_slots
        # Copies entries by a CUDA graph; False if it cannot. Where there is one, KV compaction is
        # deferred until the cache is next read: `_pending` (slot, to) -> from.
        self.graphed_copy: Callable[[Sequence[Move]], bool] | None = None
        self._pending: dict[tuple[int, int], int] = {}

    def allocate_hidden(self, size: int) -> None:
        """Allocates `size` numbers per token for auxiliary hidden states."""
        device = self.keys[0].device
        needed = self.num_slots * self.num_entries * size * self.dtype.itemsize
        _check_memory(needed, self.num_slots, self.num_entries, device)
        shape = (self.num_slots, 1, self.num_entries, size)
        self.hidden = _zeros(shape, self.dtype, device)
        self.tokens_in = [
            [] for _ in range(self.num_slots)
        ]  # cached tokens have no hidden states yet

    def store_hidden(self, hidden: Tensor, first_slot: int | Tensor, entries: Tensor) -> None:
        """Hidden states [B, N, W, H] of nodes in `entries` [B, N] of slots from `first_slot` on."""
        assert self.hidden is not None
        slots = slots_from(first_slot, entries)
        self.hidden[slots[:, None], 0, entries] = hidden.flatten(2).to(self.hidden.dtype)

    def tensors(self, layers: int | None = None) -> list[Tensor]:
        """All that is stored, compacted, as tensors [parts, slots, heads, entries, dim]; or the
        keys and values of the first few layers."""
        self.compact()
        if layers is not None:
            counts = Counter(self._sizes[: 2 * layers])
            return [self._stacks[size][:count] for size, count in counts.items()]
        hidden = [] if self.hidden is None else [self.hidden[None]]
        return [*self._stacks.values(), *hidden]

    def matching_prefix(self, slot: int, tokens: Sequence[int]) -> int:
        """Length of the longest prefix of `tokens` that the slot holds."""
        cached = self.tokens_in[slot]
        count = min(len(cached), len(tokens))
        if cached[:count] == list(tokens[:count]):
            return count
        return next(i for i in range(count) if cached[i] != tokens[i])

    # ------------------------------------------------------------------- after a verification

    def commit(
        self, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], first_slot: int = 0
    ) -> None:
        """Keeps the nodes of one path (from the root, node 0) per slot, out of the last forward.

        A chain's entries are in place; those of a tree's branch are moved up.
        """
        self.write_count += 1
        moves = [
            (slot, to, node)
            for slot, path in enumerate(paths, first_slot)
            for to, node in enumerate(path)
            if to != node
        ]
        if moves:
            self.compact()
            self._pending = self._entries(moves)
            if self.graphed_copy is None:
                self.compact()
        for slot, new in enumerate(tokens, first_slot):
            self.tokens_in[slot].extend(new)

    def move_nodes(self, moves: Sequence[Move], num_layers: int) -> None:
        """Moves keys and values of the first layers only, of nodes behind the slots' lengths."""
        self.compact()
        self.write_count += 1
        self._copy(self._entries(moves), num_layers)

    def physical_entry(self, slot: int, entry: int) -> int:
        """The entry that holds the contents of `entry` while compaction is deferred."""
        return self._pending.get((slot, entry), entry)

    def compact(self) -> None:
        """Runs a deferred compaction. If it is interrupted, it is unknown what was moved: the slots
        forget the tokens from the first moved one on."""
        if not self._pending:
            return
        entries, self._pending = self._pending, {}
        try:
            self._copy(entries, None)
        except BaseException:
            for slot, to in entries:
                del self.tokens_in[slot][to:]
            raise

    def _entries(self, moves: Sequence[Move]) -> dict[tuple[int, int], int]:
        """Moves of nodes as moves of entries: (slot, to) -> from."""
        lengths = {slot: len(self.tokens_in[slot]) for slot, _, _ in moves}
        return {(slot, lengths[slot] + to): lengths[slot] + node for slot, to, node in moves}

    def _copy(self, entries: dict[tuple[int, int], int], num_layers: int | None) -> None:
        moves = [(slot, to, source) for (slot, to), source in entries.items()]
        graphed_copy = self.graphed_copy if num_layers is None else None
        if not moves or (graphed_copy is not None and graphed_copy(moves)):
            return
        indices = small_tensor(list(zip(*moves, strict=True)), torch.int64, self.keys[0].device)
        copy_entries(self.tensors(num_layers), *indices)

    # ------------------------------------------------------------------------------ whole slots

    # Each method clears `tokens_in` first: if it is interrupted, the slots' contents are unknown.

    def copy_slot(self, source: int, to: int) -> None:
        """Slot `to` holds what slot `source` holds."""
        if source == to:
            return
        if self.is_unverified[to]:
            self.clear_slot(to)
        self.write_count += 1
        tokens, self.tokens_in[to] = list(self.tokens_in[source]), []
        self.note_writes(to, 1, len(tokens))
        for stored in self.tensors():
            stored[:, to, :, : len(tokens)] = stored[:, source, :, : len(tokens)]
        self.tokens_in[to] = tokens
        self.long_rope[to] = self.long_rope[source]
        self.is_unverified[to] |= self.is_unverified[source]

    def clear_slot(self, slot: int) -> None:
        """Zeros a slot whose entries may not be finite: no NaN may stay behind a mask."""
        self.erase(slot, 0, self.num_entries)
        self.is_unverified[slot] = False

    def erase(self, slot: int, start: int, end: int) -> None:
        """Zeros entries of a slot, and forgets the tokens from the first of them on."""
        self.write_count += 1
        del self.tokens_in[slot][start:]
        for stored in self.tensors():
            memory.erase(stored[:, slot, :, start:end])
        if end >= self.written[slot]:
            self.written[slot] = min(self.written[slot], start)

    # ----------------------------------------------------------------------------------- memory

    @property
    def used_bytes(self) -> int:
        """Memory of all entries that were written."""
        return sum(self.written) * self.bytes_per_token

    def note_writes(self, first_slot: int, count: int, end: int) -> None:
        """Before a forward that writes entries below `end` of `count` slots."""
        for slot in range(first_slot, first_slot + count):
            self.written[slot] = max(self.written[slot], end)

    def give_back(self, slot: int, start: int) -> None:
        """Gives the memory of entries from `start` on back to the system, and forgets their tokens.
        On a GPU nothing, nor if it is little."""
        is_much = (self.written[slot] - start) * self.bytes_per_token >= MIN_GIVEN_BACK
        if device_of(self.keys[0].device).is_cpu and is_much:
            self.erase(slot, start, self.written[slot])

    # -------------------------------------------------------------------------- moves of slots

    def swap_slots(self, one: int, other: int) -> None:
        if one == other:
            return
        self.write_count += 1
        tokens, rope = self.tokens_in, self.long_rope
        swapped = tokens[other], tokens[one]
        tokens[one], tokens[other] = [], []
        length = max(map(len, swapped))
        for stored in self.tensors():
            copy = stored[:, one, :, :length].clone()
            stored[:, one, :, :length] = stored[:, other, :, :length]
            stored[:, other, :, :length] = copy
            self.note_writes(one, 1, length)
            self.note_writes(other, 1, length)
        rope[one], rope[other] = rope[other], rope[one]
        self.last_used[one], self.last_used[other] = self.last_used[other], self.last_used[one]
        unverified = self.is_unverified  # what lies behind the tokens is not swapped
        unverified[one] = unverified[other] = unverified[one] or unverified[other]
        tokens[one], tokens[other] = swapped
        for slot in (one, other):
            self.give_back(slot, len(tokens[slot]))


def copy_entries(tensors: Sequence[Tensor], slots: Tensor, to: Tensor, source: Tensor) -> None:
    """Entries `to` [M] of slots [M] become copies of entries `source` [M], in all the tensors."""
    for tensor in tensors:
        tensor[:, slots, :, to] = tensor[:, slots, :, source]


class SlotOwners:
    """Which sequence each slot of a drafter's own cache belongs to. Slots follow the batch: if a
    sequence's entries are in another slot, the two slots are swapped."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.sequences = [-1] * cache.num_slots

    def claim(self, sequence: int, slot: int) -> bool:
        """Gives the slot to a sequence; True if the slot now holds entries of it."""
        owners = self.sequences
        if owners[slot] == sequence:  # the usual case: no search among all slots
            return True
        if has_entries := sequence in owners:
            other = owners.index(sequence)
            self._cache.swap_slots(other, slot)
            owners[other] = owners[slot]
        owners[slot] = sequence
        return has_entries


def slots_from(first_slot: int | Tensor, entries: Tensor) -> Tensor:
    """Slots [B]: `first_slot` and those behind it, or the tensor that lists them."""
    if isinstance(first_slot, Tensor):
        return first_slot
    return torch.arange(first_slot, first_slot + len(entries), device=entries.device)


# ---------------------------------------------------------- the cache as a model's forward sees it


class _CacheMethods:
    """What a model needs of transformers' Cache object beside `update`. Positions and mask come
    with the call."""

    is_compileable = False
    kv_len: int

    def get_seq_length(self, *_: object, **__: object) -> int:
        return 0

    def get_query_offset(self, *_: object, **__: object) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: object, **__: object) -> tuple[int, int]:
        return self.kv_len, 0


class LayerCacheView(_CacheMethods):
    """One layer of the cache during a forward: slots [first_slot, first_slot + B), entries
    [0, kv_len)."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        dtype: torch.dtype,
        first_slot: int | Tensor,
        entries: Tensor,
        kv_len: int,
        is_draft: Tensor | None,
        overflows: Tensor | None,
    ) -> None:
        self.keys, self.values, self.first_slot, self.kv_len = keys, values, first_slot, kv_len
        self.dtype = dtype  # in which keys and values are computed and read
        self.entries = entries  # [B, N], where the new keys and values go
        # [N, 1, 1] or [B, N, 1, 1]: nodes that are no context tokens; None: all are.
        self.is_draft = is_draft
        self.overflows = overflows  # [B, N]: drafted nodes of which something was not stored

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Stores new keys and values [B, heads, N, dim]; returns all of them up to kv_len."""
        slots, found = slots_from(self.first_slot, self.entries), list[Tensor]()
        for stored, new in (
            (self.keys, key.transpose(1, 2)),
            (self.values, value.transpose(1, 2)),
        ):
            dim, new = new.shape[-1], new.to(self.dtype)  # autocast has its own
            is_mixed = stored.dtype == torch.uint8 and stored is self.keys
            if is_mixed:
                new = mixed(new)
            elif stored.dtype != torch.uint8:
                new = new.to(stored.dtype)
            # A drafted token may overflow in half precision. Its NaN would reach other nodes
            # through the mask (0 * NaN), so it is not stored, and noted: see CacheView.overflows.
            # The NaN of a context token is the target's own result, and must show.
            if self.is_draft is not None:
                if self.overflows is not None:
                    self.overflows |= (~new.isfinite() & self.is_draft).flatten(2).any(-1)
                new = new.nan_to_num(0.0, 0.0, 0.0).where(self.is_draft, new)
            stored[slots[:, None], :, self.entries] = to_rows(new, stored.dtype)
            rows = stored[:, :, : self.kv_len]
            if isinstance(self.first_slot, Tensor):
                rows = rows.index_select(0, slots)
            else:
                rows = rows[self.first_slot : self.first_slot + len(self.entries)]
            numbers = from_rows(rows, dim, self.dtype)
            found.append(mixed(numbers) if is_mixed else numbers)
        keys, values = found
        return keys, values


class CacheView(_CacheMethods):
    """All layers of the cache during a forward."""

    def __init__(
        self,
        cache: KVCache,
        first_slot: int | Tensor,
        entries: Tensor,
        kv_len: int,
        num_context_tokens: int | Tensor | Sequence[int],
    ) -> None:
        """`first_slot`: or all slots [B], if they are known on the device only.
        `num_context_tokens`: number of first nodes that are text; one number, or one per
        sequence."""
        self._cache, self.first_slot, self.entries = cache, first_slot, entries
        self.kv_len = kv_len
        nodes = torch.arange(entries.shape[1], device=entries.device)[:, None, None]
        counts: Any = num_context_tokens
        if not isinstance(counts, int | Tensor):
            counts = small_tensor(counts, torch.int64, entries.device)
        # [B, N]: drafted nodes whose keys or values are not finite, in any layer. The model's own
        # result for such a token is not known, since other numbers were stored. Of float16, and of
        # rounded ones: what overflows the range of other dtypes has no logits anyway.
        self.overflows: Tensor | None = None
        is_draft = None
        if not isinstance(counts, int) or counts < entries.shape[1]:
            is_draft = nodes >= (counts if isinstance(counts, int) else counts[:, None, None, None])
            if overflows(cache.stored_dtype, cache.dtype):
                self.overflows = torch.zeros_like(entries, dtype=torch.bool)
        self._layers = [
            LayerCacheView(
                keys, values, cache.dtype, first_slot, entries, kv_len, is_draft, self.overflows
            )
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]

    def store_hidden(self, hidden: Tensor) -> None:
        """Auxiliary hidden states of the nodes of this forward, [B, N, W, H]."""
        self._cache.store_hidden(hidden, self.first_slot, self.entries)

    def of_layer(self, index: int) -> LayerCacheView:
        return self._layers[index]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return self._layers[layer_idx].update(key, value)

    def __len__(self) -> int:
        return len(self._layers)


class KVShapeProbe(_CacheMethods):
    """A cache that stores nothing and records the shapes that each layer would store."""

    def __init__(self) -> None:
        self._by_layer: dict[int, LayerKVShape] = {}
        self._dtypes: dict[torch.dtype, None] = {}
        self._kinds: set[type] = set()  # subclasses of Tensor

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        shape = LayerKVShape(key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        self._by_layer[layer_idx] = shape
        self._dtypes[key.dtype] = None
        self._kinds.update({type(key), type(value)} - {Tensor})
        return key, value

    def store_hidden(self, hidden: Tensor) -> None:
        """Nothing, as with keys and values."""

    def get_mask_sizes(self, query_length: int, *_: object, **__: object) -> tuple[int, int]:
        return query_length, 0

    @property
    def shapes(self) -> list[LayerKVShape]:
        return [self._by_layer[layer] for layer in sorted(self._by_layer)]

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys of all layers."""
        if self._kinds:
            raise UnsupportedModelError(
                f"the model computes keys and values as {self._kinds.pop().__name__}, quantized, "
                "which the KV cache cannot hold: quantize weights only"
            )
        if len(self._dtypes) != 1:
            raise UnsupportedModelError(
                "the model's layers compute keys of different dtypes "
                f"({', '.join(map(str, self._dtypes))}): cast it with model.to(dtype)"
            )
        return next(iter(self._dtypes))


# ------------------------------------------------------------------------------------- memory


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since a masked NaN would still reach a sum (0 * NaN). On a CPU they take no memory
    until they are written: few sequences fill their context."""
    if device_of(device).is_cpu:
        return memory.zeros(size, dtype)
    return torch.zeros(size, dtype=dtype, device=device)


def _check_memory(needed: int, slots: int, entries: int, device: torch.device) -> None:
    free = device_of(device).free_memory()
    if free is not None and needed > free:
        raise CacheMemoryError(
            f"the KV cache needs {needed / 2**30:.1f} GiB ({slots} slots of {entries} tokens) "
            f"but {free / 2**30:.1f} GiB are free on {device}: "
            f"lower max_batch (now {slots}) or max_context (now {entries}), or use a smaller dtype"
        )
