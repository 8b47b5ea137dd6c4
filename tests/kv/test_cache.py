"""The KV cache by its numbers: what is committed, moved, swapped, copied and cleared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import psutil
import pytest
import torch
from torch import Tensor

from draftahead.core.device import Device
from draftahead.errors import CacheMemoryError
from draftahead.kv import cache as kv
from draftahead.kv.cache import CacheView, KVCache, KVShapeProbe, LayerKVShape, Move, SlotOwners

CPU = torch.device("cpu")
SHAPES = [LayerKVShape(2, 3, 2, 4), LayerKVShape(1, 3, 2, 4), LayerKVShape(2, 3, 2, 4)]
SLOTS, ENTRIES, HIDDEN = 3, 16, 5


def empty(dtype: torch.dtype = torch.float64) -> KVCache:
    return KVCache(SHAPES, SLOTS, ENTRIES, dtype, CPU)


def filled(lengths: Sequence[int] = (4, 6, 0)) -> KVCache:
    """Every number says which tensor, slot, head and entry it was in; tokens say slot and entry."""
    cache = empty()
    cache.allocate_hidden(HIDDEN)
    for number, stored in enumerate(cache.tensors()):
        stored.copy_(torch.arange(stored.numel(), dtype=torch.float64).view(stored.shape))
        stored += (number + 1) * 1e6
    for slot, length in enumerate(lengths):
        cache.tokens_in[slot] = [100 * slot + entry for entry in range(length)]
    return cache


def contents(cache: KVCache) -> list[Tensor]:
    return [stored.clone() for stored in cache.tensors()]


# ------------------------------------------------------------------------------------- tensors


def test_layers_of_one_shape_share_a_tensor_and_each_has_its_own_part() -> None:
    cache = filled()
    assert [tuple(key.shape) for key in cache.keys] == [
        *((SLOTS, 2, ENTRIES, 3), (SLOTS, 1, ENTRIES, 3), (SLOTS, 2, ENTRIES, 3))
    ]
    assert [tuple(value.shape) for value in cache.values] == [(SLOTS, 2, ENTRIES, 4)] * 3
    parts = [*cache.keys, *cache.values]
    assert len({part.data_ptr() for part in parts}) == 6
    assert sum(part.numel() for part in parts) == SLOTS * ENTRIES * 3 * (6 + 8 - 1)
    assert cache.bytes == 8 * sum(part.numel() for part in parts)
    assert sorted(tuple(stack.shape) for stack in cache.tensors()) == [
        *((1, SLOTS, 1, ENTRIES, 3), (1, SLOTS, 1, ENTRIES, HIDDEN)),
        *((2, SLOTS, 2, ENTRIES, 3), (3, SLOTS, 2, ENTRIES, 4)),
    ]


def test_tensors_of_the_first_layers_only() -> None:
    cache = filled()
    first = cache.tensors(1)
    assert [tuple(stack.shape) for stack in first] == [
        *((1, SLOTS, 2, ENTRIES, 3), (1, SLOTS, 2, ENTRIES, 4))
    ]
    assert first[0].data_ptr() == cache.keys[0].data_ptr()
    assert first[1].data_ptr() == cache.values[0].data_ptr()
    two = cache.tensors(2)
    assert sum(stack.numel() for stack in two) == sum(
        part.numel() for part in (*cache.keys[:2], *cache.values[:2])
    )
    assert {stack.data_ptr() for stack in two} == {
        *(part.data_ptr() for part in (*cache.keys[:2], cache.values[0]))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_new_cache_is_zero_and_aligned(dtype: torch.dtype) -> None:
    cache = empty(dtype)
    for stored in cache.tensors():
        assert not stored.any()
        assert stored.dtype == dtype
        assert stored.data_ptr() % 64 == 0  # vectors of AVX-512
    assert cache.tokens_in == [[], [], []]
    assert cache.long_rope == [False] * 3
    assert cache.hidden is None


def test_a_cache_is_allocated_on_its_device() -> None:
    cache = KVCache(SHAPES, SLOTS, ENTRIES, torch.float32, torch.device("meta"))
    assert {stored.device.type for stored in cache.tensors()} == {"meta"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory otherwise")
def test_a_new_cache_on_a_cpu_takes_no_memory_before_entries_are_written() -> None:
    memory = psutil.Process().memory_info
    before = memory().rss
    cache = KVCache([LayerKVShape(1, 64, 1, 64)], 1, 1 << 18, torch.float32, CPU)
    assert cache.bytes == 2**27
    assert memory().rss - before < cache.bytes / 4


def test_a_cache_larger_than_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(size: int | None) -> None:
        monkeypatch.setattr(Device, "free_memory", lambda device: size)

    needed, hidden = empty(torch.float32).bytes, SLOTS * ENTRIES * HIDDEN * 4
    free(needed)
    cache = empty(torch.float32)
    free(hidden)
    cache.allocate_hidden(HIDDEN)
    free(hidden - 1)
    with pytest.raises(CacheMemoryError, match="3 slots of 16 tokens"):
        cache.allocate_hidden(HIDDEN)
    free(needed - 1)
    with pytest.raises(CacheMemoryError, match="lower max_batch"):
        empty(torch.float32)
    free(None)  # the system does not tell
    empty(torch.float32)


def test_storing_other_hidden_states_empties_the_slots() -> None:
    """Of the tokens before, those hidden states were not stored."""
    cache = filled()
    cache.allocate_hidden(HIDDEN + 1)
    assert cache.tokens_in == [[], [], []]
    assert cache.hidden is not None
    assert tuple(cache.hidden.shape) == (SLOTS, 1, ENTRIES, HIDDEN + 1)


# -------------------------------------------------------------------------- accepted paths


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([5, 6, 7, 8], 4),
        ([5, 6, 7, 8, 9], 4),
        ([5, 6, 7], 3),
        ([5, 6, 0, 8], 2),
        ([5, 6, 0, 8, 9, 9], 2),
        ([5, 6, 7, 0], 3),
        ([0, 6, 7, 8], 0),
        ([], 0),
    ],
)
def test_matching_prefix(tokens: list[int], count: int) -> None:
    cache = filled()
    cache.tokens_in[0] = [5, 6, 7, 8]
    assert cache.matching_prefix(0, tokens) == cache.matching_prefix(0, tuple(tokens)) == count
    assert cache.matching_prefix(2, [5]) == 0


def committed_by_hand(before: Tensor, slot: int, length: int, path: list[int]) -> Tensor:
    after = before.clone()
    for to, node in enumerate(path):
        after[:, slot, :, length + to] = before[:, slot, :, length + node]
    return after


COMMITS = {
    "both slots": (0, [[0, 2, 5], [0, 1]], [[7, 8, 9], [3, 4]], [(0, 5, 6), (0, 6, 9)]),
    "the second slot": (1, [[0, 3]], [[3, 4]], [(1, 7, 9)]),
}


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("graphed_copy", [None, True, False], ids=["none", "works", "cannot"])
def test_entries_of_an_accepted_path_move_up(graphed_copy: bool | None, commit: str) -> None:
    """In all layers and in the hidden states, for several slots at once; by a CUDA graph where
    there is one and it can."""
    cache = filled()
    first_slot, paths, tokens, moves = COMMITS[commit]
    expected, called = contents(cache), list[Move]()

    def copy(moves: Sequence[Move]) -> bool:
        called.extend(moves)
        if graphed_copy:
            kv.copy_entries(cache.tensors(), *torch.tensor(moves).T)
        return bool(graphed_copy)

    if graphed_copy is not None:
        cache.graphed_copy = copy
    for slot, path in enumerate(paths, first_slot):
        length = len(cache.tokens_in[slot])
        expected = [committed_by_hand(stored, slot, length, path) for stored in expected]
    cache.commit(paths, tokens, first_slot=first_slot)
    if graphed_copy is None:  # at once
        assert [cache.physical_entry(slot, to) for slot, to, _ in moves] == [
            to for _, to, _ in moves
        ]
        assert torch.equal(cache.keys[2][1, :, :9], expected[0][1, 1, :, :9])
    if graphed_copy is not None:  # deferred: the contents of an entry lie elsewhere
        assert not called
        everywhere = [(slot, entry) for slot in range(SLOTS) for entry in range(ENTRIES)]
        lie = {at: cache.physical_entry(*at) for at in everywhere}
        assert [(*at, lie[at]) for at in everywhere if lie[at] != at[1]] == moves
    for found, wanted in zip(contents(cache), expected, strict=True):
        for slot, length in enumerate((4, 6)):
            assert torch.equal(found[:, slot, :, : length + 3], wanted[:, slot, :, : length + 3])
    if graphed_copy is not None:
        assert sorted(called) == moves
    lengths = [4, 6, 0]
    for slot, new in enumerate(tokens, first_slot):
        assert cache.tokens_in[slot][lengths[slot] :] == new
        lengths[slot] += len(new)
    assert [len(held) for held in cache.tokens_in] == lengths
    assert cache.physical_entry(0, 5) == 5  # by now


def test_a_cache_of_one_layer_moves_its_entries() -> None:
    cache = KVCache(SHAPES[:1], SLOTS, ENTRIES, torch.float64, CPU)
    cache.allocate_hidden(HIDDEN)
    assert cache.hidden is not None
    for stored in (cache.keys[0], cache.values[0], cache.hidden):
        stored[0, :, 2] = 7.0
    cache.commit([[0, 2]], [[5, 6]])
    for stored in (cache.keys[0], cache.values[0], cache.hidden):
        assert (stored[0, :, 1] == 7).all()


def test_committing_a_chain_moves_nothing() -> None:
    cache = filled()
    before, version, called = contents(cache), cache.write_count, list[Sequence[Move]]()
    cache.graphed_copy = lambda moves: bool(called.append(moves)) or True
    cache.commit([[0, 1, 2], [0]], [[7, 8, 9], [3]])
    assert not called
    assert cache.write_count == version + 1
    assert all(map(torch.equal, contents(cache), before))


def test_a_deferred_move_waits_for_the_next_move_and_not_for_a_chain() -> None:
    cache, called = filled(), list[Sequence[Move]]()
    cache.graphed_copy = lambda moves: bool(called.append(moves)) or True
    cache.commit([[0, 2]], [[7, 8]])
    cache.commit([[0, 1]], [[3, 4]], first_slot=1)
    assert not called
    assert cache.physical_entry(0, 5) == 6
    cache.commit([[0, 3]], [[5, 6]], first_slot=1)
    assert called == [[(0, 5, 6)]]
    cache.compact()
    assert called == [[(0, 5, 6)], [(1, 9, 11)]]


def test_entries_of_the_first_layers_can_be_moved_alone() -> None:
    """Not by the CUDA graph, which moves those of all layers."""
    cache = filled()
    before, hidden, version = contents(cache), cache.hidden, cache.write_count
    assert hidden is not None
    hidden = hidden.clone()
    cache.graphed_copy = lambda moves: True
    cache.move_nodes([(0, 1, 3)], 1)
    assert cache.write_count == version + 1
    cache.move_nodes([], 1)
    for found, old in ((cache.keys[0], before[0][0]), (cache.values[0], before[1][0])):
        assert torch.equal(found[0, :, 5], old[0, :, 7])
        assert torch.equal(found[1], old[1])
    assert torch.equal(cache.keys[2], before[0][1])
    assert cache.hidden is not None
    assert torch.equal(cache.hidden, hidden)
    assert cache.physical_entry(0, 5) == 5


def test_an_interrupted_move_cuts_the_slots_before_the_moved_entries() -> None:
    """It is unknown what was moved: the slots no longer hold those tokens."""

    def interrupted(moves: Sequence[Move]) -> bool:
        raise KeyboardInterrupt

    cache = filled()
    cache.graphed_copy = interrupted
    cache.commit([[0, 2, 5], [0, 1]], [[7, 8, 9], [3, 4]])
    with pytest.raises(KeyboardInterrupt):
        cache.compact()
    assert cache.tokens_in[0] == [0, 1, 2, 3, 7]
    assert cache.tokens_in[1] == [100, 101, 102, 103, 104, 105, 3, 4]
    cache.compact()  # and it is not tried again


CHANGES: dict[str, Callable[[KVCache], object]] = {
    "a swap": lambda cache: cache.swap_slots(0, 2),
    "a copy": lambda cache: cache.copy_slot(0, 2),
    "another slot cleared": lambda cache: cache.clear_slot(1),
    "another move": lambda cache: cache.move_nodes([], 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_deferred_moves_are_carried_out_before_a_slot_changes(change: str) -> None:
    cache = filled()
    expected = [committed_by_hand(stored, 0, 4, [0, 2]) for stored in contents(cache)]
    called = list[Sequence[Move]]()
    cache.graphed_copy = lambda moves: bool(called.append(moves))
    cache.commit([[0, 2]], [[7, 8]])
    CHANGES[change](cache)
    assert called == [[(0, 5, 6)]]
    slot = 2 if cache.tokens_in[2] else 0
    for found, wanted in zip(cache.tensors(), expected, strict=True):
        assert torch.equal(found[:, slot, :, :6], wanted[:, 0, :, :6])


# ------------------------------------------------------------------------------ whole slots


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 0), (0, 2), (2, 1), (1, 1)])
def test_swapped_slots_exchange_all_that_they_hold(one: int, other: int) -> None:
    """Keys, values, hidden states, tokens, and which frequencies rotated them (long RoPE)."""
    cache = filled()
    cache.long_rope = [True, False, False]
    before, version = contents(cache), cache.write_count
    held, long_rope = list(cache.tokens_in), list(cache.long_rope)
    cache.swap_slots(one, other)
    origins = [0, 1, 2]
    origins[one], origins[other] = other, one
    for slot, origin in enumerate(origins):
        assert cache.tokens_in[slot] == held[origin]
        assert cache.long_rope[slot] == long_rope[origin]
        length = len(held[origin])
        for found, old in zip(cache.tensors(), before, strict=True):
            assert torch.equal(found[:, slot, :, :length], old[:, origin, :, :length])
    assert cache.write_count == version + (one != other)


@pytest.mark.parametrize(("source", "to"), [(0, 1), (1, 0), (1, 2), (0, 0)])
def test_a_copied_slot_holds_what_its_source_holds(source: int, to: int) -> None:
    cache = filled()
    cache.long_rope = [True, False, True]
    before, version = contents(cache), cache.write_count
    held, long_rope = list(cache.tokens_in), list(cache.long_rope)
    cache.copy_slot(source, to)
    length = len(held[source])
    assert cache.tokens_in[to] == held[source]
    assert cache.tokens_in[to] is not cache.tokens_in[source] or source == to
    assert cache.long_rope[to] == long_rope[source]
    assert cache.write_count == version + (source != to)
    for found, old in zip(cache.tensors(), before, strict=True):
        assert torch.equal(found[:, to, :, :length], old[:, source, :, :length])
        for slot in {0, 1, 2} - {to}:
            assert torch.equal(found[:, slot], old[:, slot])


def test_a_cleared_slot_is_zero_from_end_to_end() -> None:
    """Also behind its tokens: KV of a drafted token that was not finite may lie there."""
    cache = filled()
    before, version = contents(cache), cache.write_count
    for stored in cache.tensors():
        stored[:, 1, :, 9:] = torch.nan
    cache.clear_slot(1)
    assert cache.tokens_in == [[0, 1, 2, 3], [], []]
    assert cache.write_count == version + 1
    for found, old in zip(cache.tensors(), before, strict=True):
        assert not found[:, 1].any()
        assert torch.equal(found[:, [0, 2]], old[:, [0, 2]])


def test_erased_entries_are_zero_and_those_beside_them_stay() -> None:
    cache = filled()
    before = contents(cache)
    cache.erase(1, 4, 9)
    assert cache.tokens_in == [[0, 1, 2, 3], [100, 101, 102, 103], []]
    for found, old in zip(cache.tensors(), before, strict=True):
        assert not found[:, 1, :, 4:9].any()
        for entries in (slice(4), slice(9, None)):
            assert torch.equal(found[:, 1, :, entries], old[:, 1, :, entries])
        assert torch.equal(found[:, [0, 2]], old[:, [0, 2]])


def test_slots_that_no_verdict_has_seen() -> None:
    """What lies behind the tokens of one may not be finite: it is not known before a verdict. A
    copy of other tokens over it zeroes it first; a cleared slot is known."""
    cache = filled((2, 6, 0))
    cache.is_unverified[1] = True
    cache.copy_slot(0, 1)
    assert not cache.is_unverified[1]
    for stored in cache.tensors():
        assert stored[:, 1, :, :2].any()
        assert not stored[:, 1, :, 2:].any()
    cache.is_unverified[0] = True
    cache.copy_slot(0, 2)
    assert cache.is_unverified == [True, False, True]
    cache.clear_slot(0)
    assert cache.is_unverified == [False, False, True]
    for one, other in ((2, 0), (0, 2)):  # only tokens are swapped, not what lies behind them
        cache.is_unverified[:] = [False, False, True]
        cache.swap_slots(one, other)
        assert cache.is_unverified == [True, False, True]
    cache.is_unverified[:] = [False, False, False]
    cache.swap_slots(0, 2)
    assert not any(cache.is_unverified)


WHOLE_SLOTS: dict[str, tuple[Callable[[KVCache], object], set[int]]] = {
    "a swap": (lambda cache: cache.swap_slots(0, 1), {0, 1}),
    "a copy": (lambda cache: cache.copy_slot(0, 1), {1}),
    "a slot cleared": (lambda cache: cache.clear_slot(1), {1}),
}


@pytest.mark.parametrize("change", WHOLE_SLOTS)
def test_slots_whose_change_is_interrupted_hold_no_tokens(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of their tensors are changed and others are not: no prefix of them may be reused."""

    class Interrupting:
        def __getitem__(self, _: object) -> Tensor:
            raise KeyboardInterrupt

        def __setitem__(self, _: object, __: object) -> None:
            raise KeyboardInterrupt

    cache = filled((4, 6, 2))
    run, changed = WHOLE_SLOTS[change]
    tensors = [cache.tensors()[0], Interrupting()]
    monkeypatch.setattr(cache, "tensors", lambda: tensors)
    with pytest.raises(KeyboardInterrupt):
        run(cache)
    assert [not tokens for tokens in cache.tokens_in] == [slot in changed for slot in range(3)]


