"""Verification from above: lower layers that a draft has been through are not done again, the bits
stay those of a whole pass, and whatever is not surely the same is done anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu import build
from draftahead.backends.cpu.decoder import CpuDecoder
from draftahead.backends.cpu.linear import quantize_model
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from test_runtime import SHAPES, shaped

pytestmark = pytest.mark.skipif(build.library() is None, reason=str(build.problem()))
TEXTS = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4]]


CHAIN = torch.tensor([[50, 51, 52], [60, 61, 62]])


def filled(model: Any, texts: list[list[int]] = TEXTS) -> ModelRunner:
    passes = ModelRunner(model, max_batch=4, max_context=64, scratch_entries=16)
    for row, text in enumerate(texts, start=1):
        passes.prefill(row, text)
    return passes


@pytest.fixture
def done_below(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every pass from above, how many nodes a row still had to go through the lower layers."""
    found: list[int] = []
    real = CpuDecoder._from_above

    def noted(self: CpuDecoder, x: Tensor, nodes: Any, below: Any, come: Any) -> Tensor:
        found.append(max(row.count(-1) for row in come))
        return real(self, x, nodes, below, come)

    monkeypatch.setattr(CpuDecoder, "_from_above", noted)
    return found


def random_tree(dice: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Few tokens, so that two trees have much in common."""
    nodes, parents = [50], [-1]
    while len(nodes) < size:
        parent, token = dice.randrange(len(nodes)), 50 + dice.randrange(4)
        if (parent, token) not in zip(parents, nodes, strict=True):
            nodes.append(token)
            parents.append(parent)
    return nodes, parents


def random_trees(dice: random.Random, size: int) -> tuple[Tensor, Tensor]:
    pairs = [random_tree(dice, size) for _ in TEXTS]
    return torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])


def everything(passes: ModelRunner, logits: Tensor, width: int) -> list[Tensor]:
    """The logits, and all keys and values up to the last node."""
    found = [logits.clone()]
    for row, text in enumerate(TEXTS, start=1):
        tensors = (*passes.cache.keys, *passes.cache.values)
        found += [tensor[row, :, : len(text) + width].clone() for tensor in tensors]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [*SHAPES, "int8"])
def test_the_same_bits_as_a_whole_pass(name: str, done_below: list[int]) -> None:
    model = shaped("llama" if name == "int8" else name)
    if name == "int8":
        quantize_model(model)
    drafted, fresh, dice = filled(model), filled(model), random.Random(3)
    for trial in range(12):
        part = LayerSubset(model, range(1 + trial % 3), exit=None if trial % 2 else _spoiled)
        tokens, parents = random_trees(dice, 2 + trial % 7)
        drafted.forward(tokens, first_slot=1, parents=parents, layers=part)
        tokens, parents = random_trees(dice, 1 + (5 * trial) % 8)
        found = drafted.forward(tokens, first_slot=1, parents=parents)
        expected = fresh.forward(tokens, first_slot=1, parents=parents)
        width = tokens.shape[1]
        assert same(everything(drafted, found, width), everything(fresh, expected, width))
        assert drafted.best is not None and torch.equal(drafted.best, expected.argmax(-1))
    assert len(done_below) == 12 and 0 in done_below and max(done_below) > 2


def _spoiled(states: Tensor) -> Tensor:
    return states.mul_(-3)  # in place: what a drafter does to them must stay its own


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_chain_fed_token_by_token(name: str, done_below: list[int]) -> None:
    """Longer than the window of one of them."""
    model = shaped(name)
    drafted, fresh, part = filled(model), filled(model), LayerSubset(model, (0, 1))
    chain = torch.arange(50, 78).view(2, 14)
    for ahead in range(13):
        drafted.forward(chain[:, ahead : ahead + 1], first_slot=1, layers=part, offset=ahead)
    found = drafted.forward(chain, first_slot=1)
    assert done_below == [1]  # the last token, which was only guessed
    assert same(
        everything(drafted, found, 14), everything(fresh, fresh.forward(chain, first_slot=1), 14)
    )


def test_rows_of_which_one_was_guessed_otherwise(done_below: list[int]) -> None:
    model = shaped("llama")
    drafted, fresh, part = filled(model), filled(model), LayerSubset(model, (0, 1))
    drafted.forward(CHAIN, first_slot=1, layers=part)
    other = CHAIN.clone()
    other[1, 1] = 13
    found = drafted.run(other, first_slot=1)
    assert done_below == [2]
    assert same(everything(drafted, found, 3), everything(fresh, fresh.run(other, first_slot=1), 3))


VOID: dict[str, Callable[[ModelRunner, Any], object]] = {
    "another pass": lambda passes, model: passes.forward(
        torch.tensor([[1, 2, 3, 4]] * 2), first_slot=1
    ),
    "a pass of another row": lambda passes, model: passes.forward(torch.tensor([[1]])),
    "another part": lambda passes, model: passes.run(
        CHAIN, first_slot=1, layers=LayerSubset(model, (0, 2))
    ),
    "rows that changed places": lambda passes, model: passes.cache.swap_slots(1, 2),
    "a row that was copied": lambda passes, model: passes.cache.copy_slot(1, 2),
    "a row that was forgotten": lambda passes, model: passes.cache.clear_slot(2),
    "tokens that were kept": lambda passes, model: passes.cache.commit([[0]], [[50]], first_slot=1),
    "tokens that were kept, and dropped again": lambda passes, model: _kept_and_dropped(passes),
    "a text cut short": lambda passes, model: passes.cache.tokens_in[1].pop(),
    "another text": lambda passes, model: passes.cache.tokens_in[1].__setitem__(0, 77),
    "weights that were replaced": lambda passes, model: _replace(passes, model),
}


def _kept_and_dropped(passes: ModelRunner) -> None:
    passes.cache.commit([[0, 2]], [[50, 52]], first_slot=1)
    del passes.cache.tokens_in[1][-2:]


def _replace(passes: ModelRunner, model: Any) -> None:
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(2 * linear.weight, requires_grad=False)
    passes.prefill(0, [1, 2])


@pytest.mark.parametrize("what", VOID)
def test_what_makes_it_void(what: str, done_below: list[int]) -> None:
    model = shaped("llama")
    passes = filled(model)
    passes.forward(CHAIN, first_slot=1, layers=LayerSubset(model, (0, 1)))
    VOID[what](passes, model)
    passes.forward(CHAIN, first_slot=1)
    assert not done_below


@pytest.mark.parametrize("change", ["swap_slots", "copy_slot", "clear_slot"])
def test_rows_that_look_alike_are_not_taken_for_each_other(
    change: str, done_below: list[int]
) -> None:
    model = shaped("llama")
    passes, part = filled(model, [[5, 6], [5, 6], [5, 6]]), LayerSubset(model, (0, 1))
    passes.forward(CHAIN, first_slot=1, layers=part)
    passes.forward(CHAIN, first_slot=2)
    if change == "clear_slot":
        passes.cache.tokens_in[2].clear()
    passes.forward(CHAIN, first_slot=1, layers=part)
    getattr(passes.cache, change)(*((2,) if change == "clear_slot" else (1, 2)))
    passes.forward(CHAIN, first_slot=1)
    assert not done_below


@pytest.mark.parametrize("first", [0, 2])
def test_other_rows_are_another_affair(first: int, done_below: list[int]) -> None:
    model = shaped("llama")
    passes = filled(model)
    passes.forward(CHAIN, first_slot=1, layers=LayerSubset(model, (0, 1)))
    passes.forward(CHAIN, first_slot=first)
    passes.forward(CHAIN, first_slot=1, layers=LayerSubset(model, (0, 1)))
    passes.forward(CHAIN[:1], first_slot=1)
    assert not done_below


def test_a_chain_that_follows_nothing_is_not_noted(done_below: list[int]) -> None:
    model = shaped("llama")
    passes, part = filled(model), LayerSubset(model, (0, 1))
    passes.forward(CHAIN, first_slot=1, layers=part, offset=1)
    passes.forward(CHAIN, first_slot=1)
    passes.forward(CHAIN, first_slot=1, parents=torch.tensor([[-1, 0, 0]] * 2), layers=part)
    passes.forward(CHAIN[:, :1], first_slot=1, layers=part, offset=3)  # behind a tree: no chain
    passes.forward(CHAIN, first_slot=1)
    passes.forward(CHAIN[:, :1], first_slot=1, layers=LayerSubset(model, (0,)))
    passes.forward(CHAIN[:, 1:], first_slot=1, layers=part, offset=1)  # behind fewer layers
    passes.forward(CHAIN, first_slot=1)
    assert not done_below


def test_a_root_that_is_not_finite_shows(done_below: list[int]) -> None:
    """It is the target's own: what follows from it must, too."""
    model = shaped("llama")
    drafted, fresh = filled(model), filled(model)
    model.get_input_embeddings().weight[50] = torch.nan
    drafted.forward(CHAIN, first_slot=1, layers=LayerSubset(model, (0, 1, 2)))
    found, expected = drafted.forward(CHAIN, first_slot=1), fresh.forward(CHAIN, first_slot=1)
    assert done_below == [0] and expected[0].isnan().all() and not expected[1].isnan().any()
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found[1], expected[1])


def test_states_that_are_watched_come_from_whole_passes(done_below: list[int]) -> None:
    model = shaped("llama")
    passes, part = filled(model), LayerSubset(model, (0, 1))
    passes.capture_hidden((1,))
    for row, text in enumerate(TEXTS, start=1):
        passes.prefill(row, text)
    passes.forward(CHAIN, first_slot=1, layers=part)
    passes.forward(CHAIN, first_slot=1)
    assert not done_below


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("number", [None, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_whole_passes(
    number: int | None, temperature: float, done_below: list[int]
) -> None:
    model, prompts = shaped("qwen2"), zoo.ragged_prompts(3)
    sampling = SamplingParams(temperature=temperature, max_tokens=32, seed=5, logprobs=0)
    config = {"method": "early_exit", "layers": 2, "num_speculative_tokens": number}

    def texts(drafter: Any) -> list[Any]:
        llm = LLM(model, drafter, max_batch=2, exact="replay")
        return [out.logprobs for out in llm.generate(prompts, sampling)]

    assert texts(config) == texts("none")  # to the last bit
    assert len(done_below) > 5
