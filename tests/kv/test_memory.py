"""Memory of the KV cache on a CPU: it is taken by tokens, whichever slots hold them, and given
back."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

import zoo
from draftahead import LLM, SamplingParams
from draftahead.engine import scheduler
from draftahead.kv import cache as kv
from draftahead.kv import memory
from draftahead.kv.cache import KVCache, LayerKVShape

PAGE = mmap.PAGESIZE
ENTRIES, SLOTS = 4096, 8
needs_pages = pytest.mark.skipif(
    not memory._CAN_RELEASE, reason="the system does not give memory back page by page"
)


def resident(tensor: Tensor) -> int:
    """Bytes of pages that are mapped, of a whole tensor made by `zeros`."""
    size = tensor.untyped_storage().nbytes()
    pages = (ctypes.c_ubyte * -(-size // PAGE))()
    address = ctypes.c_void_p(tensor.untyped_storage().data_ptr())
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), pages) == 0
    return sum(byte & 1 for byte in pages) * PAGE


def make() -> KVCache:
    """Two layers; 1 KiB per token and head."""
    shapes = [LayerKVShape(2, 256, 2, 256)] * 2
    return KVCache(shapes, SLOTS, ENTRIES, torch.float32, torch.device("cpu"))


def used(cache: KVCache) -> int:
    return sum(resident(stored) for stored in cache.tensors())


def write(cache: KVCache, slot: int, count: int) -> None:
    """What a forward over a text does."""
    cache.note_writes(slot, 1, count)
    for stored in cache.tensors():
        stored[:, slot, :, :count] = slot + 1.5
    cache.tokens_in[slot] = [slot] * count


@needs_pages
def test_memory_is_taken_by_tokens_not_by_slots() -> None:
    cache = make()
    assert used(cache) == 0
    for slot in range(7):
        write(cache, slot, 100)
    write(cache, 7, 4000)
    assert cache.used_bytes == (7 * 100 + 4000) * cache.bytes_per_token
    rows = 8 * SLOTS  # of entries: one page more each at the most
    assert cache.used_bytes <= used(cache) <= cache.used_bytes + rows * PAGE
    assert cache.used_bytes < cache.bytes / 6


@needs_pages
@pytest.mark.parametrize("start", [0, 1, 33, 1000, 3999])
def test_erased_entries_are_zeros_and_take_no_memory(start: int) -> None:
    cache = make()
    write(cache, 2, 4000)
    write(cache, 3, 4000)
    cache.erase(2, start, ENTRIES)
    assert cache.written == [0, 0, start, 4000, 0, 0, 0, 0]
    assert cache.tokens_in[2] == [2] * start
    assert used(cache) <= cache.used_bytes + 2 * 8 * 2 * PAGE
    for stored in cache.tensors():
        assert not stored[:, 2, :, start:].any()
        assert bool((stored[:, 2, :, :start] == 3.5).all())
        assert bool((stored[:, 3, :, :4000] == 4.5).all())


@needs_pages
@pytest.mark.parametrize("dim", [5, 48, 65])
def test_rows_that_begin_anywhere_in_a_page(dim: int) -> None:
    cache = KVCache([LayerKVShape(3, dim, 1, dim)], 2, 901, torch.uint8, torch.device("cpu"))
    for stored in cache.tensors():
        stored.fill_(7)
    cache.erase(0, 3, 899)
    for stored in cache.tensors():
        assert not stored[:, 0, :, 3:899].any()
        kept = [stored[:, 0, :, :3], stored[:, 0, :, 899:], stored[:, 1]]
        assert all(bool((part == 7).all()) for part in kept)


@needs_pages
def test_clearing_an_empty_slot_takes_no_memory() -> None:
    cache = make()
    cache.clear_slot(5)
    assert used(cache) <= 8 * 2 * PAGE


@needs_pages
def test_slots_that_are_swapped_keep_only_their_own_memory() -> None:
    cache = make()
    write(cache, 0, 4000)
    write(cache, 1, 10)
    cache.swap_slots(0, 1)
    assert cache.written == [10, 4000, 0, 0, 0, 0, 0, 0]
    assert used(cache) <= cache.used_bytes + 8 * 4 * PAGE
    for stored in cache.tensors():
        assert bool((stored[:, 1, :, :4000] == 1.5).all())
        assert bool((stored[:, 0, :, :10] == 2.5).all())


def test_little_memory_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make()
    write(cache, 0, 4000)
    before = cache.written[0] * cache.bytes_per_token
    monkeypatch.setattr(kv, "MIN_GIVEN_BACK", before - 10 * cache.bytes_per_token + 1)
    cache.give_back(0, 10)
    assert len(cache.tokens_in[0]) == cache.written[0] == 4000
    monkeypatch.setattr(kv, "MIN_GIVEN_BACK", before - 10 * cache.bytes_per_token)
    cache.give_back(0, 10)
    assert len(cache.tokens_in[0]) == cache.written[0] == 10


def test_memory_lives_as_long_as_a_tensor_of_it() -> None:
    found = memory.zeros((3, 1000), torch.float32)
    part = found[1:]
    address = found.data_ptr()
    assert address % 64 == 0  # kernels load vectors of this size
    del found
    part.fill_(2)
    assert float(part.sum()) == 4000
    assert (address in memory._maps) == memory._CAN_RELEASE
    del part
    assert address not in memory._maps


def test_without_pages_zeros_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CAN_RELEASE", False)
    found = memory.zeros((1, 2, 9000, 3), torch.float32)
    assert not found.any()
    found.fill_(3)
    memory.erase(found[:, :1])
    assert not found[:, 0].any()
    assert bool((found[:, 1] == 3).all())


# ------------------------------------------------------------------------------- in an engine


@pytest.fixture
def everything_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "MIN_GIVEN_BACK", 1)


@pytest.mark.usefixtures("everything_is_much")
def test_a_shorter_prompt_gives_back_what_the_one_before_it_used() -> None:
    llm = LLM(zoo.tiny("llama"), "none", max_batch=1, max_context=120)
    cache = llm.engine.verifier.cache
    params = SamplingParams(temperature=0, max_tokens=4)
    long = llm.generate([[5] * 100], params)[0]
    assert 103 <= cache.written[0] <= 105
    short = llm.generate([[5] * 9], params)[0]
    assert cache.written[0] <= 14
    assert f"{cache.used_bytes / 2**30:.2f} GiB used" in " ".join(llm.describe())
    assert llm.generate([[5] * 100], params)[0].token_ids == long.token_ids
    assert llm.generate([[5] * 9], params)[0].token_ids == short.token_ids


@pytest.mark.usefixtures("everything_is_much")
def test_an_idle_slot_gives_its_memory_back_when_others_were_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "UNUSED_ADMISSIONS", 3)
    llm = LLM(zoo.tiny("llama"), "none", max_batch=2, max_context=64)
    cache = llm.engine.verifier.cache
    params = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([[5] * 30, [6] * 40], params)
    held = []
    for _ in range(5):
        llm.generate([[7] * 3], params)
        held.append(len(cache.tokens_in[1]))
    assert held[0] >= 30
    assert held[-1] == cache.written[1] == 0
    assert held == sorted(held, reverse=True)
    assert held.index(0) == 3
