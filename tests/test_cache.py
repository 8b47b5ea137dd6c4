"""The key-value cache by its numbers: what is kept, moved, swapped, copied and forgotten; and
hidden states of kept nodes against those of a fresh prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zoo
from draftahead.errors import CacheMemoryError
from draftahead.kv import cache
from draftahead.kv.cache import CacheView, KVCache, KVShapeProbe, LayerKVShape, SlotOwners
from draftahead.models.runner import ModelRunner

CPU = torch.device("cpu")
SHAPES = [LayerKVShape(2, 3, 2, 4), LayerKVShape(1, 3, 2, 4), LayerKVShape(2, 3, 2, 4)]
ROWS, SLOTS, HIDDEN = 3, 16, 5


def filled(lengths: Sequence[int] = (4, 6, 0), *, hidden: bool = True) -> KVCache:
    """Every number says which tensor, row, head and slot it was in; tokens say row and slot."""
    cache = KVCache(SHAPES, ROWS, SLOTS, torch.float64, CPU)
    if hidden:
        cache.watch(HIDDEN)
    for number, stored in enumerate(cache.stored()):
        stored.copy_(torch.arange(stored.numel(), dtype=torch.float64).view(stored.shape))
        stored += (number + 1) * 1e6
    for row, length in enumerate(lengths):
        cache.tokens_in[row] = [100 * row + slot for slot in range(length)]
    return cache


def numbers(cache: KVCache) -> list[torch.Tensor]:
    return [stored.clone() for stored in cache.stored()]


def test_layers_of_one_shape_share_a_tensor_and_each_has_its_own_part() -> None:
    cache = filled()
    assert [tuple(key.shape) for key in cache.keys] == [
        *((ROWS, 2, SLOTS, 3), (ROWS, 1, SLOTS, 3), (ROWS, 2, SLOTS, 3))
    ]
    assert [tuple(value.shape) for value in cache.values] == [(ROWS, 2, SLOTS, 4)] * 3
    parts = [*cache.keys, *cache.values]
    assert len({part.data_ptr() for part in parts}) == 6
    assert sum(part.numel() for part in parts) == ROWS * SLOTS * 3 * (6 + 8) - ROWS * SLOTS * 3
    assert cache.bytes == 8 * sum(part.numel() for part in parts)
    assert sorted(tuple(stack.shape) for stack in cache.stored()) == [
        *((1, ROWS, 1, SLOTS, 3), (1, ROWS, 1, SLOTS, HIDDEN)),
        *((2, ROWS, 2, SLOTS, 3), (3, ROWS, 2, SLOTS, 4)),
    ]


def test_the_first_layers_alone() -> None:
    cache = filled()
    first = cache.stored(1)
    assert [tuple(stack.shape) for stack in first] == [
        *((1, ROWS, 2, SLOTS, 3), (1, ROWS, 2, SLOTS, 4))
    ]
    assert first[0].data_ptr() == cache.keys[0].data_ptr()
    assert first[1].data_ptr() == cache.values[0].data_ptr()
    two = cache.stored(2)
    assert sum(stack.numel() for stack in two) == sum(
        part.numel() for part in (*cache.keys[:2], *cache.values[:2])
    )
    assert {stack.data_ptr() for stack in two} == {
        *(part.data_ptr() for part in (*cache.keys[:2], cache.values[0]))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_new_cache_is_zero_and_aligned(dtype: torch.dtype) -> None:
    cache = KVCache(SHAPES, ROWS, SLOTS, dtype, CPU)
    for stored in cache.stored():
        assert not stored.any()
        assert stored.dtype == dtype
        assert stored.data_ptr() % cache.ALIGNED == 0
    assert cache.tokens_in == [[], [], []]
    assert cache.far == [False] * 3
    assert cache.states is None


def test_what_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = KVCache(SHAPES, ROWS, SLOTS, torch.float32, CPU).bytes
    monkeypatch.setattr(cache, "free_memory", lambda device: needed)
    cache = KVCache(SHAPES, ROWS, SLOTS, torch.float32, CPU)
    states = ROWS * SLOTS * HIDDEN * 4
    monkeypatch.setattr(cache, "free_memory", lambda device: states)
    cache.watch(HIDDEN)
    monkeypatch.setattr(cache, "free_memory", lambda device: states - 1)
    with pytest.raises(CacheMemoryError, match="3 rows of 16 tokens"):
        cache.watch(HIDDEN)
    monkeypatch.setattr(cache, "free_memory", lambda device: needed - 1)
    with pytest.raises(CacheMemoryError, match="lower max_batch"):
        KVCache(SHAPES, ROWS, SLOTS, torch.float32, CPU)
    monkeypatch.setattr(cache, "free_memory", lambda device: None)  # nobody knows
    KVCache(SHAPES, ROWS, SLOTS, torch.float32, CPU)


def test_hidden_states_that_are_watched_anew_make_what_is_held_unknown() -> None:
    cache = filled()
    cache.watch(HIDDEN + 1)
    assert cache.tokens_in == [[], [], []]
    assert cache.states is not None
    assert tuple(cache.states.shape) == (ROWS, 1, SLOTS, HIDDEN + 1)


# ----------------------------------------------------------------------------- what is kept


def test_how_much_of_a_text_a_row_holds() -> None:
    cache = filled()
    cache.tokens_in[0] = [5, 6, 7, 8]
    for tokens, count in (
        ([5, 6, 7, 8], 4),
        ([5, 6, 7, 8, 9], 4),
        ([5, 6, 7], 3),
        ([5, 6, 0, 8], 2),
        ([5, 6, 0, 8, 9, 9], 2),
        ([5, 6, 7, 0], 3),
        ([0, 6, 7, 8], 0),
        ([], 0),
    ):
        assert cache.matched(0, tokens) == cache.matched(0, tuple(tokens)) == count
    assert cache.matched(2, [5]) == 0


def kept_by_hand(before: torch.Tensor, row: int, length: int, path: list[int]) -> torch.Tensor:
    after = before.clone()
    for to, node in enumerate(path):
        after[:, row, :, length + to] = before[:, row, :, length + node]
    return after


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mover", [None, True, False])
def test_the_nodes_of_a_kept_path_move_up(mover: bool | None, first: int) -> None:
    """In all layers and in the hidden states, for several rows at once; by another way of moving
    where there is one and it can."""
    cache = filled()
    before, lengths = numbers(cache), [4, 6]
    moved: list[Any] = []
    if mover is not None:

        def move(moves: Any) -> bool:
            moved.extend(moves)
            if mover:
                at = torch.tensor(moves).T
                cache.compact(cache.stored(), *at)
            return bool(mover)

        cache.mover = move
    paths, tokens = [[0, 2, 5], [0, 1]], [[7, 8, 9], [3, 4]]
    if first:
        paths, tokens, lengths = paths[1:], tokens[1:], lengths[1:]
        paths[0], tokens[0] = [0, 3], [3, 4]
    cache.keep(paths, tokens, first=first)
    expected = before
    for row, (path, length) in enumerate(zip(paths, lengths, strict=True), start=first):
        expected = [kept_by_hand(stored, row, length, path) for stored in expected]
    if mover is not None:  # nothing has moved yet: what belongs in a slot lies elsewhere
        assert not moved
        if not first:
            assert cache.physical_entry(0, 5) == 6
            assert cache.physical_entry(0, 6) == 9
            assert cache.physical_entry(0, 4) == 4
            assert cache.physical_entry(1, 5) == 5
        else:
            assert cache.physical_entry(1, 7) == 9
            assert cache.physical_entry(0, 7) == 7
    for found, wanted in zip(numbers(cache), expected, strict=True):
        real = [slice(0, length + 3) for length in (4, 6)]
        for row, part in enumerate(real):
            assert torch.equal(found[:, row, :, part], wanted[:, row, :, part])
    if mover is not None:
        assert sorted(moved) == ([(0, 5, 6), (0, 6, 9)] if not first else [(1, 7, 9)])
    assert cache.tokens_in[first][-len(tokens[0]) :] == tokens[0]
    assert [len(held) for held in cache.tokens_in] == [
        *([7, 8, 0] if not first else [4, 8, 0]),
    ]
    assert cache.physical_entry(0, 5) == 5  # by now


def test_a_chain_moves_nothing() -> None:
    cache = filled()
    before, version = numbers(cache), cache.version
    called: list[Any] = []
    cache.mover = lambda moves: bool(called.append(moves)) or True
    cache.keep([[0, 1, 2], [0]], [[7, 8, 9], [3]])
    assert not called
    assert cache.version == version + 1
    for found, wanted in zip(numbers(cache), before, strict=True):
        assert torch.equal(found, wanted)


def test_the_first_layers_may_move_alone() -> None:
    cache = filled()
    before = numbers(cache)
    version = cache.version
    cache.move([(0, 1, 3)], layers=1)
    assert cache.version == version + 1
    cache.move([], layers=1)
    for found, old in zip(
        (cache.keys[0], cache.values[0]), (before[0][0], before[1][0]), strict=False
    ):
        assert torch.equal(found[0, :, 5], old[0, :, 7])
        assert torch.equal(found[1], old[1])
    assert torch.equal(cache.keys[2], before[0][1])
    assert cache.states is not None
    assert torch.equal(cache.states, before[-1][0])
    assert cache.physical_entry(0, 5) == 5


def test_a_move_that_is_interrupted_makes_the_row_unknown_from_there() -> None:
    """Nobody knows what moved: the row no longer counts as holding those tokens."""

    def interrupted(moves: Any) -> bool:
        raise KeyboardInterrupt

    cache = filled()
    cache.mover = interrupted
    cache.keep([[0, 2, 5], [0, 1]], [[7, 8, 9], [3, 4]])
    with pytest.raises(KeyboardInterrupt):
        cache.settle()
    assert cache.tokens_in[0] == [0, 1, 2, 3, 7]
    assert cache.tokens_in[1] == [100, 101, 102, 103, 104, 105, 3, 4]
    cache.settle()  # and it is not tried again


# ------------------------------------------------------------------- rows that change places


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 0), (0, 2), (2, 1), (1, 1)])
def test_slots_that_swap_take_everything_along(one: int, other: int) -> None:
    """Keys, values, hidden states, tokens, and which frequencies rotated them (longrope)."""
    cache = filled()
    cache.far = [True, False, False]
    before, held, far, version = (
        numbers(cache),
        list(cache.tokens_in),
        list(cache.far),
        cache.version,
    )
    cache.swap_slots(one, other)
    place = [0, 1, 2]
    place[one], place[other] = place[other], place[one]
    for row, origin in enumerate(place):
        assert cache.tokens_in[row] == held[origin]
        assert cache.far[row] == far[origin]
        length = len(held[origin])
        for found, old in zip(cache.stored(), before, strict=True):
            assert torch.equal(found[:, row, :, :length], old[:, origin, :, :length])
    assert cache.version == version + (one != other)


@pytest.mark.parametrize(("source", "to"), [(0, 1), (1, 0), (1, 2), (0, 0)])
def test_a_slot_that_is_copied(source: int, to: int) -> None:
    cache = filled()
    cache.far = [True, False, True]
    before, held, far, version = (
        numbers(cache),
        list(cache.tokens_in),
        list(cache.far),
        cache.version,
    )
    cache.copy_slot(source, to)
    length = len(held[source])
    assert cache.tokens_in[to] == held[source]
    assert cache.tokens_in[to] is not cache.tokens_in[source] or source == to
    assert cache.far[to] == far[source]
    assert cache.version == version + (source != to)
    for found, old in zip(cache.stored(), before, strict=True):
        assert torch.equal(found[:, to, :, :length], old[:, source, :, :length])
        for row in {0, 1, 2} - {to}:
            assert torch.equal(found[:, row], old[:, row])


def test_a_slot_that_is_forgotten_is_zero_from_end_to_end() -> None:
    """Also behind its text: a guess that was not finite may lie there."""
    cache = filled()
    before, version = numbers(cache), cache.version
    for stored in cache.stored():
        stored[:, 1, :, 9:] = torch.nan
    cache.clear_slot(1)
    assert cache.tokens_in == [[0, 1, 2, 3], [], []]
    assert cache.version == version + 1
    for found, old in zip(cache.stored(), before, strict=True):
        assert not found[:, 1].any()
        assert torch.equal(found[:, [0, 2]], old[:, [0, 2]])


def test_what_has_not_moved_yet_does_so_before_a_row_changes() -> None:
    """A swap, a copy, a look: all of them settle first."""
    for act in (
        lambda cache: cache.swap_slots(0, 2),
        lambda cache: cache.copy_slot(0, 2),
        lambda cache: cache.clear_slot(1),
        lambda cache: cache.move([], None),
    ):
        cache = filled()
        expected = [kept_by_hand(stored, 0, 4, [0, 2]) for stored in numbers(cache)]
        moved: list[Any] = []
        cache.mover = lambda moves, moved=moved: bool(moved.append(moves))
        cache.keep([[0, 2]], [[7, 8]])
        act(cache)
        assert moved == [[(0, 5, 6)]]
        row = 2 if cache.tokens_in[2] else 0
        for found, wanted in zip(cache.stored(), expected, strict=True):
            assert torch.equal(found[:, row, :, :6], wanted[:, 0, :, :6])


def test_owners_of_a_drafters_slots() -> None:
    """A sequence keeps what is held for it, wherever it goes in the batch."""
    cache = filled((4, 6, 2))
    owners = SlotOwners(cache)
    assert owners.sequences == [-1, -1, -1]
    assert not owners.place(70, 0)
    assert not owners.place(71, 1)
    assert owners.place(70, 0)
    assert cache.tokens_in[0][0] == 0
    assert owners.place(71, 0)  # it moves to the front, the other to where it was
    assert owners.sequences == [71, 70, -1]
    assert [held[0] for held in cache.tokens_in] == [100, 0, 200]
    assert not owners.place(72, 1)
    assert owners.sequences == [71, 72, -1]
    assert [held[0] for held in cache.tokens_in] == [100, 0, 200]


# ----------------------------------------------------------------------- one pass's view of it


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("real", [1, 2, 0, (1, 3)])
def test_a_pass_writes_its_nodes_and_reads_what_is_live(
    real: Any, on_device: bool, first: int
) -> None:
    """What is not finite is stored of the text's own nodes, and not of the others."""
    cache = filled()
    before = [stored.clone() for stored in (*cache.keys, *cache.values)]
    slots = torch.tensor([[4, 5, 6], [6, 7, 8]])
    rows = torch.tensor([first, first + 1]) if on_device else first
    given = torch.tensor(real) if isinstance(real, tuple) and on_device else real
    window = CacheView(cache, rows, slots, 10, given)
    assert len(window) == 3
    assert window.get_seq_length() == window.get_query_offset() == 0
    assert window.get_mask_sizes(3) == (10, 0)
    layer = window.of_layer(0)
    assert layer.get_seq_length() == layer.get_query_offset() == 0
    assert layer.get_mask_sizes(3) == (10, 0)
    key = torch.arange(2 * 2 * 3 * 3, dtype=torch.float64).view(2, 2, 3, 3) - 5
    value = torch.arange(2 * 2 * 3 * 4, dtype=torch.float64).view(2, 2, 3, 4) - 7
    bad = {0: torch.nan, 1: torch.inf, 2: -torch.inf}
    for node, number in bad.items():
        key[0, 0, node, 1] = number
        value[1, 1, node, 2] = number
    keys, values = window.update(key, value, 2)
    assert tuple(keys.shape) == (2, 2, 10, 3)
    assert tuple(values.shape) == (2, 2, 10, 4)
    for b in range(2):
        text = real[b] if isinstance(real, tuple) else real
        for node in range(3):
            slot = int(slots[b, node])
            for new, stored, read in ((key, cache.keys[2], keys), (value, cache.values[2], values)):
                wanted = new[b, :, node].clone()
                if node >= text:
                    wanted = wanted.nan_to_num(0.0, 0.0, 0.0)
                assert torch.equal(stored[first + b, :, slot].nan_to_num(-1), wanted.nan_to_num(-1))
                assert torch.equal(read[b, :, slot].nan_to_num(-1), wanted.nan_to_num(-1))
    for stored, old in zip((*cache.keys, *cache.values), before, strict=True):
        touched = torch.zeros(ROWS, SLOTS, dtype=torch.bool)
        if stored.data_ptr() in (cache.keys[2].data_ptr(), cache.values[2].data_ptr()):
            touched[torch.tensor([[first], [first + 1]]), slots] = True
        still = ~touched[:, None, :, None].expand_as(stored)
        assert torch.equal(stored[still], old[still])


