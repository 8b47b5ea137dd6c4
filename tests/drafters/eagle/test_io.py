"""EAGLE heads as files: published layouts load as the head they came from, what is saved loads
again, and other files are refused with a clear message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.head import EagleHead, new_head
from draftahead.errors import ConfigError, DraftaheadError, HeadMismatchError, ModelNotFoundError
from eagle_heads import AUX_LAYERS, DRAFT_TOKENS, LAYER, causal, exact_head

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.tiny("llama", dtype=torch.float32)


@torch.no_grad()
def logits_of(head: EagleHead, model: Any) -> Tensor:
    """Its logits over a text, and one step further from its own output."""
    ids = torch.tensor([zoo.ragged_prompts(1)[0] * 3])
    captured = model(ids, output_hidden_states=True).hidden_states
    feature = head.feature(torch.stack([captured[depth] for depth in AUX_LAYERS], 2))
    embedded = model.get_input_embeddings()(ids)
    positions = torch.arange(ids.shape[1])[None]
    out = head(embedded, feature, positions, causal)
    further = head(embedded, out, positions + 1, causal)
    return torch.cat([head.logits(out), head.logits(further)], 1)


def assert_same(found: EagleHead, expected: EagleHead, model: Any) -> None:
    assert torch.equal(found.draft_to_target, expected.draft_to_target)
    assert found.config.aux_layers == expected.config.aux_layers
    assert torch.allclose(logits_of(found, model), logits_of(expected, model), atol=1e-5)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each hidden state": {"fc_norm": True, "norm_before_residual": True},
    "normed output": {"norm_output": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_saved_head_loads_again(name: str, model: Any, tmp_path: Path) -> None:
    head = exact_head(**VARIANTS[name])
    io.save(head, tmp_path, with_lm_head=True, target="org/name", num_speculative_tokens=4)
    assert_same(io.load(tmp_path, model), head, model)
    # Every variant has other logits, so a flag that was lost would show.
    others = [exact_head(**VARIANTS[other]) for other in VARIANTS if other != name]
    for other in others:
        assert not torch.allclose(logits_of(other, model), logits_of(head, model), atol=1e-2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "model_type" not in config  # other servers recognise the layout by that
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/name"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    weights = load_file(tmp_path / WEIGHTS)
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].nonzero()[:, 0].tolist() == DRAFT_TOKENS.tolist()


def test_lm_head_weights_that_are_left_out_are_the_targets(model: Any, tmp_path: Path) -> None:
    head = new_head(model, DRAFT_TOKENS, aux_layers=AUX_LAYERS)
    expected = model.get_output_embeddings().weight[DRAFT_TOKENS]
    io.save(head, tmp_path, with_lm_head=False)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    assert torch.equal(io.load(tmp_path, model).lm_head.weight, expected)


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], pickled: bool) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS)


def published(head: EagleHead, layer: str) -> dict[str, Tensor]:
    """A head's tensors by published names."""
    found = {
        name.replace("layers.0.", f"{layer}."): value.clone()
        for name, value in head.state_dict().items()
        if name != "draft_to_target"
    }
    found["d2t"] = DRAFT_TOKENS - torch.arange(len(DRAFT_TOKENS))
    found["t2d"] = torch.zeros(zoo.VOCABULARY, dtype=torch.bool)
    found["t2d"][DRAFT_TOKENS] = True
    return found


def safe_ai_lab(**fields: Any) -> dict[str, Any]:
    """config.json of SafeAILab's layout: the fields of the layer at the top."""
    size = len(DRAFT_TOKENS)
    return {"architectures": ["LlamaForCausalLM"], **LAYER, "draft_vocab_size": size, **fields}


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_safe_ai_labs_layout_loads(pickled: bool, half: bool, model: Any, tmp_path: Path) -> None:
    """By default the residual is not normed. The order in which layers are given does not
    matter."""
    head = exact_head()
    weights = published(head, "midlayer")
    if half:
        weights = {n: w.half() if w.is_floating_point() else w for n, w in weights.items()}
    write(tmp_path, safe_ai_lab(eagle_aux_hidden_state_layer_ids=[3, 1]), weights, pickled)
    assert_same(io.load(tmp_path, model), head, model)


def test_indices_of_layers_become_aux_layers(model: Any, tmp_path: Path) -> None:
    """`eagle_config` has indices of layers, from 0: 1 means after two layers."""
    weights = published(exact_head(), "midlayer")
    for layers, expected in (([1, 2], (2, 3)), ([2, 3], (2, 3))):
        config = safe_ai_lab(eagle_config={"eagle_aux_hidden_state_layer_ids": layers})
        write(tmp_path, config, weights, pickled=False)
        assert io.load(tmp_path, model).config.aux_layers == expected


def speculators(**fields: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(DRAFT_TOKENS),
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": dict(LAYER),
        **fields,
    }


