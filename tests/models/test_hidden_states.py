"""Captured hidden states are transformers' own, of every token that a slot holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from draftahead.backends.modules import is_patched
from draftahead.errors import ConfigError
from draftahead.models.layer_subset import aux_hidden_states
from draftahead.models.runner import ModelRunner
from llama_shaped import llama_shaped, runner_of

KINDS = ["llama_kernels", "llama", "gemma3", "gpt2"]


def model_of(kind: str) -> Any:
    return llama_shaped("llama") if kind == "llama_kernels" else zoo.tiny(kind)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "phi3", "qwen3_moe"])
@torch.no_grad()
def test_hidden_states_are_stored_as_transformers_counts_layers(name: str) -> None:
    """After each layer, and behind the last norm; and the model is left as it was."""
    model, ids = zoo.tiny(name), torch.tensor([[3, 1, 4, 1, 5]])
    depths = range(1, model.config.num_hidden_layers + 1)
    with aux_hidden_states(model, depths) as found:
        model(ids)
    assert not any(is_patched(module) for module in model.modules())
    theirs = model(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(found[depth], theirs[depth]) for depth in depths)


@pytest.mark.parametrize("kind", ["llama_kernels", "gpt2"])
def test_a_forward_stores_the_auxiliary_hidden_states(kind: str) -> None:
    model = model_of(kind)
    num_layers = model.config.num_hidden_layers
    runner = runner_of(model)
    assert runner.batch_invariant == (kind == "llama_kernels")
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    runner.forward(tokens)
    assert runner.cache.hidden is None
    runner.add_aux_layers((num_layers,))
    runner.add_aux_layers((1,))
    runner.forward(tokens)
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True).hidden_states
    slots, entries = torch.tensor([0]), torch.arange(5)[None]
    for depths in ((1, num_layers), (num_layers, 1), (1,)):
        expected = torch.stack([theirs[depth] for depth in depths], 2)
        found = runner.hidden_states(depths, slots, entries)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    for wrong in ((), (0,), (num_layers + 1,)):
        with pytest.raises(ConfigError, match="hidden states can be stored after layers 1 to"):
            runner.add_aux_layers(wrong)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_of_an_accepted_branch_are_those_of_a_fresh_prefill(kind: str) -> None:
    """Two slots, trees of different shape, paths that skip entries: the states of the accepted
    nodes at every depth, and the logits that follow."""
    model, depths = model_of(kind), (1, 3)
    prompts = zoo.ragged_prompts(2)
    tokens = torch.tensor([[11, 21, 22, 23, 24, 25], [12, 31, 32, 33, 34, 35]])
    parents = torch.tensor([[-1, 0, 0, 2, 1, 3], [-1, 0, 1, 0, 3, 4]])
    paths = [[0, 2, 3, 5], [0, 3, 4]]
    accepted = [tokens[b, path].tolist() for b, path in enumerate(paths)]
    texts = [prompt + new for prompt, new in zip(prompts, accepted, strict=True)]
    close = (
        {"rtol": 1e-3, "atol": 1e-3} if kind == "llama_kernels" else {"rtol": 1e-9, "atol": 1e-9}
    )

    def capturing(prefilled: list[list[int]]) -> ModelRunner:
        runner = runner_of(model, max_batch=3)
        assert runner.batch_invariant == (kind == "llama_kernels")
        runner.add_aux_layers(depths)
        for slot, held in enumerate(prefilled):
            runner.prefill(slot, held)
        return runner

    def hidden_states(runner: ModelRunner, slot: int, wanted: tuple[int, ...]) -> Tensor:
        entries = torch.arange(len(runner.cache.tokens_in[slot]))[None]
        return runner.hidden_states(wanted, torch.tensor([slot]), entries)[0]

    drafted, fresh = capturing(prompts), capturing(texts)
    drafted.forward(tokens, parents=parents)
    drafted.cache.commit(paths, accepted)
    assert drafted.cache.tokens_in[:2] == texts
    for slot, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        # Prefill stores nothing behind the last layer: it computes no logits.
        one, other = (hidden_states(runner, slot, (1,)) for runner in (drafted, fresh))
        torch.testing.assert_close(one, other, **close)
        theirs = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        found = hidden_states(drafted, slot, depths)
        assert found.shape[1] == len(depths)
        for index, depth in enumerate(depths):
            nodes = slice(len(prompt), None) if depth == 3 else slice(None)
            # The models' own norms are in single precision, whatever their weights are.
            expected = theirs[depth][0][nodes]
            torch.testing.assert_close(found[nodes, index], expected, rtol=1e-3, atol=1e-3)
    following = torch.tensor([[41], [42]])
    one, other = (runner.forward(following).logits.clone() for runner in (drafted, fresh))
    torch.testing.assert_close(one, other, **close)
