"""Models without memory: which layers take stored rows, and what is kept when they are filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zoo
from draftahead.loader.skeleton import (
    NotStorableError,
    Rows,
    fill,
    require_runs,
    storable,
    without_memory,
)
from draftahead.loader.stored import Origin, StoredEmbedding, StoredLinear
from tiny_gguf import random_rows


def stored(count: int = 5) -> Rows:
    rows = torch.from_numpy(random_rows("Q8_0", count, 1))
    return Rows(rows, "Q8_0", Origin(Path("m.gguf"), "t"))


class OwnLinear(nn.Linear):
    """Could compute anything with its weight."""


def test_rows_replace_the_weights_of_plain_layers_alone() -> None:
    layers: dict[str, nn.Module] = {
        "linear": nn.Linear(32, 5),
        "embedding": nn.Embedding(5, 32),
        "rescaled": nn.Embedding(5, 32, max_norm=1.0),
        "sparse": nn.Embedding(5, 32, sparse=True),
        "own": OwnLinear(32, 5),
        "norm": nn.LayerNorm(32),
    }
    model: Any = nn.ModuleDict(layers)
    assert storable(model).keys() == {"linear.weight", "embedding.weight"}
    model["own"].weight = model["linear"].weight
    assert storable(model).keys() == {"embedding.weight"}


def test_tied_layers_have_the_same_rows_by_any_of_their_names() -> None:
    for name in ("0.weight", "1.weight"):
        model = nn.Sequential(nn.Embedding(5, 32, device="meta"), nn.Linear(32, 5, device="meta"))
        model[1].weight = model[0].weight
        rows = stored()
        assert fill(model, {"1.bias": torch.arange(5.0)}, {name: rows}) == []
        embedding, linear = model
        assert isinstance(embedding, StoredEmbedding)
        assert isinstance(linear, StoredLinear)
        assert embedding.rows.data_ptr() == linear.rows.data_ptr() == rows.rows.data_ptr()
        assert torch.equal(linear.bias, torch.arange(5.0))


def test_tied_layers_have_the_same_numbers_by_any_of_their_names() -> None:
    for name in ("0.weight", "1.weight"):
        model = nn.Sequential(
            nn.Embedding(5, 32, device="meta"), nn.Linear(32, 5, bias=False, device="meta")
        )
        model[1].weight = model[0].weight
        numbers = torch.randn(5, 32)
        assert fill(model, {name: numbers}, {}) == []
        assert model[0].weight is model[1].weight
        assert torch.equal(model[1].weight, numbers)


def test_what_is_missing_is_named() -> None:
    model: Any = nn.Sequential(nn.Linear(32, 5, device="meta"), nn.BatchNorm1d(5, device="meta"))
    given = {"0.bias": torch.zeros(5), "1.weight": torch.ones(5), "1.running_mean": torch.zeros(5)}
    missing = fill(model, given, {"0.weight": stored()})
    assert missing == ["1.bias", "1.running_var", "1.num_batches_tracked"]


def test_an_embedding_keeps_its_padding() -> None:
    model = nn.Sequential(nn.Embedding(5, 32, padding_idx=2, device="meta"))
    fill(model, {}, {"0.weight": stored()})
    assert model[0].padding_idx == 2


def test_a_tensor_that_is_no_buffer_is_refused() -> None:
    """Nothing says how it is computed."""
    model: Any = nn.Sequential(nn.Linear(32, 5, device="meta"))
    model[0].table = torch.zeros(3, device="meta")
    with pytest.raises(NotStorableError, match="Linear keeps a tensor that is no buffer"):
        fill(model, {}, {})


class Doubling(transformers.PreTrainedModel):  # type: ignore[misc]
    """Computes a buffer of its modules in a way of its own."""

    def __init__(self, config: Any, inner: nn.Module | None = None) -> None:
        super().__init__(config)
        self.inner = inner
        self.register_buffer("own", torch.zeros(3), persistent=False)

    def _init_weights(self, module: Any) -> None:
        module.own.copy_(torch.full((3,), 1.0 if self.inner is None else 2.0))


def test_buffers_are_computed_by_the_innermost_model() -> None:
    config = transformers.PretrainedConfig()
    with torch.device("meta"):
        model = Doubling(config, Doubling(config))
    assert fill(model, {}, {}) == []
    own: list[Tensor] = [model.own, model.inner.own]
    assert [tensor.tolist() for tensor in own] == [[2.0] * 3, [1.0] * 3]


def test_the_configuration_is_not_written_to() -> None:
    config = zoo.ARCHITECTURES["llama"]()
    before = config.to_dict()
    model = without_memory(config)
    assert config.to_dict() == before
    assert model.config is not config
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_trial_leaves_the_layers_as_they_were() -> None:
    layer = StoredLinear(stored().rows, "Q8_0", 32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shapes = layer, list[torch.Size]()

        def forward(self, input_ids: Tensor, use_cache: bool) -> None:
            found = self.layer(torch.ones(*input_ids.shape, 32))
            self.shapes.append(found.shape)
            assert not found.any()

    model = Model()
    require_runs(model)
    assert model.shapes == [(1, 1, 5)]
    assert layer(torch.ones(1, 32)).any()