def test_slot_owners_bring_a_sequences_entries_to_its_slot() -> None:
    """A sequence keeps what is held for it, wherever it goes in the batch."""
    cache = filled((4, 6, 2))
    owners = SlotOwners(cache)
    assert owners.sequences == [-1, -1, -1]
    assert not owners.claim(70, 0)
    assert not owners.claim(71, 1)
    assert owners.claim(70, 0)
    assert cache.tokens_in[0][0] == 0
    assert owners.claim(71, 0)  # it moves to the front, the other to where it was
    assert owners.sequences == [71, 70, -1]
    assert [held[0] for held in cache.tokens_in] == [100, 0, 200]
    assert not owners.claim(72, 1)
    assert owners.sequences == [71, 72, -1]
    assert [held[0] for held in cache.tokens_in] == [100, 0, 200]


# --------------------------------------------------------- the cache as a forward sees it


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("num_context", [1, 2, 0, (1, 3)])
def test_a_forward_writes_its_nodes_and_reads_up_to_kv_len(
    num_context: int | tuple[int, int], on_device: bool, first_slot: int
) -> None:
    """Values that are not finite are stored of context tokens, and not of drafted ones."""
    cache = filled()
    before = [stored.clone() for stored in (*cache.keys, *cache.values)]
    entries = torch.tensor([[4, 5, 6], [6, 7, 8]])
    slots = torch.tensor([first_slot, first_slot + 1]) if on_device else first_slot
    as_tensor = isinstance(num_context, tuple) and on_device
    view = CacheView(
        cache, slots, entries, 10, torch.tensor(num_context) if as_tensor else num_context
    )
    assert len(view) == 3
    for part in (view, view.of_layer(0)):
        assert part.get_seq_length() == part.get_query_offset() == 0
        assert part.get_mask_sizes(3) == (10, 0)
    key = torch.arange(2 * 2 * 3 * 3, dtype=torch.float64).view(2, 2, 3, 3) - 5
    value = torch.arange(2 * 2 * 3 * 4, dtype=torch.float64).view(2, 2, 3, 4) - 7
    for node, number in enumerate((torch.nan, torch.inf, -torch.inf)):
        key[0, 0, node, 1] = number
        value[1, 1, node, 2] = number
    keys, values = view.update(key, value, 2)
    assert tuple(keys.shape) == (2, 2, 10, 3)
    assert tuple(values.shape) == (2, 2, 10, 4)
    if not on_device:  # read in place, without a copy
        assert keys.data_ptr() == cache.keys[2][first_slot].data_ptr()
    for b in range(2):
        context = num_context[b] if isinstance(num_context, tuple) else num_context
        for node in range(3):
            entry = int(entries[b, node])
            for new, stored, read in ((key, cache.keys[2], keys), (value, cache.values[2], values)):
                wanted = new[b, :, node].clone()
                if node >= context:
                    wanted = wanted.nan_to_num(0.0, 0.0, 0.0)
                for found in (stored[first_slot + b, :, entry], read[b, :, entry]):
                    assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1))
    written = torch.zeros(SLOTS, ENTRIES, dtype=torch.bool)
    written[torch.tensor([[first_slot], [first_slot + 1]]), entries] = True
    for index, (stored, old) in enumerate(zip((*cache.keys, *cache.values), before, strict=True)):
        kept = ~written if index in (2, 5) else torch.ones_like(written)
        kept = kept[:, None, :, None].expand_as(stored)
        assert torch.equal(stored[kept], old[kept])


