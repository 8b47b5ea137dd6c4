"""Trees in the CPU kernels: a node attends to its own path, and NaN goes where it belongs. Against
the model's own forward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import zoo
from draftahead.kv.formats import KV_CACHE_DTYPES, from_rows
from draftahead.models.runner import ModelRunner
from llama_shaped import SHAPES, filled_runner, llama_shaped, needs_kernels, runner_of

pytestmark = needs_kernels
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [9, 8, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]]
NAN_TOKEN = 50


def filled(model: Any, kv_cache_dtype: str | None = None) -> ModelRunner:
    """Slots 1 to 3 hold the texts; slot 0 another one, which no forward is about."""
    runner = filled_runner(model, TEXTS, kv_cache_dtype)
    assert runner.batch_invariant
    runner.prefill(0, [2, 2, 2])
    return runner


def random_trees(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one for every sequence, deep and wide."""
    rng = random.Random(seed)
    parents = [[-1, *(max(0, n - rng.randint(1, 3)) for n in range(1, size))] for _ in TEXTS]
    tokens = [[rng.randrange(1, zoo.VOCABULARY) for _ in range(size)] for _ in TEXTS]
    return torch.tensor(tokens), torch.tensor(parents)


def path_to(parents: torch.Tensor, node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [2, 9, 40])
def test_every_node_of_a_tree_attends_to_its_own_path(name: str, size: int) -> None:
    """In three slots at once, over sliding windows, with ancestors up to the fortieth node."""
    model = llama_shaped(name)
    runner = filled(model)
    stored = [*runner.cache.keys, *runner.cache.values]
    before = [tensor[0].clone() for tensor in stored]
    tokens, parents = random_trees(size, size)
    logits = runner.forward(tokens, first_slot=1, parents=parents).logits
    for b, text in enumerate(TEXTS):
        for node in sorted({1, size - 1, size // 2, size // 3, size // 5}):
            path = path_to(parents[b], node)
            expected = model(torch.tensor([text + tokens[b, path].tolist()])).logits[0, -1]
            torch.testing.assert_close(logits[b, node], expected, rtol=1e-3, atol=1e-3)
    for tensor, old in zip(stored, before, strict=True):
        assert torch.equal(tensor[0], old)


@torch.no_grad()
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_rounded_keys_and_values_are_read_as_in_the_models_own_forward(
    name: str, kv_cache_dtype: str
) -> None:
    """Rows that one of them has stored are read by the other, and they store nearly the same."""
    runner = filled(llama_shaped(name), kv_cache_dtype)
    tokens, parents = random_trees(7, 9)
    found, stored = [], []
    for backend in (runner._backend, None):
        runner._backend = backend
        found.append(runner.forward(tokens, first_slot=1, parents=parents).logits)
        numbers = [
            from_rows(rows[1:, :, :22], 32, torch.float32)
            for rows in (*runner.cache.keys, *runner.cache.values)
        ]
        stored.append(torch.stack(numbers))
    gap = (found[0] - found[1]).norm() / found[1].norm()
    assert gap < (2e-3 if kv_cache_dtype == "bfloat16" else 6e-3)
    gap = (stored[0] - stored[1]).norm() / stored[1].norm()
    assert gap < (1e-3 if kv_cache_dtype == "bfloat16" else 3e-3)


@torch.no_grad()
def test_attention_over_more_scores_than_are_held_at_once() -> None:
    """128 MiB of scores: 64 nodes of 6 heads behind 90,000 tokens are computed in two parts."""
    model = llama_shaped("llama", num_hidden_layers=1, max_position_embeddings=100_000)
    runner, length = runner_of(model, max_context=90_100), 90_000
    assert 64 * 6 * length > 2**25
    generator = torch.Generator().manual_seed(1)
    for stored in (*runner.cache.keys, *runner.cache.values):
        stored[0, :, :length].normal_(generator=generator)
    runner.cache.tokens_in[0] = [0] * length
    tokens = torch.randint(1, 97, (1, 64), generator=generator)
    parents = torch.arange(-1, 63)[None]
    together = runner.forward(tokens, parents=parents).logits[0]
    for node in (0, 30, 60, 63):
        alone = runner.forward(tokens[:, : node + 1][:, -1:], offset=node).logits[0]
        assert torch.equal(alone[0], together[node])


@torch.no_grad()
@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("num_context", [1, 2])
@pytest.mark.parametrize("kv_cache_dtype", [None, *KV_CACHE_DTYPES])
def test_nan_of_a_drafted_token_reaches_no_other_node_and_nan_of_context_does(
    kv_cache_dtype: str | None, num_context: int, bad: int
) -> None:
    """NaN of a context token shows in all that follow. That of a drafted token shows in its own
    logits only, and is not stored in the cache."""
    model, length = llama_shaped("llama"), len(TEXTS[0])
    runner = filled(model, kv_cache_dtype)
    model.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
    parents = torch.tensor([[-1, 0, 1, 0, 3]])
    tokens = torch.tensor([[20, 21, 22, 23, 24]])
    tokens[0, bad] = NAN_TOKEN
    output = runner.forward(tokens, first_slot=1, parents=parents, num_context_tokens=num_context)
    assert output.argmax is not None
    for node in range(5):
        follows = bad < num_context and bad in path_to(parents[0], node)
        is_nan = node == bad or follows
        assert bool(output.logits[0, node].isnan().any()) == is_nan
        assert (int(output.argmax[0, node]) == -1) == is_nan
    cache = runner.cache
    numbers = [from_rows(r, 32, torch.float32) for r in (*cache.keys, *cache.values)]
    if bad >= num_context:
        for stored in numbers:
            assert stored[1, :, length : length + 5].isfinite().all()
    for stored in (numbers[1], numbers[4]):  # keys and values of the second layer
        assert bool(stored[1, :, length + bad].isnan().any()) == (bad < num_context)


@torch.no_grad()
def test_scores_of_extreme_size() -> None:
    """Hundreds apart, more than an exponential can hold: the largest counts, wherever it lies."""
    model = llama_shaped("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(20)
    runner = filled(model)
    tokens = torch.randint(1, 97, (1, 60), generator=torch.Generator().manual_seed(3))
    logits = runner.forward(tokens, first_slot=1).logits[0]
    expected = model(torch.tensor([TEXTS[0] + tokens[0].tolist()])).logits[0, len(TEXTS[0]) :]
    assert logits.isfinite().all()
    assert (logits - expected).norm() < 1e-3 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1])
def test_nan_of_any_bits_is_nan_in_bfloat16(bits: int) -> None:
    """Rounded as a number, the last two would become zeros."""
    model = llama_shaped("llama")
    runner, length = filled_runner(model, TEXTS, "bfloat16"), len(TEXTS[0])
    number = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    model.model.layers[0].self_attn.v_proj.bias[3] = number
    runner.forward(torch.tensor([[5, 6]]), first_slot=1, num_context_tokens=2)
    assert runner.cache.values[0][1, 0, length : length + 2, 3].isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("number", [3.3e38, 3.4e38])
def test_a_drafted_token_whose_key_rounds_to_infinity_has_no_logits(
    number: float, by_kernels: bool
) -> None:
    """In bfloat16 the largest float32 numbers do; its own row would hold something else."""
    model = llama_shaped("llama")
    runner = filled_runner(model, TEXTS, "bfloat16")
    attention = model.model.layers[0].self_attn
    attention.v_proj.bias[3] = number
    attention.v_proj.weight[3] = 0
    attention.o_proj.weight.zero_()
    runner._backend = runner._backend if by_kernels else None
    output = runner.forward(torch.tensor([[5, 6]]), first_slot=1, num_context_tokens=1)
    stored = runner.cache.values[0][1, 0, len(TEXTS[0]) : len(TEXTS[0]) + 2, 3]
    assert stored.isfinite().tolist() == [number == 3.3e38, True]
    assert bool(output.logits[0, 1].isnan().any()) == (number == 3.4e38)
