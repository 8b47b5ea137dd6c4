"""Folders whose bfloat16 and float16 weights stay in their files: the model that widening gives."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import DamagedModelError
from draftahead.loader import folder_stored, hub
from draftahead.loader.folder_stored import FolderWeights
from draftahead.loader.progress import no_progress
from draftahead.loader.skeleton import NotStorableError, without_memory
from draftahead.loader.stored import StoredLinear, stored_layers
from draftahead.loader.weight_files import weights_in

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = [3, 4, 5, 6, 3, 4, 5]
HALVES = {torch.bfloat16: "BF16", torch.float16: "F16"}


def saved(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    zoo.tiny(name).to(dtype).save_pretrained(folder, **options)
    return folder


def change_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def assert_same_model(ours: Any, widened: Any) -> None:
    assert type(ours) is type(widened)
    assert ours.dtype == widened.dtype == torch.float32
    state = ours.state_dict()
    for name, tensor in widened.state_dict().items():
        assert torch.equal(state[name], tensor), name
    buffers = dict(ours.named_buffers(remove_duplicate=False))
    for name, buffer in widened.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, widened(ids).logits, rtol=1e-4, atol=1e-4)
    assert ours.generation_config.to_dict() == widened.generation_config.to_dict()
    assert ours.config.to_dict() == widened.config.to_dict()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", sorted(zoo.ARCHITECTURES))
def test_each_architecture_is_the_widened_model(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path, dtype)
    ours, _ = hub.load(folder, device="cpu")
    widened, _ = hub.load(folder, device="cpu", dtype="float32")
    assert_same_model(ours, widened)
    assert {layer.kind for layer in stored_layers(ours)} <= {HALVES[dtype]}


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(str(file))
    return False


def test_weights_are_the_file_s_own_bytes(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    model, _ = hub.load(folder, device="cpu")
    file = folder / "model.safetensors"
    tensors, layers = load_file(file), stored_layers(model)
    assert len(layers) == 7 * zoo.LAYERS + 2
    for layer in layers:
        assert layer.origin is not None
        assert layer.origin.path == file
        assert torch.equal(layer.rows.view(torch.bfloat16), tensors[layer.origin.name])
        assert is_mapped(layer.rows, file)


def test_shards_and_tied_weights(tmp_path: Path) -> None:
    config = zoo.ARCHITECTURES["llama"]()
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, _ = hub.load(tmp_path, device="cpu")
    assert ours.lm_head.rows.data_ptr() == ours.get_input_embeddings().rows.data_ptr()
    assert_same_model(ours, hub.load(tmp_path, device="cpu", dtype="float32")[0])


def test_numbers_in_float32_keep_their_precision(tmp_path: Path) -> None:
    folder, name = saved("llama", tmp_path), "model.norm.weight"
    exact = torch.full((32,), 1 + 2.0**-20)
    change_weights(folder, lambda tensors: tensors.update({name: exact}))
    ours, _ = hub.load(folder, device="cpu")
    assert torch.equal(ours.model.norm.weight, exact)
    assert_same_model(ours, hub.load(folder, device="cpu", dtype="float32")[0])
    assert stored_layers(ours)


def test_tied_weights_that_are_stored_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved("llama", tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    with caplog.at_level(logging.WARNING, "draftahead"):
        ours, _ = hub.load(folder, device="cpu")
    assert "its tied weights are stored twice, and differ" in caplog.text
    assert_same_model(ours, hub.load(folder, device="cpu", dtype="float32")[0])

    def same(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_weights(folder, same)
    ours, _ = hub.load(folder, device="cpu")
    assert isinstance(ours.lm_head, StoredLinear)
    assert_same_model(ours, hub.load(folder, device="cpu", dtype="float32")[0])


def test_what_transformers_converts_is_widened_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved("mixtral", tmp_path)
    with caplog.at_level(logging.WARNING, "draftahead"):
        model, _ = hub.load(folder, device="cpu")
    assert not stored_layers(model)
    assert f"{folder} is widened to float32: " in caplog.text


def weights_of(folder: Path, **stated: Any) -> FolderWeights:
    """Of a folder whose configuration also states these keys."""
    config = transformers.AutoConfig.from_pretrained(folder)
    held = weights_in(folder, {})
    return FolderWeights(folder, stated, held, without_memory(config))


def test_folders_that_transformers_reads_in_another_way_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("llama", tmp_path)
    assert weights_of(folder, model_type="llama").load(no_progress) is not None
    for key in ("auto_map", "quantization_config"):
        with pytest.raises(NotStorableError, match="code of its own or quantized layers"):
            weights_of(folder, **{key: {}})
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(NotStorableError, match="it has an adapter"):
        weights_of(folder)
    (folder / "adapter_config.json").unlink()
    monkeypatch.setattr(folder_stored, "_are_converted", lambda model: True)
    with pytest.raises(NotStorableError, match="transformers converts its tensors"):
        weights_of(folder)


def test_models_whose_tensors_transformers_converts_are_known() -> None:
    converted = {
        name
        for name, make in zoo.ARCHITECTURES.items()
        if folder_stored._are_converted(without_memory(make()))
    }
    assert "mixtral" in converted
    assert "llama" not in converted


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    held = weights_in(folder, {})
    held.places.append(held.places[0])
    model = without_memory(transformers.AutoConfig.from_pretrained(folder))
    with pytest.raises(NotStorableError, match="several files hold the same tensors"):
        FolderWeights(folder, {}, held, model)


@pytest.mark.parametrize("shape", [(32, 24), (16, 48), (24, 32, 1), (25, 32)])
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Also one with as many numbers."""
    folder, name = saved("llama", tmp_path), "model.layers.0.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(shape).bfloat16()}))
    with pytest.raises(NotStorableError, match=f"{name} is BF16 .* in its files"):
        weights_of(folder)


def test_matrices_of_other_layers_are_widened_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved("gpt2", tmp_path)
    with caplog.at_level(logging.WARNING, "draftahead"):
        hub.load(folder, device="cpu")
    assert f"{folder}: widened to float32: transformer.h.0.attn.c_attn.weight" in caplog.text


def test_missing_tensors_are_named_as_before(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(DamagedModelError, match=r"a tensor is missing .*layers\.1\.mlp\.up_proj"):
        hub.load(folder, device="cpu")


def test_an_explicit_dtype_and_float32_files_load_as_they_did(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "half")
    for dtype in ("auto", "bfloat16", "float32"):
        assert not stored_layers(hub.load(folder, device="cpu", dtype=dtype)[0])
    whole = saved("llama", tmp_path / "whole", torch.float32)
    assert not stored_layers(hub.load(whole, device="cpu")[0])
    llm = LLM(folder, "none", device="cpu", quantize="int8")
    assert type(llm.model.model.layers[0].mlp.down_proj).__name__ == "Int8Linear"


@pytest.mark.parametrize("drafter", ["suffix", "recycle", "auto"])
def test_text_is_that_of_the_widened_model(drafter: str, tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path)
    stored = LLM(folder, drafter, device="cpu")
    assert "float32 over weights as stored (BF16)" in stored.describe()[0]
    widened = LLM(folder, "none", device="cpu", dtype="float32")
    prompts = [PROMPT, [7, 8, 9]]
    ours, theirs = (llm.generate(prompts, GREEDY) for llm in (stored, widened))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