@pytest.mark.parametrize("on_device", [True, False])
def test_hidden_states_are_stored_in_the_entries_of_their_nodes(on_device: bool) -> None:
    cache = filled()
    entries = torch.tensor([[4, 5], [6, 7]])
    view = CacheView(cache, torch.tensor([1, 2]) if on_device else 1, entries, 9, 1)
    hidden = torch.arange(2 * 2 * HIDDEN, dtype=torch.float32).view(2, 2, 1, HIDDEN)
    view.store_hidden(hidden)
    assert cache.hidden is not None
    for b in range(2):
        for node in range(2):
            found = cache.hidden[1 + b, 0, entries[b, node]]
            assert torch.equal(found, hidden[b, node, 0].double())


def test_the_probe_notes_what_layers_store() -> None:
    probe = KVShapeProbe()
    for layer in (1, 0):
        key, value = torch.zeros(1, 2, 5, 3 + layer), torch.zeros(1, 4, 5, 7, dtype=torch.float64)
        found = probe.update(key.half(), value, layer)
        assert found[0].shape == key.shape
        assert found[1] is value
    assert probe.shapes == [LayerKVShape(2, 3, 4, 7), LayerKVShape(2, 4, 4, 7)]
    assert probe.dtype == torch.float16
    assert (probe.get_seq_length(), probe.get_query_offset()) == (0, 0)
    assert probe.get_mask_sizes(5) == (5, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_drafted_nodes_that_overflow_are_noted_in_float16(dtype: torch.dtype) -> None:
    """In one number of a key or a value of any layer; those of context tokens are not drafts."""
    cache = empty(dtype)
    view = CacheView(cache, 0, torch.arange(4)[None].expand(2, 4), 4, 1)
    for layer, shape in enumerate(SHAPES):
        key, value = (
            torch.ones(2, heads, 4, dim, dtype=dtype) for heads, dim in (shape[:2], shape[2:])
        )
        if layer == 0:
            key[0, 0, 2, 1], value[1, 1, 3, 0] = torch.inf, torch.nan
        if layer == 1:
            value[1, 0, 0, 0] = torch.inf  # of the context
        view.update(key, value, layer)
    if dtype == torch.float32:
        assert view.overflows is None
    else:
        assert view.overflows is not None
        assert view.overflows.nonzero().tolist() == [[0, 2], [1, 3]]
