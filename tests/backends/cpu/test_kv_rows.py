"""Rows that the CPU kernels store are those of kv/formats.py, for every head size."""

from __future__ import annotations

import pytest
import torch

from draftahead.backends.cpu.kernels import STORED
from draftahead.kv.formats import KV_BLOCK, KV_CACHE_DTYPES, from_rows, mixed, to_rows
from llama_shaped import llama_shaped, needs_kernels, runner_of

pytestmark = needs_kernels
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


@torch.no_grad()
@pytest.mark.parametrize("kv_cache_dtype", [None, *KV_CACHE_DTYPES])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
def test_rows_of_the_kernels_are_those_of_the_models_own_forward(
    head_dim: int, kv_cache_dtype: str | None
) -> None:
    """Head sizes of a part of a block, of blocks and a part, and of several blocks."""
    model = llama_shaped("llama", head_dim=head_dim, num_hidden_layers=1)
    for projection in (
        model.model.layers[0].self_attn.k_proj,
        model.model.layers[0].self_attn.v_proj,
    ):
        scales = torch.logspace(-2, 2, head_dim).repeat(2)  # blocks of very different sizes
        projection.weight.mul_(scales[:, None])
        projection.bias.mul_(scales)
    runner = runner_of(model, kv_cache_dtype=kv_cache_dtype)
    assert runner.batch_invariant  # by kernels that agree with the model
    exact = runner_of(model)
    logits, keys = {}, {}
    for name, backend in (("kernels", runner._backend), ("own", None)):
        runner._backend, runner.cache.tokens_in[0] = backend, []
        logits[name] = runner.forward(torch.tensor([TEXT]), num_context_tokens=len(TEXT)).logits
        stored = [runner.cache.keys[0], runner.cache.values[0]]
        keys[name] = [rows[0, :, : len(TEXT)].clone() for rows in stored]
    assert runner.cache.keys[0].dtype == STORED[[None, *KV_CACHE_DTYPES].index(kv_cache_dtype)]
    gap = (logits["kernels"] - logits["own"]).norm() / logits["own"].norm()
    assert gap < (1e-5 if kv_cache_dtype is None else 2e-2)
    exact._backend = None
    exact.forward(torch.tensor([TEXT]), num_context_tokens=len(TEXT))
    for index, tensors in enumerate((exact.cache.keys, exact.cache.values)):
        numbers = tensors[0][0, :, : len(TEXT)]
        is_mixed = kv_cache_dtype == "int8" and index == 0
        expected = to_rows(mixed(numbers) if is_mixed else numbers, runner.cache.stored_dtype)
        assert_close(keys["own"][index], expected, head_dim, steps=0.0)
        assert_close(keys["kernels"][index], expected, head_dim, steps=1.01)
        if kv_cache_dtype == "int8":  # a number or a scale differs in its last bit, but few do
            assert (keys["kernels"][index] == expected).float().mean() > 0.85


def assert_close(rows: torch.Tensor, expected: torch.Tensor, head_dim: int, steps: float) -> None:
    """Equal but for so many steps of rounding: what is rounded differs in its last bits."""
    ours, theirs = (from_rows(one, head_dim, torch.float32) for one in (rows, expected))
    for start in range(0, head_dim, KV_BLOCK):
        a, b = (one[..., start : start + KV_BLOCK] for one in (ours, theirs))
        step = {torch.float32: 1e-5 * b.abs().amax(), torch.bfloat16: b.abs() * 2**-7 + 1e-6}.get(
            rows.dtype, b.abs().amax(-1, keepdim=True) / 127
        )
        assert bool(((a - b).abs() <= steps * step).all())
