"""GGUF files that stay as they are: the model that widening gives, over the file's own bytes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import GGUFTensor

import tiny_gguf
from draftahead import LLM, SamplingParams
from draftahead.errors import DamagedModelError, ModelMemoryError
from draftahead.loader import gguf_config, gguf_stored, hub, skeleton
from draftahead.loader.gguf_config import GgufConfig
from draftahead.loader.gguf_header import GgufTensor, read_gguf_header
from draftahead.loader.progress import no_progress
from draftahead.loader.stored import STORED_KINDS, StoredEmbedding, StoredLinear, stored_layers

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = [3, 4, 5, 6, 3, 4, 5]
SHAPES = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True)]


def both(path: Path) -> tuple[Any, Any]:
    """The model over the file, and the one that transformers widens."""
    return hub.load(path, device="cpu")[0], hub.load(path, device="cpu", dtype="float32")[0]


def assert_same_model(ours: Any, widened: Any) -> None:
    assert type(ours) is type(widened)
    assert ours.dtype == torch.float32
    assert not ours.training
    state = ours.state_dict()
    assert state.keys() == widened.state_dict().keys()
    for name, tensor in widened.state_dict().items():
        assert torch.equal(state[name], tensor), name
    buffers = dict(ours.named_buffers(remove_duplicate=False))
    for name, buffer in widened.named_buffers():
        assert torch.equal(buffers[name], buffer), name
        assert buffers[name].dtype == buffer.dtype
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, widened(ids).logits, rtol=1e-4, atol=1e-4)
    left_out = {"name_or_path", "_name_or_path"}
    for one, other in ((ours.config, widened.config), (ours.generation_config,) * 2):
        mine, theirs = one.to_dict(), other.to_dict()
        assert {k: mine[k] for k in mine.keys() - left_out} == {
            k: theirs[k] for k in theirs.keys() - left_out
        }


@pytest.mark.parametrize(("architecture", "tied"), SHAPES)
@pytest.mark.parametrize("kind", [*STORED_KINDS, "F32"])
def test_every_kind_and_shape_is_the_widened_model(
    kind: str, architecture: str, tied: bool, tmp_path: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind, architecture, tied=tied)
    ours, widened = both(path)
    assert_same_model(ours, widened)
    kinds = [layer.kind for layer in stored_layers(ours)]
    assert kinds == ([] if kind == "F32" else [kind] * (7 * tiny_gguf.LAYERS + 2))
    if kind != "F32":
        embedding, lm_head = ours.get_input_embeddings(), ours.lm_head
        assert isinstance(embedding, StoredEmbedding)
        assert isinstance(lm_head, StoredLinear)
        assert (embedding.rows.data_ptr() == lm_head.rows.data_ptr()) is tied
        name = "token_embd.weight" if tied else "output.weight"
        assert lm_head.origin == (path, name, True)


def test_the_bytes_are_those_of_the_file_and_are_not_copied(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "Q4_K")
    model, _ = hub.load(path, device="cpu")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for layer in stored_layers(model):
        assert layer.origin is not None
        stored = torch.from_numpy(reader[layer.origin.name].data.copy())
        is_permuted = any(name in layer.origin.name for name in ("attn_q", "attn_k"))
        assert torch.equal(layer.rows, stored) is not is_permuted
        assert sorted(map(bytes, layer.rows.numpy())) == sorted(map(bytes, stored.numpy()))
        assert _is_mapped(layer.rows, path) is not is_permuted
        assert layer.origin.is_mapped is not is_permuted


def _is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(str(path))
    return False


def test_writes_do_not_reach_the_file(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "Q8_0")
    before = path.read_bytes()
    model, _ = hub.load(path, device="cpu")
    for layer in stored_layers(model):
        layer.rows.zero_()
    assert path.read_bytes() == before
    assert torch.count_nonzero(hub.load(path, device="cpu")[0].lm_head.rows)


MIXED = {"attn": "Q6_K", "ffn_": "Q4_K", "outp": "Q8_0", "toke": "Q5_0"}


def mixed(name: str) -> str:
    """Kinds as in files of a common mixture."""
    return MIXED[name.split(".")[-2][:4]]


@pytest.mark.parametrize(
    "drafter",
    [
        "none",
        "suffix",
        "recycle",
        {"method": "draft_model", "model": "self"},
        {"method": "layer_skip", "skip": [1]},
        "auto",
    ],
    ids=str,
)
def test_text_is_that_of_the_widened_model_with_each_drafter(drafter: Any, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", mixed, "qwen2")
    if isinstance(drafter, dict) and "model" in drafter:
        drafter = {"method": "draft_model", "model": str(path)}
    stored = LLM(path, drafter, device="cpu")
    assert "(Q4_K, Q5_0, Q6_K, Q8_0)" in stored.describe()[0]
    widened = LLM(path, "none", device="cpu", dtype="float32")
    prompts = [PROMPT, [7, 8, 9]]
    ours, theirs = (llm.generate(prompts, GREEDY) for llm in (stored, widened))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    seeded = SamplingParams(temperature=1.0, seed=1, max_tokens=8)
    assert stored.generate(PROMPT, seeded)[0].token_ids


def test_memory_of_widened_tensors_is_counted(tmp_path: Path) -> None:
    """Those of a kind without kernels, and those that transformers computes."""
    kinds = {"blk.0.ffn_up.weight": "TQ2_0", "blk.1.ffn_up.weight": "F32"}
    path = tiny_gguf.write(tmp_path / "m.gguf", lambda name: kinds.get(name, "Q4_K"))
    header = read_gguf_header(path)
    settings = GgufConfig(path, header)
    model = skeleton.without_memory(settings.config)
    weights = gguf_stored.GgufWeights(path, header, settings, model)
    model = weights.load(no_progress)
    rows = {layer.rows.data_ptr(): layer.rows for layer in stored_layers(model)}
    tensors = [*rows.values(), *model.parameters()]
    assert weights.num_bytes == sum(tensor.nbytes for tensor in tensors)


def test_a_second_model_reads_the_same_pages(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    first, second = (hub.load(path, device="cpu")[0].lm_head.rows for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert _is_mapped(first, path)
    assert _is_mapped(second, path)
    assert torch.equal(first, second)


def test_other_kinds_are_widened_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_gguf.write(
        tmp_path / "m.gguf", lambda name: "TQ2_0" if "ffn_up" in name else "Q4_K"
    )
    with caplog.at_level(logging.WARNING, "draftahead"):
        ours, _ = hub.load(path, device="cpu")
    (record,) = caplog.records
    assert record.getMessage() == (
        "m.gguf: widened to float32: blk.0.ffn_up.weight (TQ2_0), blk.1.ffn_up.weight (TQ2_0)"
    )
    assert_same_model(ours, hub.load(path, device="cpu", dtype="float32")[0])
    assert type(ours.model.layers[0].mlp.up_proj) is torch.nn.Linear


HEAD_DIM = {"attention.key_length": 64, "attention.value_length": 64}
EXPERTS = {
    "expert_count": tiny_gguf.EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": tiny_gguf.INNER,
}


@pytest.mark.parametrize(
    ("architecture", "keys", "widened"),
    [
        ("gemma2", HEAD_DIM, "token_embd.weight (Q8_0)"),  # norms plus one, a scaled embedding
        ("qwen3moe", HEAD_DIM | EXPERTS, "blk.0.ffn_gate_exps.weight (Q8_0)"),
    ],
)
def test_what_an_architecture_computes_is_computed_as_by_transformers(
    architecture: str,
    keys: dict[str, int],
    widened: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hub, "gguf_tokenizer", lambda *_: None)  # theirs are of another kind
    keys = {f"{architecture}.{key}": value for key, value in keys.items()}
    tied = architecture == "gemma2"
    path = tiny_gguf.write(tmp_path / "m.gguf", "Q8_0", architecture, tied=tied, keys=keys)
    with caplog.at_level(logging.WARNING, "draftahead"):
        ours, theirs = both(path)
    assert f"m.gguf: widened to float32: {widened}" in caplog.text
    assert_same_model(ours, theirs)
    assert stored_layers(ours)


def test_a_model_whose_code_needs_float_weights_is_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    own = transformers.LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        assert self.lm_head.weight.is_floating_point()
        return own(self, *args, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with caplog.at_level(logging.WARNING, "draftahead"):
        model, _ = hub.load(path, device="cpu")
    assert not stored_layers(model)
    assert "is widened to float32: LlamaForCausalLM does not run with them" in caplog.text


def test_a_buffer_that_is_not_computed_again_is_no_buffer_of_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    monkeypatch.setattr(transformers.LlamaModel, "_init_weights", lambda self, module: None)
    config = GgufConfig(path, read_gguf_header(path)).config
    with pytest.raises(skeleton.NotStorableError, match="does not compute its inv_freq again"):
        skeleton.fill(skeleton.without_memory(config), {}, {})


def test_transposed_and_computed_tensors_are_no_order_of_rows() -> None:
    tensor = GgufTensor("t", (8, 8), 0, 64, "Q8_0")

    class Processor:
        def __init__(self, change: Any) -> None:
            self.change = change

        def process(self, weights: Any, name: str, **_: Any) -> Any:
            return GGUFTensor(self.change(weights), name, {})

    order = gguf_stored._row_order
    assert order(Processor(lambda w: w[::-1]), tensor).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    for change in (
        lambda w: w.T,
        lambda w: w - 1,
        lambda w: w * 1.5,
        lambda w: w[:, ::-1],
        lambda w: w[:4],
        lambda w: w.reshape(2, -1),
        lambda w: w[[0, 0, 1, 2, 3, 4, 5, 6]],
        lambda w: w.reshape(9, 9),
    ):
        assert order(Processor(change), tensor) is None


def test_an_explicit_dtype_widens_as_it_did(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = hub.load(path, device="cpu", dtype=dtype)
        assert not stored_layers(model)
        assert model.dtype == dtype


def test_int8_quantizes_float_weights(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    llm = LLM(path, "none", device="cpu", quantize="int8")
    assert type(llm.model.lm_head).__name__ == "Int8Linear"


def test_memory_counts_stored_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    size = path.stat().st_size
    free = "draftahead.loader.preflight.free_host_memory"
    monkeypatch.setattr(free, lambda: size + 10_000)
    assert stored_layers(hub.load(path, device="cpu")[0])
    with pytest.raises(ModelMemoryError):
        hub.load(path, device="cpu", dtype="float32")
    monkeypatch.setattr(free, lambda: size // 2)
    with pytest.raises(ModelMemoryError, match="GiB of memory"):
        hub.load(path, device="cpu")


@pytest.mark.parametrize("large", [gguf_config.LARGE, 100])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_configuration_and_tokenizer_are_those_of_transformers(
    architecture: str, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the vocabulary is too large to be copied."""
    monkeypatch.setattr(gguf_config, "LARGE", large)
    path = tiny_gguf.write(tmp_path / "m.gguf", architecture=architecture)
    options = {"gguf_file": path.name, "local_files_only": True}
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, **options).to_dict()
    mine = GgufConfig(path, read_gguf_header(path)).config.to_dict()
    assert mine.pop("_name_or_path") == str(path)
    assert theirs.pop("_name_or_path") == str(tmp_path)
    assert mine == theirs
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, **options)
    ours = hub.load_tokenizer(path)
    assert type(ours) is type(tokenizer)
    assert ours.get_vocab() == tokenizer.get_vocab()
    assert ours("abc a").input_ids == tokenizer("abc a").input_ids
    assert ours.chat_template == tokenizer.chat_template == tiny_gguf.TEMPLATE


