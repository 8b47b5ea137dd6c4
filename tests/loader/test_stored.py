"""Stored weights: every kind dequantized as the gguf package does, bit for bit, and the layers over
them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch.nn import functional as F

from draftahead.loader import stored
from draftahead.loader.stored import (
    STORED_KINDS,
    Origin,
    StoredEmbedding,
    StoredLinear,
    dequantize,
    float_state,
    weight_of,
    widened,
)
from tiny_gguf import HALVES, random_rows

# Bits of half-precision scales: zeros, subnormals, the largest, infinities, NaN; also of bfloat16.
EXTREME = [0, 0x8000, 1, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7FC0, 0xFF80, 0x3C00]


def expected(rows: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.dequantize(rows, GGMLQuantizationType[kind]))


def assert_same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    mine = ours.numpy()
    assert np.array_equal(np.isnan(mine), np.isnan(theirs))
    known = ~np.isnan(theirs)  # which NaN it is, nothing depends on
    assert np.array_equal(mine.view(np.uint32)[known], theirs.view(np.uint32)[known])


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_sizes_are_those_of_the_format(kind: str) -> None:
    assert STORED_KINDS[kind] == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_random_bytes_are_dequantized_bit_for_bit(kind: str) -> None:
    rng = np.random.default_rng(1)
    block_bytes = STORED_KINDS[kind][1]
    rows = rng.integers(0, 256, (67, 3 * block_bytes), dtype=np.uint8)  # scales of any size, NaN
    assert_same_bits(dequantize(torch.from_numpy(rows), kind), expected(rows, kind))


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_extreme_scales_are_dequantized_bit_for_bit(kind: str) -> None:
    pairs = [(a, b) for a in EXTREME for b in EXTREME]
    rows = random_rows(kind, len(pairs), 2)
    blocks = rows.reshape(len(pairs), 2, -1)
    for row, values in zip(blocks, pairs, strict=True):
        for at, value in zip(HALVES.get(kind, (0,)), values, strict=False):
            row[:, at : at + 2] = np.array([value], np.uint16).view(np.uint8)
    theirs = expected(rows, kind)
    assert np.isnan(theirs).any()
    assert_same_bits(dequantize(torch.from_numpy(rows), kind), theirs)


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_a_linear_layer_computes_with_the_dequantized_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * STORED_KINDS[kind][0] if STORED_KINDS[kind][0] > 1 else 48
    blocks = size // STORED_KINDS[kind][0]
    rows = random_rows(kind, 37, blocks)
    bias = torch.randn(37)
    layer = StoredLinear(torch.from_numpy(rows), kind, size, bias=bias)
    weight = torch.from_numpy(expected(rows, kind))
    x = torch.randn(2, 5, size)
    whole = layer(x)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-3 * float(weight.abs().max()))
    close(whole, F.linear(x, weight, bias))
    assert torch.equal(layer.dequantized(), weight)
    ids = torch.tensor([36, 0, 7, 7])
    assert torch.equal(layer.dequantized(ids), weight[ids])
    monkeypatch.setattr(stored, "SLICE_WEIGHTS", 10 * size)  # 10 rows at a time: 4 slices
    assert torch.equal(layer.dequantized(), weight)
    close(layer(x), whole)


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_an_embedding_gives_the_rows_of_its_ids(kind: str) -> None:
    size = STORED_KINDS[kind][0] if STORED_KINDS[kind][0] > 1 else 48
    rows = random_rows(kind, 11, size // STORED_KINDS[kind][0])
    layer = StoredEmbedding(torch.from_numpy(rows), kind, size, padding_idx=3)
    weight = torch.from_numpy(expected(rows, kind))
    for ids in (torch.tensor(4), torch.tensor([[0, 10, 3], [3, 3, 9]])):
        assert torch.equal(layer(ids), F.embedding(ids, weight))
    assert layer.padding_idx == 3


def test_an_input_of_another_dtype_is_computed_in_float32_and_returned_in_its_own() -> None:
    rows = torch.from_numpy(random_rows("Q8_0", 5, 2))
    layer, x = StoredLinear(rows, "Q8_0", 64), torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x), layer(x.float()).bfloat16())


def test_gradients_reach_the_input() -> None:
    layer = StoredLinear(torch.from_numpy(random_rows("Q4_0", 5, 1)), "Q4_0", 32)
    x = torch.randn(2, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], layer.dequantized().sum(0))


def test_a_subset_has_its_outputs_only() -> None:
    rows = torch.from_numpy(random_rows("Q6_K", 9, 1))
    origin = Origin(Path("m.gguf"), "t")
    layer = StoredLinear(rows, "Q6_K", 256, bias=torch.arange(9.0), origin=origin)
    ids, x = torch.tensor([8, 2, 2]), torch.randn(4, 256)
    subset = layer.subset(ids)
    assert (subset.out_features, layer.out_features) == (3, 9)
    assert (subset.origin, layer.origin) == (None, origin)  # it is no tensor of a file
    torch.testing.assert_close(subset(x), layer(x)[:, ids], rtol=1e-3, atol=1e-3)
    assert torch.equal(layer.rows, rows)


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8 \[n, 144\]"):
        StoredLinear(torch.zeros(2, 143, dtype=torch.uint8), "Q4_K", 256)
    with pytest.raises(ValueError, match="no whole number of Q4_K blocks"):
        StoredLinear(torch.zeros(2, 144, dtype=torch.uint8), "Q4_K", 255)
    with pytest.raises(ValueError, match="for 2 outputs"):
        rows = torch.zeros(2, 144, dtype=torch.uint8)
        StoredLinear(rows, "Q4_K", 256, bias=torch.zeros(3))


def test_weights_are_not_found_by_accident() -> None:
    layer = StoredLinear(torch.from_numpy(random_rows("Q4_K", 2, 1)), "Q4_K", 256)
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match=r"kept as they are stored \(Q4_K\).*dtype='float32'"):
        _ = layer.weight
    assert copy.deepcopy(layer).rows.data_ptr() != layer.rows.data_ptr()


def test_a_state_dict_holds_numbers_that_torch_can_load() -> None:
    rows, bias = torch.from_numpy(random_rows("Q5_K", 3, 1)), torch.randn(3)
    layer = StoredLinear(rows, "Q5_K", 256, bias=bias)
    embedding = StoredEmbedding(rows, "Q5_K", 256)
    state = torch.nn.ModuleList([layer, embedding]).state_dict()
    plain = torch.nn.ModuleList([torch.nn.Linear(256, 3), torch.nn.Embedding(3, 256)])
    plain.load_state_dict(state)
    x, ids = torch.randn(2, 256), torch.tensor([2, 0])
    torch.testing.assert_close(plain[0](x), layer(x))
    assert torch.equal(plain[1](ids), embedding(ids))
    assert dict(float_state(layer)).keys() == {"weight", "bias"}
    assert torch.equal(widened(layer)(x), plain[0](x))
    assert torch.equal(weight_of(layer, ids), weight_of(plain[0], ids))