@pytest.mark.parametrize("on_device", [True, False])
def test_hidden_states_are_stored_where_their_nodes_are(on_device: bool) -> None:
    cache = filled()
    slots = torch.tensor([[4, 5], [6, 7]])
    window = CacheView(cache, torch.tensor([1, 2]) if on_device else 1, slots, 9, 1)
    states = torch.arange(2 * 2 * HIDDEN, dtype=torch.float32).view(2, 2, 1, HIDDEN)
    window.store(states)
    assert cache.states is not None
    for b in range(2):
        for node in range(2):
            found = cache.states[1 + b, 0, slots[b, node]]
            assert torch.equal(found, states[b, node, 0].double())


def test_a_probe_notes_what_layers_store() -> None:
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


# ------------------------------------------------------------- hidden states of a kept branch

DEPTHS = (1, 3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("kernels", [True, False])
def test_hidden_states_of_a_kept_branch_are_those_of_a_fresh_prefill(
    name: str, kernels: bool
) -> None:
    """Two rows, trees of different shape, paths out of the order of slots; the states of the kept
    nodes, at every depth, and the logits that follow."""
    dtype = torch.float32 if kernels else torch.float64
    model = zoo.tiny(name, dtype=dtype)
    texts = zoo.ragged_prompts(2)
    tokens = torch.tensor([[11, 21, 22, 23, 24, 25], [12, 31, 32, 33, 34, 35]])
    parents = torch.tensor([[-1, 0, 0, 2, 1, 3], [-1, 0, 1, 0, 3, 4]])
    paths = [[0, 2, 3, 5], [0, 3, 4]]

    def ready() -> ModelRunner:
        passes = ModelRunner(model, max_batch=3, max_context=64, spare=16)
        if not kernels:
            passes._decoder = None
        passes.watch(DEPTHS)
        return passes

    def states(passes: ModelRunner, depths: Any = DEPTHS) -> list[torch.Tensor]:
        found = []
        for row, held in enumerate(passes.cache.tokens_in[:2]):
            slots = torch.arange(len(held))[None]
            found.append(passes.states(depths, torch.tensor([row]), slots)[0])
        return found

    drafted = ready()
    for row, text in enumerate(texts):
        drafted.prefill(row, text)
    drafted.run(tokens, parents=parents)
    kept = [[int(tokens[row, node]) for node in path] for row, path in enumerate(paths)]
    drafted.cache.keep(paths, kept)
    fresh = ready()
    for row, text in enumerate(texts):
        fresh.prefill(row, text + kept[row])
    close = {"rtol": 1e-3, "atol": 1e-3} if kernels else {"rtol": 1e-9, "atol": 1e-9}
    # Behind the last layer a prefill leaves nothing: it does not score.
    for one, other in zip(states(drafted, (1,)), states(fresh, (1,)), strict=True):
        torch.testing.assert_close(one, other, **close)
    for row, text in enumerate(texts):
        ids = torch.tensor([text + kept[row]])
        told = model(ids, output_hidden_states=True).hidden_states
        found = states(drafted)[row]
        assert found.shape[1] == len(DEPTHS)
        for place, depth in enumerate(DEPTHS):
            behind = slice(len(text), None) if depth == 3 else slice(None)
            # The models' own norms are in single precision, whatever their weights are.
            wanted = told[depth][0][behind]
            torch.testing.assert_close(found[behind, place], wanted, rtol=1e-3, atol=1e-3)
    follow = torch.tensor([[41], [42]])
    torch.testing.assert_close(drafted.run(follow).clone(), fresh.run(follow).clone(), **close)
