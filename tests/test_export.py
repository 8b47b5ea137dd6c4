"""Heads written whole, for servers that want the vocabulary's rows in the file; and whatever is
written, a failure leaves what was there."""

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
from draftahead.backends.cpu.linear import quantize_model, quantize_linears
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.drafters.early_exit.adapter import new_adapter
from draftahead.drafters.medusa.heads import new_heads
from draftahead.drafters.medusa.io import load_heads, save_heads
from draftahead.errors import ConfigError, ModelNotFoundError
from draftahead.models.support import text_config
from draftahead.train.export import export_head
from test_eagle_files import DEPTHS, MODEL, SPOKEN, a_head
from test_runtime import shaped


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def target(request: pytest.FixtureRequest) -> Any:
    if request.param == "int8" and build.library() is None:
        pytest.skip("there are no kernels here")
    model = shaped("llama")
    if request.param == "int8":
        quantize_model(model)
    return model.bfloat16() if request.param == "bfloat16" else model


def rows_of_head(target: Any) -> Tensor:
    """What the target's head computes, as a matrix."""
    output = target.get_output_embeddings()
    return output.dequantized() if hasattr(output, "scales") else output.weight.detach()


def test_an_eagle_head_is_written_whole(target: Any, tmp_path: Path) -> None:
    spoken = torch.arange(3, 40, 3)
    plain = shaped("llama")
    head = rounded(new_head(plain, spoken, depths=(1, 2)))
    io.save(head, tmp_path / "bare", with_vocabulary=False, guesses=3)
    said = export_head(tmp_path / "bare", target, tmp_path / "whole", name="org/name")
    assert f"{len(spoken)} rows" in said
    bare, whole = (load_file(tmp_path / n / MODEL) for n in ("bare", "whole"))
    assert whole.keys() - bare.keys() == {"lm_head.weight"}
    assert all(torch.equal(whole[name], bare[name]) for name in bare)
    expected = rows_of_head(target)[spoken].bfloat16()
    assert whole["lm_head.weight"].dtype == torch.bfloat16
    assert torch.allclose(whole["lm_head.weight"], expected, atol=1e-2)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["speculators_config"]
    assert config["verifier"]["name_or_path"] == "org/name"
    assert config["proposal_methods"][0]["speculative_tokens"] == 3
    found = io.load(tmp_path / "whole", target)
    assert torch.equal(found.lm_head.weight.bfloat16(), whole["lm_head.weight"])


def rounded(head: EagleHead) -> EagleHead:
    """To numbers that bfloat16 holds, so that files change nothing."""
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(weight.bfloat16())
    return head


@pytest.mark.parametrize("some", [False, True])
def test_medusa_heads_are_written_whole(some: bool, target: Any, tmp_path: Path) -> None:
    vocabulary = int(text_config(target).vocab_size)
    tokens = torch.arange(3, 40, 3) if some else None
    heads = new_heads(shaped("llama"), 2, tokens=tokens)
    save_heads(heads, tmp_path / "bare", vocabulary=vocabulary)
    assert "2 Medusa heads" in export_head(tmp_path / "bare", target, tmp_path / "whole")
    found = load_heads(tmp_path / "whole", target)
    expected = rows_of_head(target)
    expected = expected if tokens is None else expected[tokens]
    assert torch.allclose(found.lm_heads[0].weight.float(), expected.float(), atol=1e-2)
    with pytest.raises(ConfigError, match="holds its output matrices already"):
        export_head(tmp_path / "whole", target, tmp_path / "again")


def test_a_head_that_was_rounded_is_written_as_numbers(tmp_path: Path) -> None:
    if build.library() is None:
        pytest.skip("there are no kernels here")
    model = shaped("llama")
    head = new_head(model, torch.arange(3, 40, 3), depths=(1, 2))
    expected = {name: value.clone() for name, value in head.state_dict().items()}
    assert quantize_linears(head)
    io.save(head, tmp_path, with_vocabulary=True)
    found = io.load(tmp_path, model).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-2), name


def test_what_is_not_to_be_exported_is_refused(tmp_path: Path) -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    io.save(a_head(), tmp_path / "head", with_vocabulary=True)
    with pytest.raises(ConfigError, match="write to another folder"):
        export_head(tmp_path / "head", model, tmp_path / "head")
    new_adapter(model, 2, rank=4).save(tmp_path / "exit")
    with pytest.raises(ConfigError, match="is an exit adapter"):
        export_head(tmp_path / "exit", model, tmp_path / "out")
    with pytest.raises(ModelNotFoundError, match="no folder or file"):
        export_head(tmp_path / "nowhere", model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    biased = zoo.tiny("phi", dtype=torch.float32)
    save_heads(new_heads(biased, 2), tmp_path / "medusa", vocabulary=zoo.VOCABULARY)
    io.save(new_head(biased, SPOKEN, depths=DEPTHS), tmp_path / "e", with_vocabulary=False)
    for folder in ("medusa", "e"):
        with pytest.raises(ConfigError, match="head has a bias"):
            export_head(tmp_path / folder, biased, tmp_path / "out")


@pytest.mark.parametrize("kind", ["eagle", "medusa", "exit"])
def test_writing_that_fails_leaves_what_was_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    write: dict[str, Callable[[], None]] = {
        "eagle": lambda: io.save(a_head(), tmp_path, with_vocabulary=True),
        "medusa": lambda: save_heads(new_heads(model, 2), tmp_path, vocabulary=97),
        "exit": lambda: new_adapter(model, 2, rank=4).save(tmp_path),
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
