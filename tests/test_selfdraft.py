"""The target drafts with a part of itself: early_exit and its adapter, layer_skip's search."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.drafters import layer_skip
from draftahead.drafters.early_exit.adapter import ExitAdapter, load_adapter, new_adapter
from draftahead.drafters.layer_skip import MAX_SUBSETS, Search, expected_speed_up
from draftahead.models.layer_subset import LayerSubset
from draftahead.models.runner import ModelRunner
from test_drafters import tree_of
from test_runtime import shaped

GREEDY = SamplingParams(temperature=0, max_tokens=40)
WARM = SamplingParams(temperature=0.7, max_tokens=40, seed=11)


def model_of(kernels: bool) -> Any:
    return shaped("llama") if kernels else zoo.tiny("gemma2")


def adapter_for(model: Any, folder: Path, tokens: list[int] | None = None) -> ExitAdapter:
    """One that is not trained but does something."""
    adapter = new_adapter(model, 2, rank=4, tokens=None if tokens is None else torch.tensor(tokens))
    with torch.no_grad():
        adapter.up.weight.normal_(generator=torch.Generator().manual_seed(0))
    adapter.save(folder)
    return adapter


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "forward"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("number", [None, 5])
@pytest.mark.parametrize(
    "whole", [{"method": "early_exit", "layers": 3}, {"method": "layer_skip", "skip": []}]
)
def test_the_whole_model_accepts_all_of_its_own_guesses(
    whole: dict[str, Any], number: int | None, sampling: SamplingParams, kernels: bool
) -> None:
    config = whole if number is None else {**whole, "num_speculative_tokens": number}
    llm = LLM(model_of(kernels), config, max_batch=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outs = llm.generate(zoo.ragged_prompts(3), sampling)
    for out in outs:
        if number is None:  # of a tree all but one path is wrong; the next token is always there
            assert out.stats.accepted_at[0] == out.stats.drafted_at[0] > 0
            assert out.stats.mean_acceptance_length > 2
        else:
            assert out.stats.acceptance_rate > 0.99


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "forward"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_the_trunk_of_the_whole_models_tree_is_the_text(
    kernels: bool, sampling: SamplingParams
) -> None:
    model = shaped("llama") if kernels else zoo.tiny("llama")
    prompt = zoo.ragged_prompts(3)[2]
    text = LLM(model, "none").generate([prompt], sampling)[0].token_ids
    draft, _ = tree_of(LLM(model, {"method": "early_exit", "layers": 3}), prompt, sampling)
    at, trunk = 0, []
    while children := [n for n in range(1, draft.num_nodes[0]) if draft.parents[0][n] == at]:
        at = children[0]  # the heaviest
        trunk.append(draft.tokens[0][at])
    assert len(trunk) > 1 and trunk == text[: len(trunk)]
    assert not draft.is_chain


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "forward"])
@pytest.mark.parametrize("number", [None, 4])
def test_an_adapter_changes_guesses_and_never_the_text(
    kernels: bool, number: int | None, tmp_path: Path
) -> None:
    model, prompts = model_of(kernels), zoo.ragged_prompts(3)
    plain = [out.token_ids for out in LLM(model, "none").generate(prompts, GREEDY)]
    adapter_for(model, tmp_path, tokens=[7, 3, 50, 21])
    config = {"method": "early_exit", "adapter": tmp_path, "num_speculative_tokens": number}
    llm = LLM(model, config, max_batch=3)
    drafter: Any = llm.engine.drafter
    assert drafter.layers.layers == (0, 1)
    seen, real = set(), llm.engine._propose

    def noted(batch: Any) -> Any:
        found = real(batch)
        for row, size in zip(found[1].tokens, found[1].num_nodes, strict=True):
            seen.update(row[1:size])
        return found

    llm.engine._propose = noted  # type: ignore[method-assign]
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == plain
    assert seen and seen <= {7, 3, 50, 21}


def test_an_adapter_is_saved_and_loaded(tmp_path: Path) -> None:
    model = zoo.tiny("llama", dtype=torch.bfloat16)
    saved = adapter_for(model, tmp_path / "new", tokens=[5, 9])
    found = load_adapter(tmp_path / "new" / "model.safetensors", model)
    assert found.config == saved.config and found.up.weight.dtype == torch.bfloat16
    assert found.tokens is not None and found.tokens.tolist() == [5, 9]
    states = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    normed = torch.nn.functional.rms_norm(states, (32,), eps=saved.config.rms_norm_eps)
    inner = torch.nn.functional.silu(normed @ saved.down.weight.T)
    expected = states + inner @ saved.up.weight.T
    assert torch.allclose(
        load_adapter(tmp_path / "new", zoo.tiny("llama")).float()(states), expected
    )
    untrained = new_adapter(model, 1, rank=2)
    assert torch.equal(untrained(states), states) and untrained.tokens is None


def other_model(folder: Path) -> None:
    adapter_for(shaped("llama"), folder)


def too_deep(folder: Path) -> None:
    _edit(folder, layers=30)


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def other_rank(folder: Path) -> None:
    _edit(folder, rank=7)


def foreign_tokens(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "tokens": torch.tensor([5, 97])}, folder / "model.safetensors")


def _edit(folder: Path, **version: Any) -> None:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **version}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (other_model, "trained for another model"),
        (too_deep, "leaves after 30 layers, and this model has 3"),
        (truncated, "missing, damaged or not what"),
        (lambda folder: (folder / "model.safetensors").unlink(), "missing, damaged or not what"),
        (lambda folder: (folder / "config.json").unlink(), "no exit adapter in"),
        (lambda folder: (folder / "config.json").write_text("{"), "describes no exit adapter"),
        (lambda folder: (folder / "config.json").write_text("[]"), "describes no exit adapter"),
        (lambda folder: _edit(folder, kind="eagle"), "describes no exit adapter"),
        (lambda folder: _edit(folder, rank="many"), "describes no exit adapter"),
        (lambda folder: _edit(folder, rank=4.5), "describes no exit adapter"),
        (lambda folder: _edit(folder, layers=2.0), "describes no exit adapter"),
        (lambda folder: _edit(folder, rms_norm_eps=-1.0), "describes no exit adapter"),
        (lambda folder: _edit(folder, extra=1), "describes no exit adapter"),
        (other_rank, "missing, damaged or not what"),
        (foreign_tokens, "outside a vocabulary of 97"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(spoil: Any, says: str, tmp_path: Path) -> None:
    adapter_for(zoo.tiny("llama"), tmp_path, tokens=[5, 9])
    spoil(tmp_path)
    with pytest.raises(errors.ConfigError, match=says):
        LLM(zoo.tiny("llama"), {"method": "early_exit", "adapter": tmp_path})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "early_exit", "layers": 4}, "layers must be a whole number from 1 to 3"),
        ({"method": "early_exit", "layers": 0}, "layers must be a whole number from 1 to 3"),
        ({"method": "early_exit", "adapter": "nowhere"}, "no exit adapter in nowhere"),
        ({"method": "early_exit", "adapter": 5}, "5 is no path of an adapter"),
        ({"method": "layer_skip", "skip": [0]}, "list of layers from 1 to 2"),
        ({"method": "layer_skip", "skip": [3]}, "list of layers from 1 to 2"),
        ({"method": "layer_skip", "skip": "12"}, "list of layers from 1 to 2"),
    ],
)
def test_options_that_cannot_be(config: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.ConfigError, match=says):
        LLM(zoo.tiny("llama"), config)


def test_an_adapter_belongs_to_its_layer(tmp_path: Path) -> None:
    adapter_for(zoo.tiny("llama"), tmp_path)
    with pytest.raises(errors.ConfigError, match="trained after layer 2, not 1"):
        LLM(zoo.tiny("llama"), {"method": "early_exit", "adapter": tmp_path, "layers": 1})


# ------------------------------------------------------------------------------------ the search


def with_idle_layers(idle: tuple[int, ...], layers: int = 6) -> Any:
    """A model some of whose layers do nothing at all."""
    model = zoo.tiny("llama", dtype=torch.float32)
    config = model.config
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    model = type(model)(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.3)
        if any(f"layers.{i}." in name for i in idle) and ("o_proj" in name or "down" in name):
            parameter.zero_()
    return model


def searching(model: Any) -> Search:
    passes = ModelRunner(model, max_batch=2, max_context=64, scratch_entries=32)
    passes.prefill(1, zoo.ragged_prompts(4)[3])
    return Search(passes, row=1, root=7)


def skipping(model: Any, *layers: int) -> LayerSubset:
    kept = [index for index in range(model.config.num_hidden_layers) if index not in layers]
    return LayerSubset(model, kept)


def test_the_search_finds_the_layers_that_do_nothing() -> None:
    model = with_idle_layers((2, 4))
    search = searching(model)
    assert search.nodes[0, 1:].tolist() == zoo.reference(
        model, [*zoo.ragged_prompts(4)[3], 7], search.nodes.shape[1] - 1
    )
    assert search.agreement(skipping(model)) == pytest.approx(1, abs=1e-4)
    assert search.agreement(skipping(model, 2, 4)) == pytest.approx(1, abs=1e-4)
    assert search.agreement(skipping(model, 1)) < 0.9
    found = search.result()
    assert found.skip == (2, 4)
    assert found.expected_speed_up == pytest.approx(
        expected_speed_up(1.0, skipping(model, 2, 4).share), rel=1e-3
    )
    assert [len(held) for held in search.runner.cache.tokens_in] == [0, 19]


def test_the_search_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_idle_layers((), layers=90)
    search, tried = searching(model), list[LayerSubset]()
    monkeypatch.setattr(search, "agreement", lambda part: tried.append(part) or 0.99)
    search.result()
    assert MAX_SUBSETS / 2 < len(tried) <= MAX_SUBSETS
    left_out = {index for part in tried for index in range(90) if index not in part.layers}
    assert left_out == set(range(1, 90))


def test_the_search_waits_for_a_text_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = with_idle_layers((2, 4)), []

    class Noted(Search):
        def __init__(self, passes: Any, row: int, root: int) -> None:
            made.append((row, root))
            super().__init__(passes, row, root)

    monkeypatch.setattr(layer_skip, "Search", Noted)
    llm = LLM(model, {"method": "layer_skip", "num_speculative_tokens": 3}, max_batch=2)
    short = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=20))[0]
    assert not made and short.stats.drafted == 0
    prompt = zoo.ragged_prompts(4)[3] * 3
    out = llm.generate([[1, 2, 3], prompt], GREEDY)[1]
    assert made == [(1, prompt[-1])] and out.stats.acceptance_rate > 0.99
    again = LLM(model, {"method": "layer_skip", "num_speculative_tokens": 3})
    assert again.generate([prompt], GREEDY)[0].stats.acceptance_rate > 0.99 and len(made) == 1
    drafter: Any = again.engine.drafter
    assert drafter.explain() == ["layers to draft without: 2, 4"]


def test_where_nothing_promises_to_pay_it_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_skip, "expected_speed_up", lambda agreement, share: 0.9 * agreement)
    model, prompt = with_idle_layers(()), zoo.ragged_prompts(4)[3] * 3
    llm = LLM(model, "layer_skip")
    assert llm.generate([prompt], GREEDY)[0].stats.drafted == 0
    drafter: Any = llm.engine.drafter
    assert "does not expected_speed_up to pay" in drafter.explain()[0]
    asked = LLM(model, {"method": "layer_skip", "num_speculative_tokens": 2})
    assert asked.generate([prompt], GREEDY)[0].stats.drafted > 0


def test_what_a_part_promises() -> None:
    assert expected_speed_up(1.0, 1.0) == pytest.approx(1)  # the whole model for itself
    assert expected_speed_up(0.5, 0.5) == pytest.approx(1)  # one guess: 1.5 tokens in 1.5 passes
    assert expected_speed_up(1.0, 0.0) == pytest.approx(9)
    assert expected_speed_up(0.5, 0.1) == pytest.approx(1.75 / 1.2)  # two guesses
