"""Files of a model that lie, are cut short or do not fit each other: refused with the reason, and
before anything is allocated."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import zoo
from damaged_models import CONFIG, folders, gguf_files, gguf_numbers
from draftahead import LLM, SamplingParams
from draftahead.core import device
from draftahead.errors import (
    ConfigError,
    DamagedModelError,
    DraftaheadError,
    ModelMemoryError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from draftahead.loader import hub

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    folders(root)
    gguf_files(root)
    return root


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of a sound folder, with weights in one file."""
    shutil.copytree(sound / "whole", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes when transformers begins to load weights."""
    noted: list[str] = []

    def note(*arguments: Any, **options: Any) -> Any:
        noted.append("from_pretrained")
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", note)
    return noted


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# --------------------------------------------------------------- tensors that do not fit the model


def test_sound_files_load(sound: Path) -> None:
    for name in ("whole", "sharded", "f32.gguf", "f16.gguf", "q8_0.gguf", "q4_0.gguf"):
        model, tokenizer = hub.load(sound / name, device="cpu")
        assert model.config.num_hidden_layers == CONFIG["num_hidden_layers"]
        assert tokenizer("abc").input_ids == [31]


def test_missing_tensors_are_named(folder: Path) -> None:
    def remove(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if "layers.1" in n]:
            del tensors[name]

    change_weights(folder, remove)
    with pytest.raises(DamagedModelError) as caught:
        hub.load(folder, device="cpu")
    assert str(caught.value) == (
        f"{folder} is incomplete: 9 tensors are missing from its weights "
        "(model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight and 6 more)"
    )


def test_more_layers_than_the_weights_have_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(DamagedModelError, match=r"9 tensors are missing .*model\.layers\.2\."):
        hub.load(folder, device="cpu")


def test_fewer_layers_than_the_weights_have_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(DamagedModelError, match=r"9 tensors are in its files that .*layers\.1\."):
        hub.load(folder, device="cpu")


def test_misshapen_tensors_are_named(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(65, 32)}))
    with pytest.raises(DamagedModelError, match=r"up_proj.weight is \[65, 32\] in the files and"):
        hub.load(folder, device="cpu")


def test_a_single_tensor_that_no_layer_has_is_named(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"v_head.weight": torch.zeros(3)}))
    with pytest.raises(DamagedModelError, match=r"a tensor is in its files .*\(v_head\.weight\)"):
        hub.load(folder, device="cpu")


OLD = {
    "rotary_emb.inv_freq": (8,),
    "self_attn.rotary_emb.inv_freq": (8,),
    "attn.bias": (1, 1, 4, 4),
}


@pytest.mark.parametrize("name", OLD)
def test_buffers_of_older_versions_are_left_alone(folder: Path, name: str) -> None:
    buffer = torch.zeros(OLD[name])
    change_weights(folder, lambda tensors: tensors.update({f"model.layers.0.{name}": buffer}))
    hub.load(folder, device="cpu")


def test_a_tied_lm_head_need_not_be_stored(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(DamagedModelError, match=r"missing from its weights \(lm_head\.weight\)"):
        hub.load(folder, device="cpu")
    change_config(folder, tie_word_embeddings=True)
    model, _ = hub.load(folder, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_layers_that_predict_further_tokens_may_be_left_out(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1, num_nextn_predict_layers=1)
    model, _ = hub.load(folder, device="cpu")
    assert len(model.model.layers) == 1


@pytest.mark.parametrize("kind", zoo.ARCHITECTURES)
def test_what_transformers_saves_of_any_architecture_loads(kind: str, tmp_path: Path) -> None:
    model = zoo.tiny(kind)
    model.save_pretrained(tmp_path)
    found, tokenizer = hub.load(tmp_path, device="cpu")
    assert tokenizer is None
    ours, own = found.state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], own[name].float()) for name in own)


def test_tensors_of_a_gguf_file_are_compared_with_its_layers(sound: Path, tmp_path: Path) -> None:
    content = (sound / "f32.gguf").read_bytes()
    at = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    path = tmp_path / "model.gguf"
    messages = {
        1: r"9 tensors are in it of layers from 1 on \(blk\.1\.",
        3: r"9 tensors are missing .*model\.layers\.2\.",
    }
    for count, message in messages.items():
        path.write_bytes(content[:at] + struct.pack("<I", count) + content[at + 4 :])
        with pytest.raises(DamagedModelError, match=message):
            hub.load(path, device="cpu")


# ------------------------------------------------------------------------------- sizes that lie

SIZES = {
    "num_hidden_layers": (100_000, 2**40, 10_000, -1),
    "vocab_size": (2**40, 2**62, 10**9),
    "hidden_size": (2**40, 10**9, 32_000),
    "intermediate_size": (2**40, 10**9),
    "num_attention_heads": (2**40,),
    "head_dim": (2**40, 10**9),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f in SIZES for v in SIZES[f]])
def test_sizes_of_a_configuration_are_compared_with_the_files(
    folder: Path, field: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = transformers.PreTrainedModel._move_missing_keys_from_meta_to_device

    def move(self: Any, keys: Any, *rest: Any) -> Any:
        raise AssertionError(f"{len(keys)} tensors would be allocated")

    change_config(folder, **{field: value})
    assert missing is not None
    monkeypatch.setattr(
        transformers.PreTrainedModel, "_move_missing_keys_from_meta_to_device", move
    )
    with pytest.raises((DamagedModelError, UnsupportedModelError)) as caught:
        hub.load(folder, device="cpu")
    assert len(str(caught.value)) < 600


def test_a_small_file_does_not_make_a_large_model(folder: Path, built: list[str]) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}).encode()
    content = struct.pack("<Q", len(header)) + header + b"\0" * 4
    (folder / "model.safetensors").write_bytes(content)
    change_config(folder, hidden_size=4096, intermediate_size=11008, num_hidden_layers=1)
    with pytest.raises(DamagedModelError, match=r"describes .* weights, and its files hold 1"):
        hub.load(folder)
    assert not built


def test_numbers_of_experts_are_compared_with_the_files(folder: Path, built: list[str]) -> None:
    change_config(folder, text_config={"num_experts": 5000})
    with pytest.raises(DamagedModelError, match=r"text_config\.num_experts is 5000"):
        hub.load(folder)
    assert not built


def test_a_model_larger_than_the_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, built: list[str]
) -> None:
    monkeypatch.setattr("draftahead.loader.preflight.free_host_memory", lambda: 50_000)
    with pytest.raises(ModelMemoryError, match=r"GiB of memory, and .* free: choose a smaller"):
        hub.load(folder)
    assert not built


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it = device.free_host_memory()
    assert all_of_it > 2**20
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_host_memory() > 2**20
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 100000\n")
    assert device.free_host_memory() == 700_000


# ---------------------------------------------------------------------------- headers that lie


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file has 0 bytes"),
    "short": (b"1234567", "the file has 7 bytes"),
    "a length of 2**60": (safetensors({}, length=2**60), f"its header claims {2**60} bytes"),
    "no JSON": (safetensors(b"\xff{"), "its header is no JSON"),
    "deep JSON": (safetensors(b"[" * 100_000 + b"]" * 100_000), "its header is no JSON"),
    "a list": (safetensors([1]), "its header is no JSON object"),
    "no tensor": (safetensors({"a": 1}), "tensor 'a' is of an unknown kind"),
    "a dtype": (safetensors({"a": tensor(0, 8, dtype="F33")}), "tensor 'a' is of an unknown kind"),
    "a negative place": (safetensors({"a": tensor(-8, 0)}), "no valid shape or place"),
    "a shape of text": (safetensors({"a": tensor(0, 8, "12")}), "no valid shape or place"),
    "a fraction": (safetensors({"a": tensor(0, 8, [2.0])}, b"8" * 8), "no valid shape or place"),
    "a shape": (safetensors({"a": tensor(0, 8, [2**40])}), "does not fit its place"),
    "an overlap": (
        safetensors({"a": tensor(0, 8), "b": tensor(4, 12)}, b"\0" * 12),
        "tensor 'b' overlaps another",
    ),
    "a hole": (
        safetensors({"a": tensor(0, 8), "b": tensor(12, 20)}, b"\0" * 20),
        "tensor 'b' does not follow the one before",
    ),
    "beyond the end": (safetensors({"a": tensor(0, 8)}, b"1234"), "have 8 bytes, and 4 are in"),
    "more than tensors": (safetensors({"a": tensor(0, 8)}, b"1" * 9), "have 8 bytes, and 9 are in"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_headers_of_safetensors_that_lie_are_refused(
    kind: str, folder: Path, built: list[str]
) -> None:
    content, message = BROKEN[kind]
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedModelError, match=r"the weights of .*model\.safetensors are damaged"):
        hub.load(folder)
    with pytest.raises(DamagedModelError) as caught:
        hub.load(folder)
    assert message in str(caught.value)
    assert not built


def test_shards_that_are_missing_are_named(sound: Path, tmp_path: Path, built: list[str]) -> None:
    shutil.copytree(sound / "sharded", tmp_path / "model")
    first, *others = sorted((tmp_path / "model").glob("model-*.safetensors"))
    for shard in others:
        shard.unlink()
    with pytest.raises(DamagedModelError, match="and 2 more of its 6 files are missing") as caught:
        hub.load(tmp_path / "model")
    assert first.name not in str(caught.value)
    assert sum(shard.name in str(caught.value) for shard in others) == 3
    assert not built


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": ["model.safetensors"]}, "has no weight_map"),
        ({"weight_map": {"a": "../x.safetensors"}}, "names '../x.safetensors', which is no"),
        ({"weight_map": {"a": "x.bin"}}, "names 'x.bin', which is no"),
        ({"weight_map": {"a": 3}}, "names 3, which is no"),
        (["a"], "must hold a JSON object, and holds list"),
    ],
)
def test_an_index_that_lies_is_refused(
    index: Any, message: str, folder: Path, built: list[str]
) -> None:
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedModelError, match=message):
        hub.load(folder)
    assert not built


@pytest.mark.parametrize("value", [2**60, 2**64 - 1, 2**31])
def test_counts_and_lengths_of_a_gguf_file_that_lie_are_refused(
    value: int, sound: Path, tmp_path: Path, built: list[str]
) -> None:
    content, path = (sound / "q8_0.gguf").read_bytes(), tmp_path / "model.gguf"
    places = [at for at, size in gguf_numbers(sound / "q8_0.gguf") if size == 8]
    assert {8, 16} < set(places)
    for at in [*random.Random(0).sample(places, 60), 8, 16]:
        path.write_bytes(content[:at] + struct.pack("<Q", value) + content[at + 8 :])
        with pytest.raises(DamagedModelError, match="is damaged or no GGUF file: "):
            hub.load(path)
    assert not built


@pytest.mark.parametrize("length", [0, 3, 4, 24, 100, -1])
def test_a_gguf_file_that_is_cut_short_is_refused(
    length: int, sound: Path, tmp_path: Path, built: list[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes((sound / "f16.gguf").read_bytes()[:length])
    with pytest.raises(DamagedModelError, match=r"is damaged or no GGUF file: |is empty"):
        hub.load(path)
    assert not built


# ------------------------------------------------------------------------ text files, tokenizers

NO_JSON = {
    "empty": b"",
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "cut short": b'{"model_type": "lla',
    "a list": b"[]",
}


@pytest.mark.parametrize("kind", NO_JSON)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_files_that_are_no_json_are_refused_with_their_place(
    name: str, kind: str, folder: Path
) -> None:
    (folder / name).write_bytes(NO_JSON[kind])
    with pytest.raises(DraftaheadError) as caught:
        hub.load(folder, device="cpu")
    assert str(folder) in str(caught.value)
    assert name in str(caught.value) or "tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_takes_token_ids_only(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    llm = LLM(folder, "none", device="cpu")
    assert llm.tokenizer is None
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) > 0
    with pytest.raises(ConfigError, match="without its tokenizer takes token ids"):
        llm.generate("hello", GREEDY)


def test_a_tokenizer_configuration_alone_is_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    _, tokenizer = hub.load(folder, device="cpu")
    assert tokenizer is None


def test_a_folder_whose_weights_have_another_name_is_explained(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors and no model\.safe"):
        hub.load(folder)


def test_a_configuration_may_name_its_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    change_config(folder, transformers_weights="consolidated.safetensors")
    hub.load(folder, device="cpu")
    change_config(folder, transformers_weights="../consolidated.safetensors")
    with pytest.raises(DamagedModelError, match="no safetensors file beside it"):
        hub.load(folder)
