"""Trees in the CPU kernels: a node attends to its own path, and NaN goes where it belongs. Against
the model's own forward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import zoo
from draftahead.models.runner import ModelRunner
from llama_shaped import SHAPES, filled_runner, llama_shaped, needs_kernels

pytestmark = needs_kernels
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [9, 8, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]]
NAN_TOKEN = 50


def filled(model: Any) -> ModelRunner:
    """Slots 1 to 3 hold the texts; slot 0 another one, which no forward is about."""
    runner = filled_runner(model, TEXTS)
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
@pytest.mark.parametrize("bad", range(5))
@pytest.mark.parametrize("num_context", [1, 2])
def test_nan_of_a_drafted_token_reaches_no_other_node_and_nan_of_context_does(
    num_context: int, bad: int
) -> None:
    """NaN of a context token shows in all that follow. That of a drafted token shows in its own
    logits only, and is not stored in the cache."""
    model, length = llama_shaped("llama"), len(TEXTS[0])
    runner = filled(model)
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
    if bad >= num_context:
        for stored in (*cache.keys, *cache.values):
            assert stored[1, :, length : length + 5].isfinite().all()
    for stored in (cache.keys[1], cache.values[1]):  # of the second layer
        assert bool(stored[1, :, length + bad].isnan().any()) == (bad < num_context)
