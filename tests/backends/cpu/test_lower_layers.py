"""Verification reuses lower layers that a draft has computed: the bits are those of a full forward,
and whatever is not certainly the same is computed anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu.decoder import CpuDecoder
from draftahead.backends.cpu.linear import quantize_model
from draftahead.core.types import ForwardOutput
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from llama_shaped import SHAPES, filled_runner, llama_shaped, needs_kernels

pytestmark = needs_kernels
TEXTS = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4]]
CHAIN = torch.tensor([[50, 51, 52], [60, 61, 62]])


def filled(model: Any) -> ModelRunner:
    return filled_runner(model, [*TEXTS, [2, 4]])


def forward(runner: ModelRunner, tokens: Tensor, **options: Any) -> ForwardOutput:
    return runner.forward(tokens, first_slot=1, **options)


@pytest.fixture
def num_missing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every forward that reuses lower layers, how many nodes of a sequence were still to go
    through them."""
    noted: list[int] = []
    after_lower_layers = CpuDecoder._after_lower_layers

    def note(
        self: CpuDecoder, embedded: Tensor, nodes: Any, lower: Any, found: Sequence[Sequence[int]]
    ) -> Tensor:
        noted.append(max(one.count(-1) for one in found))
        return after_lower_layers(self, embedded, nodes, lower, found)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuDecoder, "_after_lower_layers", note)
    return noted


# ----------------------------------------------------------------------- bits of a whole forward


def assert_same(
    reusing: ModelRunner, whole: ModelRunner, tokens: Tensor, parents: Tensor | None = None
) -> None:
    """Logits, argmax, and all keys and values up to the last node."""
    outputs = [forward(runner, tokens, parents=parents) for runner in (reusing, whole)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert outputs[0].argmax is not None
    assert torch.equal(outputs[0].argmax, outputs[1].logits.argmax(-1))
    for slot, text in enumerate(TEXTS, start=1):
        kv_len = len(text) + tokens.shape[1]
        caches = [(*runner.cache.keys, *runner.cache.values) for runner in (reusing, whole)]
        for one, other in zip(*caches, strict=True):
            assert torch.equal(one[slot, :, :kv_len], other[slot, :, :kv_len])


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Of few tokens, so that two trees have much in common."""
    tokens, parents = [50], [-1]
    while len(tokens) < size:
        parent, token = rng.randrange(len(tokens)), 50 + rng.randrange(4)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def random_trees(rng: random.Random, size: int) -> tuple[Tensor, Tensor]:
    trees = [random_tree(rng, size) for _ in TEXTS]
    return torch.tensor([tokens for tokens, _ in trees]), torch.tensor([p for _, p in trees])


def multiply_in_place(hidden: Tensor) -> Tensor:
    return hidden.mul_(-3)  # what a drafter does to hidden states must stay its own


@pytest.mark.parametrize("name", [*SHAPES, "int8"])
def test_bits_are_those_of_a_whole_forward(name: str, num_missing: list[int]) -> None:
    model = llama_shaped("llama" if name == "int8" else name)
    if name == "int8":
        quantize_model(model)
    drafted, fresh, rng = filled(model), filled(model), random.Random(3)
    for trial in range(12):
        exit_transform = None if trial % 2 else multiply_in_place
        layers = LayerSubset(model, range(1 + trial % 3), exit_transform=exit_transform)
        tokens, parents = random_trees(rng, 2 + trial % 7)
        forward(drafted, tokens, parents=parents, layers=layers)
        assert_same(drafted, fresh, *random_trees(rng, 1 + (5 * trial) % 8))
    assert len(num_missing) == 12
    assert 0 in num_missing
    assert max(num_missing) > 2


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_chain_drafted_token_by_token(name: str, num_missing: list[int]) -> None:
    """Longer than the sliding window of one of the models."""
    model = llama_shaped(name)
    drafted, fresh, layers = filled(model), filled(model), LayerSubset(model, (0, 1))
    chain = torch.arange(50, 78).view(2, 14)
    for offset in range(13):
        forward(drafted, chain[:, offset : offset + 1], layers=layers, offset=offset)
    assert_same(drafted, fresh, chain)
    assert num_missing == [1]  # the last token was drafted, and never an input


def test_sequences_of_which_one_was_drafted_otherwise(num_missing: list[int]) -> None:
    model = llama_shaped("llama")
    drafted, fresh = filled(model), filled(model)
    forward(drafted, CHAIN, layers=LayerSubset(model, (0, 1)))
    other = CHAIN.clone()
    other[1, 1] = 13
    assert_same(drafted, fresh, other)
    assert num_missing == [2]


def test_nan_of_the_root_shows(num_missing: list[int]) -> None:
    """It is the target's own: what follows from it must be NaN, too."""
    model = llama_shaped("llama")
    drafted, fresh = filled(model), filled(model)
    model.get_input_embeddings().weight[50] = torch.nan
    forward(drafted, CHAIN, layers=LayerSubset(model, (0, 1, 2)))
    found, expected = forward(drafted, CHAIN).logits, forward(fresh, CHAIN).logits
    assert num_missing == [0]
    assert expected[0].isnan().all()
    assert not expected[1].isnan().any()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[1], expected[1])


