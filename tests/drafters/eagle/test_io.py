"""EAGLE heads as files: published layouts give the guesses of the module they came from, and what
is no such head is refused in plain words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

import zoo
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.head import EagleConfig, EagleHead, new_head
from draftahead.errors import ConfigError, DraftaheadError, HeadMismatchError, ModelNotFoundError

MODEL = "model.safetensors"
DEPTHS = (1, 3)
SPOKEN = torch.arange(1, zoo.VOCABULARY, 2)
LAYER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": zoo.VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.tiny("llama", dtype=torch.float32)


def filled(head: EagleHead) -> EagleHead:
    """Numbers that bfloat16 holds exactly, so that files change nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.tokens.copy_(SPOKEN)
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_((0.2 * noise + (weight.ndim == 1)).bfloat16())
    return head.eval()


def a_head(**options: Any) -> EagleHead:
    layer = LlamaConfig(**LAYER, tie_word_embeddings=False)
    config = EagleConfig(layer, draft_vocabulary=len(SPOKEN), depths=DEPTHS, **options)
    return filled(EagleHead(config))


@torch.no_grad()
def guesses(head: EagleHead, model: Any) -> Tensor:
    """What it says over a text, and one step further from its own output."""
    ids = torch.tensor([zoo.ragged_prompts(1)[0] * 3])
    told = model(ids, output_hidden_states=True).hidden_states
    feature = head.feature(torch.stack([told[depth] for depth in DEPTHS], 2))
    embedded = model.get_input_embeddings()(ids)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    at = torch.arange(ids.shape[1])[None]
    out = head(embedded, feature, at, attend)
    return torch.cat([head.logits(out), head.logits(head(embedded, out, at + 1, attend))], 1)


def same(found: EagleHead, expected: EagleHead, model: Any) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    assert found.config.depths == expected.config.depths
    assert torch.allclose(guesses(found, model), guesses(expected, model), atol=1e-5)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "one norm": {"norm_before_fuse": True},
    "a norm each": {"norm_each": True, "norm_before_residual": True},
    "normed output": {"norm_output": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_written_is_read_back(name: str, model: Any, tmp_path: Path) -> None:
    head = a_head(**VARIANTS[name])
    io.save(head, tmp_path, with_vocabulary=True, target="org/name", guesses=4)
    same(io.load(tmp_path, model), head, model)
    # Each variant says something else: a flag that is lost would show.
    others = [a_head(**VARIANTS[other]) for other in VARIANTS if other != name]
    for other in others:
        assert not torch.allclose(guesses(other, model), guesses(head, model), atol=1e-2)
    said = json.loads((tmp_path / "config.json").read_text())
    assert "model_type" not in said  # by which others recognise the layout
    assert said["speculators_config"]["verifier"]["name_or_path"] == "org/name"
    assert said["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].nonzero()[:, 0].tolist() == SPOKEN.tolist()


def test_rows_that_are_left_out_are_the_targets(model: Any, tmp_path: Path) -> None:
    head = new_head(model, SPOKEN, depths=DEPTHS)
    rows = model.get_output_embeddings().weight[SPOKEN]
    io.save(head, tmp_path, with_vocabulary=False)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(io.load(tmp_path, model).lm_head.weight, rows)


def written(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], pickled: bool
) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / MODEL)


def published(head: EagleHead, layer: str) -> dict[str, Tensor]:
    """A head's tensors by published names."""
    found = {
        name.replace("layers.0.", f"{layer}."): value.clone()
        for name, value in head.state_dict().items()
        if name != "tokens"
    }
    found["d2t"] = SPOKEN - torch.arange(len(SPOKEN))
    found["t2d"] = torch.zeros(zoo.VOCABULARY, dtype=torch.bool)
    found["t2d"][SPOKEN] = True
    return found


def safe_ai_lab(**given: Any) -> dict[str, Any]:
    said = {"architectures": ["LlamaForCausalLM"], **LAYER, "draft_vocab_size": len(SPOKEN)}
    return {**said, **given}


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_the_first_layout_loads(pickled: bool, half: bool, model: Any, tmp_path: Path) -> None:
    """SafeAILab's: everything at the top of the configuration, and a residual that is not normed
    where nothing is said of it. In which order states are named does not matter."""
    head = a_head()
    weights = published(head, "midlayer")
    if half:
        weights = {n: w.half() if w.is_floating_point() else w for n, w in weights.items()}
    written(tmp_path, safe_ai_lab(eagle_aux_hidden_state_layer_ids=[3, 1]), weights, pickled)
    same(io.load(tmp_path, model), head, model)


