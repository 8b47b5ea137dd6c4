"""The target drafts with some of its layers: early_exit and layer_skip. With all of them it drafts
what it will say."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams, errors
from drafted import first_children, proposed_tree
from llama_shaped import llama_shaped

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=40, seed=11)
by_backend = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "own forward"])
params = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])

ALL_LAYERS: list[dict[str, Any]] = [
    {"method": "early_exit", "layers": 3},
    {"method": "layer_skip", "skip": []},
]


@pytest.mark.usefixtures("generous_policy")
@by_backend
@params
@pytest.mark.parametrize("count", [None, 5])
@pytest.mark.parametrize("config", ALL_LAYERS)
def test_drafts_of_all_layers_are_accepted(
    config: dict[str, Any], count: int | None, params: SamplingParams, kernels: bool
) -> None:
    model = llama_shaped("llama") if kernels else zoo.tiny("gemma2")
    llm = LLM(model, {**config, "num_speculative_tokens": count}, max_batch=3)
    for out in llm.generate(zoo.ragged_prompts(3), params):
        if count is None:  # all but one path of a tree is wrong; the next token is always there
            assert out.stats.accepted_at[0] == out.stats.drafted_at[0] > 0
            assert out.stats.mean_acceptance_length > 2
        else:
            assert out.stats.acceptance_rate > 0.99


@pytest.mark.usefixtures("generous_policy")
@by_backend
@params
def test_first_children_of_a_tree_by_all_layers_are_the_output(
    kernels: bool, params: SamplingParams
) -> None:
    """Also of a sampled one: trees are noise-coupled."""
    model = llama_shaped("llama") if kernels else zoo.tiny("llama")
    prompt = zoo.ragged_prompts(3)[2]
    output = LLM(model, "none").generate([prompt], params)[0].token_ids
    draft = proposed_tree(LLM(model, ALL_LAYERS[0]), prompt, params)
    path = first_children(draft)
    assert len(path) > 1
    assert path == output[: len(path)]
    assert not draft.is_chain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "early_exit", "layers": 4}, "layers must be a whole number from 1 to 3"),
        ({"method": "early_exit", "layers": 0}, "layers must be a whole number from 1 to 3"),
        ({"method": "early_exit", "adapter": "nowhere"}, "'nowhere' is no folder or file"),
        ({"method": "early_exit", "adapter": 5}, "adapter must be a name or a path, not 5"),
        ({"method": "layer_skip", "skip": [0]}, "list of layers from 1 to 2"),
        ({"method": "layer_skip", "skip": [3]}, "list of layers from 1 to 2"),
        ({"method": "layer_skip", "skip": "12"}, "list of layers from 1 to 2"),
    ],
)
def test_impossible_options_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.DraftaheadError, match=message):
        LLM(zoo.tiny("llama"), config)