# ------------------------------------------------------------------------- what invalidates them


def commit_and_drop(runner: ModelRunner) -> None:
    runner.cache.commit([[0, 2]], [[50, 52]], first_slot=1)
    del runner.cache.tokens_in[1][-2:]


def replace_weights(runner: ModelRunner) -> None:
    linear = runner.model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(2 * linear.weight, requires_grad=False)
    runner.prefill(0, [1, 2])


INVALIDATING: dict[str, Callable[[ModelRunner], object]] = {
    "another forward": lambda runner: forward(runner, torch.tensor([[1, 2, 3, 4]] * 2)),
    "a forward of another slot": lambda runner: runner.forward(torch.tensor([[1]])),
    "another layer subset": lambda runner: forward(
        runner, CHAIN, layers=LayerSubset(runner.model, (0, 2))
    ),
    "swapped slots": lambda runner: runner.cache.swap_slots(1, 2),
    "a copied slot": lambda runner: runner.cache.copy_slot(1, 2),
    "a cleared slot": lambda runner: runner.cache.clear_slot(2),
    "committed tokens": lambda runner: runner.cache.commit([[0]], [[50]], first_slot=1),
    "tokens committed and dropped": commit_and_drop,
    "a shortened sequence": lambda runner: runner.cache.tokens_in[1].pop(),
    "other tokens": lambda runner: runner.cache.tokens_in[1].__setitem__(0, 77),
    "replaced weights": replace_weights,
}


@pytest.mark.parametrize("change", INVALIDATING)
def test_any_other_forward_or_cache_write_invalidates_them(
    change: str, num_missing: list[int]
) -> None:
    model = llama_shaped("llama")
    runner = filled(model)
    forward(runner, CHAIN, layers=LayerSubset(model, (0, 1)))
    INVALIDATING[change](runner)
    forward(runner, CHAIN)
    assert not num_missing


@pytest.mark.parametrize("change", ["swap_slots", "copy_slot", "clear_slot"])
def test_slots_with_equal_tokens_are_not_mistaken_for_each_other(
    change: str, num_missing: list[int]
) -> None:
    model = llama_shaped("llama")
    runner, layers = filled_runner(model, [[5, 6], [5, 6], [5, 6]]), LayerSubset(model, (0, 1))
    forward(runner, CHAIN, layers=layers)
    runner.forward(CHAIN, first_slot=2)
    if change == "clear_slot":
        runner.cache.tokens_in[2].clear()
    forward(runner, CHAIN, layers=layers)
    getattr(runner.cache, change)(*((2,) if change == "clear_slot" else (1, 2)))
    forward(runner, CHAIN)
    assert not num_missing


@pytest.mark.parametrize("first_slot", [0, 2])
def test_a_forward_over_other_slots_reuses_nothing(first_slot: int, num_missing: list[int]) -> None:
    model = llama_shaped("llama")
    runner = filled(model)
    forward(runner, CHAIN, layers=LayerSubset(model, (0, 1)))
    runner.forward(CHAIN, first_slot=first_slot)
    forward(runner, CHAIN, layers=LayerSubset(model, (0, 1)))
    forward(runner, CHAIN[:1])
    assert not num_missing


def test_a_chain_that_continues_nothing_is_not_recorded(num_missing: list[int]) -> None:
    model = llama_shaped("llama")
    runner, layers = filled(model), LayerSubset(model, (0, 1))
    forward(runner, CHAIN, layers=layers, offset=1)
    forward(runner, CHAIN)
    forward(runner, CHAIN, parents=torch.tensor([[-1, 0, 0]] * 2), layers=layers)
    forward(runner, CHAIN[:, :1], layers=layers, offset=3)  # behind a tree: no chain
    forward(runner, CHAIN)
    forward(runner, CHAIN[:, :1], layers=LayerSubset(model, (0,)))
    forward(runner, CHAIN[:, 1:], layers=layers, offset=1)  # behind fewer layers
    forward(runner, CHAIN)
    assert not num_missing


def test_auxiliary_hidden_states_come_from_whole_forwards(num_missing: list[int]) -> None:
    model = llama_shaped("llama")
    runner = filled(model)
    runner.add_aux_layers((1,))
    for slot, text in enumerate(TEXTS, start=1):
        runner.prefill(slot, text)
    forward(runner, CHAIN, layers=LayerSubset(model, (0, 1)))
    forward(runner, CHAIN)
    assert not num_missing


# ---------------------------------------------------------------------------------- whole outputs


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_plain_decoding_to_the_bit(
    count: int | None, temperature: float, num_missing: list[int]
) -> None:
    model, prompts = llama_shaped("qwen2"), zoo.ragged_prompts(3)
    params = SamplingParams(temperature=temperature, max_tokens=32, seed=5, logprobs=0)
    early_exit = {"method": "early_exit", "layers": 2, "num_speculative_tokens": count}

    def logprobs(drafter: Any) -> list[Any]:
        llm = LLM(model, drafter, max_batch=2, exact="replay")
        return [out.logprobs for out in llm.generate(prompts, params)]

    assert logprobs(early_exit) == logprobs("none")
    assert len(num_missing) > 5
