"""Medusa heads as files: published layouts give what Medusa's own code gives, saved heads have the
layout that other servers load, and other files are refused with a clear message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import zoo
from draftahead import LLM, errors
from draftahead.backends.cpu.linear import Int8Linear
from draftahead.backends.modules import output_subset
from draftahead.drafters.medusa import io
from draftahead.drafters.medusa.heads import MedusaHeads, new_heads
from drafted import random_heads

HIDDEN, HEADS = 32, 3
WEIGHTS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def published(layers: int = 1, *, lm_heads: bool = True) -> dict[str, torch.Tensor]:
    """Tensors as FasterDecoding/Medusa names them."""
    generator = torch.Generator().manual_seed(layers)

    def normal(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    found = {}
    for head in range(HEADS):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = normal(HIDDEN, HIDDEN)
            found[f"{head}.{layer}.linear.bias"] = normal(HIDDEN)
        if lm_heads:
            found[f"{head}.{layers}.weight"] = normal(zoo.VOCABULARY, HIDDEN)
    return found


def reference(tensors: dict[str, torch.Tensor], x: torch.Tensor, target: Any) -> torch.Tensor:
    """The forward of Medusa's own code: [T, H] -> [T, K, V]."""
    found = []
    for head in range(HEADS):
        y, layer = x, 0
        while f"{head}.{layer}.linear.weight" in tensors:
            name = f"{head}.{layer}.linear"
            y = y + F.silu(y @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
            layer += 1
        own = tensors.get(f"{head}.{layer}.weight", target.lm_head.weight)
        found.append(y @ own.T)
    return torch.stack(found, 1)


def as_vllm(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, held in tensors.items():
        head, layer, *rest = name.split(".")
        is_block = rest[0] == "linear"
        native = (
            f"blocks.{head}.layers.{layer}.{rest[-1]}" if is_block else f"lm_heads.{head}.weight"
        )
        found[native] = held
    assert len(found) == HEADS * (2 * layers + 1)
    return found


def prefixed(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: held for name, held in tensors.items()}


def assert_same(found: MedusaHeads, tensors: dict[str, torch.Tensor], target: Any) -> None:
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    logits = found.logits(x, found.target_lm_head(target))
    torch.testing.assert_close(logits, reference(tensors, x, target))
    each = torch.stack([found.forward_head(head, x) for head in range(HEADS)], 1)
    torch.testing.assert_close(each, found(x))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lm_heads", [True, False], ids=["own lm_heads", "shared"])
def test_published_files_give_what_medusas_code_gives(
    tmp_path: Path, target: Any, layers: int, lm_heads: bool
) -> None:
    tensors = published(layers, lm_heads=lm_heads)
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    # As published: fewer heads than the file has.
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    assert_same(io.load(str(tmp_path), target), tensors, target)
    save_file(prefixed("medusa_heads.", tensors), tmp_path / "other.safetensors")
    assert_same(io.load(tmp_path / "other.safetensors", target), tensors, target)


def test_files_of_whole_models_and_of_vllm_load(tmp_path: Path, target: Any) -> None:
    for lm_heads in (True, False):
        tensors = published(lm_heads=lm_heads)
        whole = prefixed("medusa_head.", tensors)
        whole["model.norm.weight"] = torch.ones(HIDDEN)
        whole["lm_head.weight"] = torch.ones(zoo.VOCABULARY, HIDDEN)
        save_file(whole, tmp_path / "model.safetensors")
        assert_same(io.load(tmp_path, target), tensors, target)
    tensors = published()
    save_file(as_vllm(tensors, 1), tmp_path / "model.safetensors")
    assert_same(io.load(tmp_path, target), tensors, target)
    # Blocks without a bias, one lm_head for all heads, and a token_map that selects rows of it.
    blocks = {k: v for k, v in as_vllm(tensors, 1).items() if k.endswith("layers.0.weight")}
    tokens, lm_head = torch.tensor([4, 2, 9]), torch.randn(zoo.VOCABULARY, HIDDEN).double()
    save_file(
        {**blocks, "lm_head.weight": lm_head, "token_map": tokens},
        tmp_path / "model.safetensors",
    )
    heads = io.load(tmp_path, target)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    logits = heads.logits(x, heads.target_lm_head(target))
    y = x + F.silu(x @ tensors["1.0.linear.weight"].T)
    torch.testing.assert_close(logits[:, 1], y @ lm_head[tokens].T)


def test_saved_heads_load_again_and_have_the_layout_of_other_servers(
    tmp_path: Path, target: Any
) -> None:
    tokens = torch.arange(1, zoo.VOCABULARY, 2)
    heads = random_heads(target, HEADS, tokens).double()
    heads.choices = ((0,), (1,), (0, 0))
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    expected = heads.logits(x, heads.target_lm_head(target))
    for lm_head in (None, output_subset(target.lm_head, tokens)):
        io.save(heads, tmp_path, vocab_size=zoo.VOCABULARY, target="org/name", lm_head=lm_head)
        again = io.load(tmp_path, target)
        assert again.choices == heads.choices
        torch.testing.assert_close(again.logits(x, again.target_lm_head(target)), expected)
        assert (again.target_lm_head(target) is None) == (lm_head is not None)
    names = set(load_file(tmp_path / WEIGHTS))
    blocks = {f"{h}.0.linear.{kind}" for h in range(HEADS) for kind in ("weight", "bias")}
    assert names == {*blocks, "lm_head.weight", "token_map"}
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": "org/name",
        "hidden_size": HIDDEN,
        "vocab_size": zoo.VOCABULARY,
        "medusa_num_heads": HEADS,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "version": "2",
        "truncated_vocab_size": len(tokens),
        "medusa_choices": [[0], [1], [0, 0]],
    }
    torch.save(published(2), tmp_path / "two.pt")
    io.save(io.load(tmp_path / "two.pt", target), tmp_path, vocab_size=zoo.VOCABULARY)
    assert_same(io.load(tmp_path, target), published(2), target)


def test_new_heads_predict_what_the_target_predicts(target: Any) -> None:
    heads = new_heads(target, 2).double()
    x = torch.randn(4, HIDDEN, dtype=torch.float64)
    logits = heads.logits(x, heads.target_lm_head(target))
    torch.testing.assert_close(logits, target.lm_head(x)[:, None].expand(-1, 2, -1))


def test_a_subset_of_an_lm_head_gives_its_logits() -> None:
    layer = torch.nn.Linear(64, 40, bias=True)
    ids, x = torch.tensor([3, 39, 0]), torch.randn(2, 64)
    for whole in (layer, Int8Linear(layer)):
        torch.testing.assert_close(output_subset(whole, ids)(x), whole(x)[:, ids])
        assert whole(x).shape == (2, 40)


def test_files_that_hold_no_heads_for_the_target_are_refused(tmp_path: Path, target: Any) -> None:
    file = tmp_path / "heads.safetensors"

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file)
        with pytest.raises(errors.ConfigError, match=message):
            LLM(target, {"method": "medusa", "model": str(file)})

    def with_tensor(name: str, held: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**published(), name: held}

    refused({}, "no Medusa heads")
    refused({"0.1.weight": torch.ones(zoo.VOCABULARY, HIDDEN)}, "no Medusa heads")
    refused(with_tensor("fc.weight", torch.ones(2)), "unknown tensors fc.weight")
    wide = {"0.0.linear.weight": torch.ones(64, 64), "0.0.linear.bias": torch.ones(64)}
    refused(wide, "whose hidden size is 32, should be")
    refused({k: v for k, v in published().items() if k != "1.0.linear.weight"}, "incomplete")
    refused({k: v for k, v in published().items() if k != "1.1.weight"}, "2 lm_heads")
    many = with_tensor("99999999.0.linear.weight", torch.ones(HIDDEN, HIDDEN))
    refused(many, "numbers 100000000 heads of 1 layers, and holds")
    others = {f"{h}.1.weight": torch.ones(999, HIDDEN) for h in range(HEADS)}
    refused({**published(), **others}, "999 tokens, and the target has 97")
    outside = {**published(lm_heads=False), "token_map": torch.tensor([5, 97])}
    refused(outside, "outside the target's vocabulary")
    for value in (torch.tensor([5.0]), torch.tensor([[5]]), torch.tensor([], dtype=torch.int64)):
        refused({**published(lm_heads=False), "token_map": value}, "no list of tokens")
    (tmp_path / "config.json").write_text('{"medusa_choices": [[0, 0]]}')
    refused(published(), r"\[0, 0\] without \[0\]")
    (tmp_path / "config.json").write_text("[")
    refused(published(), "cannot read")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, target: Any) -> None:
    def refused(source: Any, message: str) -> None:
        with pytest.raises(errors.ModelNotFoundError, match=message):
            io.load(source, target)

    refused(tmp_path, "has none of medusa_lm_head.safetensors")
    refused(tmp_path / "nowhere", "no folder or file")
    whole = tmp_path / "medusa_lm_head.pt"
    torch.save(published(), whole)
    whole.write_bytes(whole.read_bytes()[:-2000])
    refused(tmp_path, "damaged")
    torch.save({"0.0.linear.weight": Path("code")}, whole)  # would run what it names
    refused(tmp_path, "more than tensors")
    torch.save([1], whole)
    refused(tmp_path, "no tensors by name")
    save_file(published(), tmp_path / WEIGHTS)
    cut = (tmp_path / WEIGHTS).read_bytes()[:-64]
    (tmp_path / WEIGHTS).write_bytes(cut)
    refused(tmp_path, "damaged")
