"""The exit adapter: it changes drafts and never the output, and a file that does not fit is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from draftahead import LLM, Batch, Draft, SamplingParams, errors
from draftahead.drafters.early_exit import io
from draftahead.drafters.early_exit.adapter import ExitAdapter, new_adapter
from draftahead.drafters.early_exit.drafter import EarlyExit
from llama_shaped import llama_shaped


def save_adapter(model: Any, folder: Path, tokens: list[int] | None = None) -> ExitAdapter:
    """One that is not trained but does something."""
    draft_to_target = None if tokens is None else torch.tensor(tokens)
    adapter = new_adapter(model, 2, rank=4, draft_to_target=draft_to_target)
    with torch.no_grad():
        adapter.up.weight.normal_(generator=torch.Generator().manual_seed(0))
    io.save(adapter, folder)
    return adapter


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "own forward"])
@pytest.mark.parametrize("count", [None, 4])
def test_an_adapter_changes_drafts_and_never_the_output(
    kernels: bool, count: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama_shaped("llama") if kernels else zoo.tiny("gemma2")
    prompts, params = zoo.ragged_prompts(3), SamplingParams(temperature=0, max_tokens=40)
    plain = [out.token_ids for out in LLM(model, "none").generate(prompts, params)]
    save_adapter(model, tmp_path, tokens=[7, 3, 50, 21])
    drafted = set[int]()

    def learn(self: EarlyExit, batch: Batch, draft: Draft, *_: Any) -> None:
        assert self.layers.layers == (0, 1)
        for tokens, num_nodes in zip(draft.tokens, draft.num_nodes, strict=True):
            drafted.update(tokens[1:num_nodes])

    monkeypatch.setattr(EarlyExit, "learn", learn)
    config = {"method": "early_exit", "adapter": tmp_path, "num_speculative_tokens": count}
    outs = LLM(model, config, max_batch=3).generate(prompts, params)
    assert [out.token_ids for out in outs] == plain
    assert drafted
    assert drafted <= {7, 3, 50, 21}


def test_an_adapter_is_saved_and_loaded(tmp_path: Path) -> None:
    model = zoo.tiny("llama", dtype=torch.bfloat16)
    saved = save_adapter(model, tmp_path / "new", tokens=[5, 9])
    found = io.load(tmp_path / "new" / "model.safetensors", model)
    assert found.config == saved.config
    assert found.up.weight.dtype == torch.bfloat16
    assert found.draft_to_target is not None
    assert found.draft_to_target.tolist() == [5, 9]
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    normed = torch.nn.functional.rms_norm(hidden, (32,), eps=saved.config.rms_norm_eps)
    inner = torch.nn.functional.silu(normed @ saved.down.weight.T)
    expected = hidden + inner @ saved.up.weight.T
    assert torch.allclose(io.load(tmp_path / "new", zoo.tiny("llama")).float()(hidden), expected)


def test_an_untrained_adapter_leaves_hidden_states_as_they_are() -> None:
    untrained, hidden = new_adapter(zoo.tiny("llama"), 1, rank=2), torch.randn(2, 3, 32)
    assert torch.equal(untrained(hidden), hidden)
    assert untrained.draft_to_target is None


def test_an_adapter_belongs_to_its_layer(tmp_path: Path) -> None:
    save_adapter(zoo.tiny("llama"), tmp_path)
    with pytest.raises(errors.ConfigError, match="trained after layer 2, not 1"):
        LLM(zoo.tiny("llama"), {"method": "early_exit", "adapter": tmp_path, "layers": 1})


# --------------------------------------------------------------------------- files that do not fit

Spoil = Callable[[Path], object]


def other_model(folder: Path) -> None:
    save_adapter(llama_shaped("llama"), folder)


def truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def foreign_tokens(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "draft_to_target": torch.tensor([5, 97])}, folder / "model.safetensors")


def config_with(**changes: Any) -> Spoil:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def config_text(text: str) -> Spoil:
    return lambda folder: (folder / "config.json").write_text(text)


def without_file(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


NO_ADAPTER = "describes no exit adapter"
SPOILED: dict[str, tuple[Spoil, str]] = {
    "another model": (other_model, "trained for another model"),
    "another vocabulary": (config_with(vocab_size=98), "model with vocab_size 98, and this one"),
    "too deep": (config_with(num_layers=30), "leaves after 30 layers, and this model has 3"),
    "truncated weights": (truncated_weights, "is damaged or holds more than tensors"),
    "no weights": (without_file("model.safetensors"), "has none of model.safetensors"),
    "no config": (without_file("config.json"), NO_ADAPTER),
    "half a config": (config_text("{"), "cannot read"),
    "a list for a config": (config_text("[]"), "must hold a JSON object"),
    "another kind": (config_with(kind="eagle"), NO_ADAPTER),
    "rank is text": (config_with(rank="many"), NO_ADAPTER),
    "rank is no integer": (config_with(rank=4.5), NO_ADAPTER),
    "layers is no integer": (config_with(num_layers=2.0), NO_ADAPTER),
    "negative epsilon": (config_with(rms_norm_eps=-1.0), NO_ADAPTER),
    "an unknown field": (config_with(extra=1), NO_ADAPTER),
    "another rank": (
        config_with(rank=7),
        r"down.weight is \[4, 32\] and by its config should be \[7, 32\]",
    ),
    "a rank that takes petabytes": (
        config_with(rank=2**45),
        r"down.weight is \[4, 32\] and by its config should be \[35184372088832, 32\]",
    ),
    "a rank that no tensor has": (config_with(rank=2**61), NO_ADAPTER),
    "foreign tokens": (foreign_tokens, "outside the target's vocabulary of 97"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_an_adapter_that_does_not_fit_is_refused(kind: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[kind]
    save_adapter(zoo.tiny("llama"), tmp_path, tokens=[5, 9])
    spoil(tmp_path)
    with pytest.raises(errors.DraftaheadError, match=message):
        LLM(zoo.tiny("llama"), {"method": "early_exit", "adapter": tmp_path})