@pytest.mark.parametrize("norms", [None, True, False])
def test_speculators_layout_loads(norms: bool | None, model: Any, tmp_path: Path) -> None:
    """vLLM-speculators': by default the residual is normed."""
    head = exact_head(norm_before_residual=norms is not False)
    fields = {} if norms is None else {"norm_before_residual": norms}
    weights = published(head, "layers.0")
    weights["verifier_norm.weight"] = torch.ones(32)  # not the head's own
    write(tmp_path, speculators(**fields), weights, pickled=False)
    assert_same(io.load(tmp_path, model), head, model)


def test_a_heads_own_embedding_is_loaded(model: Any, tmp_path: Path) -> None:
    weights = published(exact_head(), "layers.0")
    weights["embed_tokens.weight"] = torch.randn(zoo.VOCABULARY, 32)
    write(tmp_path, speculators(), weights, pickled=False)
    found = io.load(tmp_path, model)
    assert torch.equal(found.embed_tokens.weight, weights["embed_tokens.weight"])


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def in_layer_config(**fields: Any) -> Change:
    return lambda config, weights: config["transformer_layer_config"].update(fields)


def in_config(**fields: Any) -> Change:
    return lambda config, weights: config.update(fields)


def tensor(name: str, value: Tensor) -> Change:
    return lambda config, weights: weights.update({name: value})


def without(name: str) -> Change:
    return lambda config, weights: weights.__delitem__(name)


offsets = DRAFT_TOKENS - torch.arange(len(DRAFT_TOKENS))
BAD: dict[str, tuple[Change, type[DraftaheadError], str]] = {
    "another hidden size": (
        in_config(target_hidden_size=64),
        HeadMismatchError,
        "for another model: one with hidden size 64; this one has 32",
    ),
    "another vocabulary": (
        in_layer_config(vocab_size=500),
        HeadMismatchError,
        "for another model: one with a vocabulary of 500; this one has 97",
    ),
    "deeper than the target": (
        in_config(eagle_aux_hidden_state_layer_ids=[1, 30]),
        HeadMismatchError,
        "for another model: it reads .* after layer 30, and this one has layers 1 to 3",
    ),
    "no layer": (
        in_config(eagle_aux_hidden_state_layer_ids=[0, 3]),
        HeadMismatchError,
        "for another model: it reads .* after layer 0",
    ),
    "a missing tensor": (without("norm.weight"), ConfigError, "lacks norm.weight"),
    "an unknown tensor": (
        tensor("layers.0.self_attn.q_norm.weight", torch.ones(8)),
        ConfigError,
        "holds layers.0.self_attn.q_norm.weight, which no supported EAGLE-3 head has",
    ),
    "another shape": (
        tensor("fc.weight", torch.ones(32, 96)),
        ConfigError,
        r"fc.weight is \[32, 96\] and by config.json should be \[32, 64\]",
    ),
    "offsets too far": (tensor("d2t", offsets + 60), ConfigError, "d2t points outside .* of 97"),
    "offsets below": (tensor("d2t", offsets - 2), ConfigError, "d2t points outside .* of 97"),
    "too few offsets": (tensor("d2t", offsets[:9]), ConfigError, "9 tokens, and .* is 48"),
    "no offsets": (without("d2t"), ConfigError, "smaller draft vocabulary and no d2t"),
    "a window": (
        in_layer_config(layer_types=["sliding_attention"], sliding_window=16),
        ConfigError,
        "sliding window is not supported",
    ),
    "other layers": (in_layer_config(model_type="qwen3"), ConfigError, "layers of type 'qwen3'"),
    "another kind": (in_config(speculators_model_type="mtp"), ConfigError, "of type 'mtp'"),
    "no layer at all": (
        in_config(transformer_layer_config={}),
        ConfigError,
        "does not describe an EAGLE-3 head",
    ),
    "a size of another type": (
        in_config(draft_vocab_size=[48]),
        ConfigError,
        "describes no EAGLE-3 head",
    ),
    "100,000 layers": (
        in_layer_config(num_hidden_layers=100_000),
        ConfigError,
        "holds fewer layers than its config.json counts",
    ),
    "a size that takes petabytes": (
        in_layer_config(intermediate_size=2**45),
        ConfigError,
        "mlp.gate_proj.weight is .* and by config.json should be .35184372088832, 32",
    ),
    "a size that no tensor has": (
        in_layer_config(intermediate_size=2**61),
        ConfigError,
        "describes no EAGLE-3 head",
    ),
    "the last hidden state alone": (
        in_config(eagle_config={"use_aux_hidden_state": False}),
        ConfigError,
        "reads the last layer's hidden states alone",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_head_that_cannot_be_used_is_refused(name: str, model: Any, tmp_path: Path) -> None:
    change, kind, message = BAD[name]
    config, weights = speculators(), published(exact_head(), "layers.0")
    change(config, weights)
    write(tmp_path, config, weights, pickled=False)
    with pytest.raises(kind, match=message) as caught:
        io.load(tmp_path, model)
    assert type(caught.value) is kind


def test_missing_and_damaged_files_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none of model\.safetensors"):
        io.load(tmp_path, model)
    io.save(exact_head(), tmp_path, with_lm_head=True)
    file = tmp_path / WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelNotFoundError, match="damaged or holds more than tensors"):
        io.load(tmp_path, model)
    file.write_bytes(whole)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        io.load(tmp_path, model)
