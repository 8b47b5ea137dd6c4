"""layer_skip's search: it finds layers that can be skipped, once per model and within bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.drafters import layer_skip
from draftahead.drafters.layer_skip import MAX_SUBSETS, Search, expected_speed_up, layers_without
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEXT = zoo.ragged_prompts(4)[3]  # 19 tokens
LONG_PROMPT = TEXT * 3


def with_idle_layers(*idle: int, layers: int = 6) -> Any:
    """A model some of whose layers pass their input on."""
    config = zoo.ARCHITECTURES["llama"]()
    config.num_hidden_layers = layers
    config.eos_token_id = None
    torch.manual_seed(0)
    model = type(zoo.tiny("llama"))(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.3)
        if any(f"layers.{i}." in name for i in idle) and ("o_proj" in name or "down" in name):
            parameter.zero_()
    return model


def searching(model: Any) -> Search:
    runner = ModelRunner(model, max_batch=2, max_context=64, scratch_entries=32)
    runner.prefill(1, TEXT)
    return Search(runner, slot=1, root=7)


# ------------------------------------------------------------------------------------ the search


def test_the_search_finds_layers_that_do_nothing() -> None:
    model = with_idle_layers(2, 4)
    search = searching(model)
    count = search.nodes.shape[1] - 1
    assert search.nodes[0, 1:].tolist() == zoo.reference(model, [*TEXT, 7], count)
    assert search.agreement(layers_without(model, ())) == pytest.approx(1, abs=1e-4)
    assert search.agreement(layers_without(model, (2, 4))) == pytest.approx(1, abs=1e-4)
    assert search.agreement(layers_without(model, (1,))) < 0.9
    result = search.result()
    assert result.skip == (2, 4)
    share = layers_without(model, (2, 4)).weight_share
    assert result.speed_up == pytest.approx(expected_speed_up(1.0, share), rel=1e-3)
    assert [len(held) for held in search.runner.cache.tokens_in] == [0, 19]


def test_the_search_tries_a_bounded_number_of_subsets(monkeypatch: pytest.MonkeyPatch) -> None:
    search, tried = searching(with_idle_layers(layers=90)), list[LayerSubset]()
    monkeypatch.setattr(search, "agreement", lambda layers: tried.append(layers) or 0.99)
    search.result()
    assert MAX_SUBSETS / 2 < len(tried) <= MAX_SUBSETS
    skipped = {index for layers in tried for index in range(90) if index not in layers.layers}
    assert skipped == set(range(1, 90))


def test_expected_speed_up() -> None:
    assert expected_speed_up(1.0, 1.0) == pytest.approx(1)  # all layers
    assert expected_speed_up(0.5, 0.5) == pytest.approx(1)  # 1.5 tokens in 1.5 forwards
    assert expected_speed_up(1.0, 0.0) == pytest.approx(9)
    assert expected_speed_up(0.5, 0.1) == pytest.approx(1.75 / 1.2)  # with two drafted tokens


# ----------------------------------------------------------------------------------- the drafter


def test_the_search_waits_for_a_long_sequence_and_runs_once_per_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, searched = with_idle_layers(2, 4), list[tuple[int, int]]()

    class Noted(Search):
        def __init__(self, runner: ModelRunner, slot: int, root: int) -> None:
            searched.append((slot, root))
            super().__init__(runner, slot, root)

    monkeypatch.setattr(layer_skip, "Search", Noted)
    llm = LLM(model, {"method": "layer_skip", "num_speculative_tokens": 3}, max_batch=2)
    short = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=20))[0]
    assert not searched
    assert short.stats.drafted == 0
    assert any("no sequence has had 48 tokens yet" in line for line in llm.explain())
    out = llm.generate([[1, 2, 3], LONG_PROMPT], GREEDY)[1]
    assert searched == [(1, LONG_PROMPT[-1])]
    assert out.stats.acceptance_rate > 0.99
    again = LLM(model, {"method": "layer_skip", "num_speculative_tokens": 3})
    assert again.generate([LONG_PROMPT], GREEDY)[0].stats.acceptance_rate > 0.99
    assert len(searched) == 1
    assert "layers skipped for drafts: 2, 4" in again.explain()


def test_where_no_subset_pays_nothing_is_drafted_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_skip, "expected_speed_up", lambda agreement, share: 0.9 * agreement)
    model = with_idle_layers()
    llm = LLM(model, "layer_skip")
    assert llm.generate([LONG_PROMPT], GREEDY)[0].stats.drafted == 0
    assert any("that is not expected to pay" in line for line in llm.explain())
    asked = LLM(model, {"method": "layer_skip", "num_speculative_tokens": 2})
    assert asked.generate([LONG_PROMPT], GREEDY)[0].stats.drafted > 0
