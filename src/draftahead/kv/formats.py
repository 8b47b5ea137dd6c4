"""How keys and values are stored: in the model's dtype, in bfloat16, or in int8 with scales.

A stored key or value is a *row*: its numbers, or bytes that hold the float32 scales of its blocks
of KV_BLOCK numbers, then the numbers as int8 (of keys: `mixed`). Attention reads rows only, also
those of the tokens of the same forward: what a token reads never depends on whether it was drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

# int8: numbers that share a scale. Larger blocks are less precise, smaller ones need more memory.
KV_BLOCK = 32
# Names that users write, and the dtype of the tensors in which rows are stored.
KV_CACHE_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.uint8}
_SMALLEST = 1e-30  # blocks of smaller numbers are stored as zeros: 127 / number must be finite


def row_width(dim: int, dtype: torch.dtype) -> int:
    """Elements of a row for `dim` numbers."""
    return dim + 4 * _num_blocks(dim) if dtype == torch.uint8 else dim


def to_rows(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [..., dim] as rows [..., row_width]. Where a block has a number that is not finite,
    all of it becomes NaN."""
    if dtype != torch.uint8:
        return numbers.to(dtype)
    *shape, dim = numbers.shape
    count = _num_blocks(dim)
    padded = torch.nn.functional.pad(numbers.float(), (0, count * KV_BLOCK - dim))
    blocks = padded.view(*shape, count, KV_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)  # NaN if a number is
    inverse = (127 / largest).where(largest > _SMALLEST, 0)
    scales = (largest / 127).where(largest > _SMALLEST, 0)
    scales = scales.where(largest.isfinite(), torch.nan)
    integers = (blocks * inverse).round().nan_to_num(0, 0, 0).to(torch.int8)
    numbers8 = integers.flatten(-2)[..., :dim].contiguous()
    return torch.cat([scales.view(*shape, count).view(torch.uint8), numbers8.view(torch.uint8)], -1)


def mixed(keys: Tensor) -> Tensor:
    """Keys whose blocks are turned by a Hadamard matrix, which turns them back too. A channel of
    large numbers is then spread over its block, and takes no precision from the others; products
    with queries that are turned too stay what they were."""
    blocks = list(torch.split(keys, KV_BLOCK, -1))
    for index, block in enumerate(blocks):
        size = block.shape[-1]
        if size & (size - 1):  # no power of two: such a matrix does not exist
            continue
        block = block * size**-0.5
        for half in (1 << stage for stage in range(size.bit_length() - 1)):
            one, other = block.view(*block.shape[:-1], -1, 2, half).unbind(-2)
            block = torch.stack([one + other, one - other], -2).flatten(-3)
        blocks[index] = block
    return torch.cat(blocks, -1)


def from_rows(rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows [..., row_width] as numbers [..., dim]; without a copy if they are stored in `dtype`."""
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    size = 4 * _num_blocks(dim)
    scales = rows[..., :size].contiguous().view(torch.float32)
    numbers = rows[..., size:].contiguous().view(torch.int8)
    return (numbers * scales.repeat_interleave(KV_BLOCK, -1)[..., :dim]).to(dtype)


def overflows(stored: torch.dtype, model: torch.dtype) -> bool:
    """Whether a token that has logits may have keys or values that cannot be stored."""
    return stored == torch.float16 or (stored == torch.bfloat16 and model != torch.bfloat16)


def _num_blocks(dim: int) -> int:
    return -(-dim // KV_BLOCK)