def test_the_vocabulary_is_read_by_transformers_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader takes seconds for a file of a common size."""
    path = tiny_gguf.write(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_config, "LARGE", 100)  # bytes: a vocabulary of 40 tokens is larger
    own, read = gguf.GGUFReader.__init__, []

    def note(self: Any, file: Any, *args: Any) -> None:
        read.append(Path(file))
        own(self, file, *args)
        assert Path(file) == path or "tokenizer.ggml.tokens" not in self.fields

    monkeypatch.setattr(gguf.GGUFReader, "__init__", note)
    hub.load(path, device="cpu")
    assert read.count(path) <= 1
    assert len(read) > read.count(path)


def test_architectures_of_transformers_newer_code_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    header, config = read_gguf_header(path), transformers.LlamaConfig()
    read: list[Path] = []
    monkeypatch.setattr(gguf_config, "newer", SimpleNamespace(GGUF_CONFIG_ARCHS=["llama"]))
    monkeypatch.setattr(gguf_config, "_config_of", lambda file: read.append(file) or config)
    settings = GgufConfig(path, header)
    assert settings.config is config
    assert read == [path]
    model = torch.nn.Module()
    with pytest.raises(skeleton.NotStorableError, match="converts llama in its own way"):
        gguf_stored.GgufWeights(path, header, settings, model)


@pytest.mark.parametrize("by_top", [True, False])
def test_names_of_submodules_are_asked_for_where_they_are_needed(
    by_top: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asks for all names again."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.config = None
    whole, asked = {"a": "0.weight", "b": "0.bias"}, []

    def names(model: Any, processor: Any) -> dict[str, str]:
        asked.append(list(model.named_children()))
        return whole if by_top or asked[-1] else {"a": "0.weight"}

    monkeypatch.setattr(gguf_config.legacy, "get_gguf_hf_weights_map", names)
    assert GgufConfig.names(model, None) == whole
    assert asked == ([[]] if by_top else [[], [("0", model[0])]])


def test_a_model_can_be_saved_and_loaded_again(tmp_path: Path) -> None:
    for tied in (False, True):
        path = tiny_gguf.write(tmp_path / f"{tied}.gguf", "Q5_K", tied=tied)
        model, _ = hub.load(path, device="cpu")
        model.save_pretrained(tmp_path / str(tied))
        again, _ = hub.load(tmp_path / str(tied), device="cpu")
        assert_same_model(model, again)


def test_tensors_that_are_missing_or_misshapen_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    content = path.read_bytes()
    (tmp_path / "x.gguf").write_bytes(
        content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight")
    )
    with pytest.raises(DamagedModelError, match=r"missing .*model\.layers\.1\.mlp\.up_proj"):
        hub.load(tmp_path / "x.gguf", device="cpu")
    own = tiny_gguf.shapes

    def shapes(architecture: str, *, tied: bool) -> dict[str, tuple[int, ...]]:
        larger = {"blk.1.ffn_up.weight": (tiny_gguf.INNER + 1, tiny_gguf.HIDDEN)}
        return own(architecture, tied=tied) | larger

    monkeypatch.setattr(tiny_gguf, "shapes", shapes)
    tiny_gguf.write(tmp_path / "y.gguf")
    with pytest.raises(DamagedModelError, match=r"model\.layers\.1\.mlp\.up_proj.*513"):
        hub.load(tmp_path / "y.gguf", device="cpu")
