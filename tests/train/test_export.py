"""Exported heads hold their lm_head weights; a failed write leaves the old file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import zoo
from draftahead.backends.cpu import build
from draftahead.backends.cpu.linear import quantize_linears, quantize_model
from draftahead.drafters.eagle import io as eagle_io
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.early_exit import io as exit_io
from draftahead.drafters.early_exit.adapter import new_adapter
from draftahead.drafters.medusa import io as medusa_io
from draftahead.drafters.medusa.heads import new_heads
from draftahead.errors import ConfigError, ModelNotFoundError
from draftahead.models.support import text_config
from draftahead.train.export import export_head
from eagle_heads import AUX_LAYERS, DRAFT_TOKENS, exact_head
from llama_shaped import llama_shaped


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def target(request: pytest.FixtureRequest) -> Any:
    if request.param == "int8" and build.library() is None:
        pytest.skip("there are no kernels here")
    model = llama_shaped("llama")
    if request.param == "int8":
        quantize_model(model)
    return model.bfloat16() if request.param == "bfloat16" else model


def lm_head_of(target: Any) -> Tensor:
    """The target's lm_head weights, dequantized."""
    output = target.get_output_embeddings()
    return output.dequantized() if hasattr(output, "scales") else output.weight.detach()


def test_an_exported_eagle_head_holds_its_lm_head(target: Any, tmp_path: Path) -> None:
    tokens = torch.arange(3, 40, 3)
    plain = llama_shaped("llama")
    head = rounded(new_head(plain, tokens, aux_layers=(1, 2)))
    eagle_io.save(head, tmp_path / "bare", with_lm_head=False, num_speculative_tokens=3)
    description = export_head(tmp_path / "bare", target, tmp_path / "whole", name="org/name")
    assert f"lm_head weights of {len(tokens)} tokens" in description
    bare, whole = (load_file(tmp_path / n / "model.safetensors") for n in ("bare", "whole"))
    assert whole.keys() - bare.keys() == {"lm_head.weight"}
    assert all(torch.equal(whole[name], bare[name]) for name in bare)
    expected = lm_head_of(target)[tokens].bfloat16()
    assert whole["lm_head.weight"].dtype == torch.bfloat16
    assert torch.allclose(whole["lm_head.weight"], expected, atol=1e-2)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["speculators_config"]
    assert config["verifier"]["name_or_path"] == "org/name"
    assert config["proposal_methods"][0]["speculative_tokens"] == 3
    found = eagle_io.load(tmp_path / "whole", target)
    assert torch.equal(found.lm_head.weight.bfloat16(), whole["lm_head.weight"])


def rounded(head: EagleHead) -> EagleHead:
    """Rounds the weights to bfloat16, so that writing a file changes nothing."""
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(weight.bfloat16())
    return head


@pytest.mark.parametrize("some", [False, True])
def test_exported_medusa_heads_hold_their_lm_head(some: bool, target: Any, tmp_path: Path) -> None:
    vocabulary = int(text_config(target).vocab_size)
    tokens = torch.arange(3, 40, 3) if some else None
    heads = new_heads(llama_shaped("llama"), 2, draft_to_target=tokens)
    medusa_io.save(heads, tmp_path / "bare", vocab_size=vocabulary)
    assert "2 Medusa heads" in export_head(tmp_path / "bare", target, tmp_path / "whole")
    found = medusa_io.load(tmp_path / "whole", target)
    expected = lm_head_of(target)
    expected = expected if tokens is None else expected[tokens]
    assert torch.allclose(found.lm_heads[0].weight.float(), expected.float(), atol=1e-2)
    with pytest.raises(ConfigError, match="holds its lm_head weights already"):
        export_head(tmp_path / "whole", target, tmp_path / "again")


def test_a_quantized_head_is_written_dequantized(tmp_path: Path) -> None:
    if build.library() is None:
        pytest.skip("there are no kernels here")
    model = llama_shaped("llama")
    head = new_head(model, torch.arange(3, 40, 3), aux_layers=(1, 2))
    expected = {name: value.clone() for name, value in head.state_dict().items()}
    assert quantize_linears(head)
    eagle_io.save(head, tmp_path, with_lm_head=True)
    found = eagle_io.load(tmp_path, model).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-2), name


def test_heads_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    eagle_io.save(exact_head(), tmp_path / "head", with_lm_head=True)
    with pytest.raises(ConfigError, match="write to another folder"):
        export_head(tmp_path / "head", model, tmp_path / "head")
    exit_io.save(new_adapter(model, 2, rank=4), tmp_path / "exit")
    with pytest.raises(ConfigError, match="is an exit adapter"):
        export_head(tmp_path / "exit", model, tmp_path / "out")
    with pytest.raises(ModelNotFoundError, match="no folder or file"):
        export_head(tmp_path / "nowhere", model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    biased = zoo.tiny("phi", dtype=torch.float32)
    medusa_io.save(new_heads(biased, 2), tmp_path / "medusa", vocab_size=zoo.VOCABULARY)
    eagle_io.save(
        new_head(biased, DRAFT_TOKENS, aux_layers=AUX_LAYERS), tmp_path / "e", with_lm_head=False
    )
    for folder in ("medusa", "e"):
        with pytest.raises(ConfigError, match="head has a bias"):
            export_head(tmp_path / folder, biased, tmp_path / "out")


@pytest.mark.parametrize("kind", ["eagle", "medusa", "exit"])
def test_a_failed_write_leaves_the_old_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    write: dict[str, Callable[[], None]] = {
        "eagle": lambda: eagle_io.save(exact_head(), tmp_path, with_lm_head=True),
        "medusa": lambda: medusa_io.save(new_heads(model, 2), tmp_path, vocab_size=97),
        "exit": lambda: exit_io.save(new_adapter(model, 2, rank=4), tmp_path),
    }
    write[kind]()
    (file,) = tmp_path.glob("*.safetensors")
    before = file.read_bytes()

    def half(tensors: Any, place: Path, **_: Any) -> None:
        place.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("draftahead.drafters.head_files.save_file", half)
    with pytest.raises(OSError, match="full"):
        write[kind]()
    assert file.read_bytes() == before
