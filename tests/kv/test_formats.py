"""How keys and values are stored: what rounding loses, and what it must not lose."""

from __future__ import annotations

import pytest
import torch

from draftahead.kv.formats import KV_BLOCK, from_rows, mixed, overflows, row_width, to_rows


@pytest.mark.parametrize("dim", [1, 5, 31, 32, 33, 64, 80, 128])
def test_int8_rows_hold_numbers_to_half_a_step_of_their_block(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    numbers = torch.randn(3, 2, dim, generator=generator)
    numbers[0] *= 1e6
    numbers[1, 0] *= torch.logspace(-3, 3, dim)
    rows = to_rows(numbers, torch.uint8)
    assert rows.shape == (3, 2, row_width(dim, torch.uint8))
    assert rows.dtype == torch.uint8
    found = from_rows(rows, dim, torch.float32)
    for start in range(0, dim, KV_BLOCK):
        block, near = (x[..., start : start + KV_BLOCK] for x in (numbers, found))
        largest = block.abs().amax(-1, keepdim=True)
        assert bool(((block - near).abs() <= largest / 254 * 1.001).all())
        at = block.abs().argmax(-1, keepdim=True)  # the largest is held to float32's precision
        torch.testing.assert_close(near.gather(-1, at), block.gather(-1, at), rtol=1e-6, atol=0)


def test_the_bytes_of_an_int8_row() -> None:
    """Scales first, then numbers: as csrc/kv_rows.h reads them."""
    numbers = torch.zeros(48)
    numbers[0], numbers[1], numbers[40], numbers[47] = 254.0, -3.0, 12.7, -6.3
    row = to_rows(numbers, torch.uint8)
    assert row.numel() == row_width(48, torch.uint8) == 2 * 4 + 48
    assert row[:8].view(torch.float32).tolist() == pytest.approx([2.0, 0.1])
    integers = row[8:].view(torch.int8)
    assert {i: int(integers[i]) for i in integers.nonzero().flatten().tolist()} == {
        0: 127,
        1: -2,
        40: 127,
        47: -63,
    }


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_blocks_with_a_number_that_is_not_finite_are_nan(bad: float) -> None:
    numbers = torch.ones(2, 70)
    numbers[0, 40] = bad
    found = from_rows(to_rows(numbers, torch.uint8), 70, torch.float32)
    assert found[0].isnan().nonzero().flatten().tolist() == [*range(32, 64)]
    assert found[1].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-31])
def test_int8_blocks_of_tiny_numbers_are_zeros(size: float) -> None:
    found = from_rows(to_rows(torch.full((33,), size), torch.uint8), 33, torch.float32)
    assert found.tolist() == [0.0] * 33


@pytest.mark.parametrize("dim", [1, 5, 16, 32, 48, 64, 80, 128])
def test_mixed_keys_have_the_same_products_and_are_mixed_back(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    keys, queries = torch.randn(2, 4, 3, dim, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(mixed(mixed(keys)), keys)
    products = (mixed(keys) * mixed(queries)).sum(-1)
    torch.testing.assert_close(products, (keys * queries).sum(-1))


@pytest.mark.parametrize("dim", [16, 32, 80])
def test_a_channel_of_large_numbers_takes_little_precision_from_the_others(dim: int) -> None:
    keys = torch.randn(1000, dim, generator=torch.Generator().manual_seed(1))
    keys[:, 3] = 100
    plain = from_rows(to_rows(keys, torch.uint8), dim, torch.float32)
    turned = mixed(from_rows(to_rows(mixed(keys), torch.uint8), dim, torch.float32))
    block = slice(0, min(dim, KV_BLOCK))
    errors = [(found - keys)[:, block].square().mean().sqrt() for found in (plain, turned)]
    assert errors[1] < errors[0] / 2.5


def test_rows_of_zeros_are_zero_bytes() -> None:
    """Slots are cleared by writing zeros."""
    assert not to_rows(torch.zeros(48), torch.uint8).any()
    assert not from_rows(torch.zeros(56, dtype=torch.uint8), 48, torch.float32).any()


def test_bfloat16_rows_are_rounded_and_others_are_not_copied() -> None:
    numbers = torch.tensor([1.0, 1.00390625, 1.01171875, 3.4e38])
    rows = to_rows(numbers, torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    assert rows.tolist() == [1.0, 1.0, 1.015625, torch.inf]  # ties to even
    assert row_width(7, torch.bfloat16) == row_width(7, torch.float32) == 7
    assert from_rows(rows, 4, torch.float32).dtype == torch.float32
    same = from_rows(numbers, 4, torch.float32)
    assert same.data_ptr() == numbers.data_ptr()


def test_which_stored_numbers_may_overflow() -> None:
    assert overflows(torch.float16, torch.float16)
    assert overflows(torch.bfloat16, torch.float32)
    assert not overflows(torch.bfloat16, torch.bfloat16)
    assert not overflows(torch.uint8, torch.float32)
    assert not overflows(torch.float32, torch.float32)