def test_layers_counted_from_zero_are_moved_by_one(model: Any, tmp_path: Path) -> None:
    """`eagle_config` names layers, from 0: what stands after layer 1 is state 2."""
    weights = published(a_head(), "midlayer")
    for said, expected in (([1, 2], (2, 3)), ([2, 3], (2, 3))):
        config = safe_ai_lab(eagle_config={"eagle_aux_hidden_state_layer_ids": said})
        written(tmp_path, config, weights, pickled=False)
        assert io.load(tmp_path, model).config.depths == expected


def speculators(**given: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(SPOKEN),
        "eagle_aux_hidden_state_layer_ids": list(DEPTHS),
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": dict(LAYER),
        **given,
    }


@pytest.mark.parametrize("norms", [None, True, False])
def test_the_second_layout_loads(norms: bool | None, model: Any, tmp_path: Path) -> None:
    """vLLM-speculators': the layer's configuration inside, and a residual that is normed where
    nothing is said of it."""
    head = a_head(norm_before_residual=norms is not False)
    given = {} if norms is None else {"norm_before_residual": norms}
    weights = published(head, "layers.0")
    weights["verifier_norm.weight"] = torch.ones(32)  # not the head's own
    written(tmp_path, speculators(**given), weights, pickled=False)
    same(io.load(tmp_path, model), head, model)


def test_an_embedding_of_its_own_is_kept(model: Any, tmp_path: Path) -> None:
    weights = published(a_head(), "layers.0")
    weights["embed_tokens.weight"] = torch.randn(zoo.VOCABULARY, 32)
    written(tmp_path, speculators(), weights, pickled=False)
    found = io.load(tmp_path, model)
    assert torch.equal(found.embed_tokens.weight, weights["embed_tokens.weight"])


Spoil = Callable[[dict[str, Any], dict[str, Tensor]], None]


def inside(**given: Any) -> Spoil:
    return lambda config, weights: config["transformer_layer_config"].update(given)


def outside(**given: Any) -> Spoil:
    return lambda config, weights: config.update(given)


def tensor(name: str, value: Tensor) -> Spoil:
    return lambda config, weights: weights.update({name: value})


def without(name: str) -> Spoil:
    return lambda config, weights: weights.__delitem__(name)


offsets = SPOKEN - torch.arange(len(SPOKEN))
BAD: dict[str, tuple[Spoil, type[DraftaheadError], str]] = {
    "another hidden size": (
        outside(target_hidden_size=64),
        HeadMismatchError,
        "for another model: one with states of 64 numbers; this one has 32",
    ),
    "another vocabulary": (
        inside(vocab_size=500),
        HeadMismatchError,
        "for another model: one with a vocabulary of 500; this one has 97",
    ),
    "too deep": (
        outside(eagle_aux_hidden_state_layer_ids=[1, 30]),
        HeadMismatchError,
        "for another model: it goes by layer 30, and this one has 1 to 3",
    ),
    "no layer": (
        outside(eagle_aux_hidden_state_layer_ids=[0, 3]),
        HeadMismatchError,
        "for another model: it goes by layer 0",
    ),
    "a missing tensor": (without("norm.weight"), ConfigError, "lacks norm.weight"),
    "an unknown tensor": (
        tensor("layers.0.self_attn.q_norm.weight", torch.ones(8)),
        ConfigError,
        "holds layers.0.self_attn.q_norm.weight, which no EAGLE-3 head known here has",
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
        inside(layer_types=["sliding_attention"], sliding_window=16),
        ConfigError,
        "sliding window is not known here",
    ),
    "other layers": (inside(model_type="qwen3"), ConfigError, "layers of type 'qwen3'"),
    "another kind": (outside(speculators_model_type="mtp"), ConfigError, "of type 'mtp'"),
    "no layer at all": (
        outside(transformer_layer_config={}),
        ConfigError,
        "does not describe an EAGLE-3 head",
    ),
    "the last state alone": (
        outside(eagle_config={"use_aux_hidden_state": False}),
        ConfigError,
        "goes by the last state alone",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused(name: str, model: Any, tmp_path: Path) -> None:
    spoil, kind, message = BAD[name]
    config, weights = speculators(), published(a_head(), "layers.0")
    spoil(config, weights)
    written(tmp_path, config, weights, pickled=False)
    with pytest.raises(kind, match=message) as caught:
        io.load(tmp_path, model)
    assert type(caught.value) is kind


def test_files_that_are_none_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none of model\.safetensors"):
        io.load(tmp_path, model)
    io.save(a_head(), tmp_path, with_vocabulary=True)
    file = tmp_path / MODEL
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelNotFoundError, match="damaged or holds more than tensors"):
        io.load(tmp_path, model)
    file.write_bytes(whole)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        io.load(tmp_path, model)
