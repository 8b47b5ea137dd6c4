"""The CPU kernels where acceptance depends on them: who sees whom in a tree, windows, guesses that
are not finite, the likeliest tokens among equals. Against the model's own forward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import zoo
from draftahead.backends.cpu import build
from draftahead.models.runner import ModelRunner
from test_runtime import SHAPES, SIZES, shaped

pytestmark = pytest.mark.skipif(build.library() is None, reason=str(build.problem()))
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [9, 8, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]]
POISON = 50


def filled(model: Any) -> ModelRunner:
    """Rows 1 to 3 hold texts; row 0 another one, which no pass is about."""
    passes = ModelRunner(model, max_batch=4, max_context=96, spare=64)
    assert passes.batch_invariant
    for row, text in enumerate(TEXTS, start=1):
        passes.prefill(row, text)
    passes.prefill(0, [2, 2, 2])
    return passes


def random_trees(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one in every row, deep and wide."""
    dice = random.Random(seed)
    parents = [[-1, *(max(0, n - dice.randint(1, 3)) for n in range(1, size))] for _ in TEXTS]
    tokens = [[dice.randrange(1, zoo.VOCABULARY) for _ in range(size)] for _ in TEXTS]
    return torch.tensor(tokens), torch.tensor(parents)


def path_to(parents: torch.Tensor, node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [2, 9, 40])
def test_every_node_of_a_tree_sees_its_own_path(name: str, size: int) -> None:
    """In three rows at once, over windows, with ancestors up to the fortieth node."""
    model = shaped(name)
    passes = filled(model)
    untouched = [tensor[0].clone() for tensor in (*passes.cache.keys, *passes.cache.values)]
    tokens, parents = random_trees(size, size)
    found = passes.run(tokens, first=1, parents=parents)
    for row, text in enumerate(TEXTS):
        for node in sorted({1, size - 1, size // 2, size // 3, size // 5}):
            path = path_to(parents[row], node)
            ids = torch.tensor([text + tokens[row, path].tolist()])
            wanted = model(ids).logits[0, -1]
            torch.testing.assert_close(found[row, node], wanted, rtol=1e-3, atol=1e-3)
    for tensor, old in zip((*passes.cache.keys, *passes.cache.values), untouched, strict=True):
        assert torch.equal(tensor[0], old)


@torch.no_grad()
@pytest.mark.parametrize("real", [1, 2])
def test_guesses_that_are_not_finite_reach_nobody_and_texts_that_are_not_do(real: int) -> None:
    """Of `real` nodes that are the text's, NaN shows in all that follow; of a guess, in itself and
    its own children, and it leaves nothing in the cache."""
    model = shaped("llama")
    passes = filled(model)
    model.get_input_embeddings().weight[POISON] = torch.nan
    parents = torch.tensor([[-1, 0, 1, 0, 3]])
    for bad in range(5):
        tokens = torch.tensor([[20, 21, 22, 23, 24]])
        tokens[0, bad] = POISON
        logits = passes.run(tokens, first=1, parents=parents, real=real).clone()
        assert passes.best is not None
        for node in range(5):
            path = path_to(parents[0], node)
            sick = node == bad or (bad in path and bad < real)
            assert bool(logits[0, node].isnan().any()) == sick
            assert (int(passes.best[0, node]) == -1) == sick
        for stored in (*passes.cache.keys, *passes.cache.values):
            held = stored[1, :, len(TEXTS[0]) : len(TEXTS[0]) + 5].isfinite().all(-1).all(0)
            if bad >= real:
                assert held.all()
        deep = passes.cache.keys[1][1, :, len(TEXTS[0]) + bad]
        assert bool(deep.isnan().any()) == (bad < real)
        deep = passes.cache.values[1][1, :, len(TEXTS[0]) + bad]
        assert bool(deep.isnan().any()) == (bad < real)


@pytest.mark.parametrize("vocabulary", [97, 256, 531])
def test_the_likeliest_tokens_among_equals(vocabulary: int) -> None:
    """Of equals the first ones, in order, wherever they stand; -1 where one is NaN or infinite."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": vocabulary}))).eval()
    passes = ModelRunner(model, max_batch=1, max_context=64, spare=16)
    head = model.lm_head.weight.requires_grad_(False)
    tokens = torch.tensor([[5, 6, 7]])
    clean = head.clone()
    last = vocabulary - 1

    def top() -> list[list[int]]:
        passes.run(tokens)
        assert passes.top is not None
        return passes.top[0].tolist()

    places, seen = [1, 17, 55, last, last // 2, 40, last - 1], 0
    for count in (4, 5, 7):
        head.copy_(clean * 0.01)
        logits = passes.run(tokens)[0]
        head[places[:count]] = clean[0] * 100  # all alike, and far from the others
        sign = passes.run(tokens)[0, :, places[0]]
        for row, ids in enumerate(top()):
            if sign[row] > logits[row].max():
                assert ids == sorted(places[:count])[:4]
                seen += 1
    assert seen
    head.copy_(clean)
    for place in (*range(0, vocabulary, 29), last, last - 1, last - 2):
        head[place] = torch.nan
        assert [ids[0] for ids in top()] == [-1] * 3
        head.copy_(clean)
        head[place] = 0.0
        head[place, 0] = torch.inf  # so that the logit is infinite, by the sign of one number
        logits = passes.run(tokens)[0, :, place]
        assert logits.isinf().all()
        for logit, ids in zip(logits, top(), strict=True):
            assert (ids[0] == -1) == (logit > 0)
            assert place not in ids[:1]
        head.copy_(clean)
    head.zero_()
    head[:, 0] = torch.inf  # all of them, above or below
    assert [ids[0] for ids in top()] == [-1] * 3
    head.copy_(clean)
    one_block = torch.zeros_like(head)  # the likeliest four in four places, each alone in its own
    for rank, place in enumerate((last, 3, last // 2, 30)):
        one_block[place] = clean[0] * (8 - rank)
    head.copy_(one_block)
    logits = passes.run(tokens)[0]
    wanted = logits.topk(4).indices.tolist()
    for row, ids in enumerate(top()):
        if logits[row].max() > 0:
            assert ids == wanted[row]
