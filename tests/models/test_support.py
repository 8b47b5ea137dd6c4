"""Which models are taken: those known to be right, and others that agree with themselves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.kv import attention
from draftahead.models import support
from llama_shaped import SIZES, llama_shaped


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_models_that_cannot_roll_back_are_refused_by_name(name: str) -> None:
    model = zoo.tiny(name)
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        LLM(model)


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No architecture counts as tested; attention may be patched."""
    monkeypatch.setattr(support, "TESTED", frozenset())
    return monkeypatch


def test_an_untested_architecture_that_agrees_with_itself_is_taken(untested: object) -> None:
    LLM(zoo.tiny("mistral"))


def test_an_untested_architecture_with_a_small_context(untested: object) -> None:
    for max_context in (3, 10):
        LLM(zoo.tiny("mistral"), max_context=max_context)
    with pytest.raises(ConfigError, match="max_context must be 3 or more"):
        LLM(zoo.tiny("mistral"), max_context=2)


def test_an_untested_architecture_that_disagrees_is_refused(
    untested: pytest.MonkeyPatch,
) -> None:
    """One whose sliding window we would miss."""
    grouped_attention = attention.grouped_attention

    def without_window(*args: object, **kwargs: object) -> object:
        return grouped_attention(*args, **{**kwargs, "sliding_window": None})  # type: ignore[arg-type]

    untested.setattr(attention, "grouped_attention", without_window)
    with pytest.raises(UnsupportedModelError, match="other logits"):
        LLM(zoo.tiny("mistral"))


# ------------------------------------------------------------------------------ the true reason


def with_peft(**adapter: Any) -> Any:
    """As PEFT leaves a model: with a configuration for each adapter."""
    model: Any = zoo.tiny("llama")
    model.peft_config = {"default": SimpleNamespace(**adapter)}
    return model


def without_head(kind: str) -> Any:
    config = transformers.LlamaConfig(**SIZES)
    return getattr(transformers, kind)(config).eval()


def with_layer_in(dtype: torch.dtype) -> Any:
    model = llama_shaped("llama")
    model.model.layers[1].to(dtype)
    return model


class CastsBack(nn.Module):
    """A layer in another dtype than the others, which casts what it gets and gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.bfloat16()

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        angles = options.pop("position_embeddings")
        angles = tuple(angle.bfloat16() for angle in angles)
        return self.layer(hidden.bfloat16(), position_embeddings=angles, **options).float()


def with_layers_of_different_dtypes() -> Any:
    model = llama_shaped("llama")
    model.model.layers[1] = CastsBack(model.model.layers[1]).eval()
    return model


def offloaded(part: str) -> Any:
    model = llama_shaped("llama")
    model.get_submodule(part).to("meta")
    return model


class NoInferenceMode(nn.Linear):
    """As optimum-quanto's int4 weights."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return super().forward(x)


def not_in_inference_mode() -> Any:
    model = llama_shaped("llama")
    model.lm_head.__class__ = NoInferenceMode
    return model


class Quantized(Tensor):
    """As quanto's activations: a subclass of Tensor."""


class QuantizedActivations(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Quantized)


def quantized_activations() -> Any:
    model = llama_shaped("llama")
    model.model.layers[0].self_attn.v_proj.__class__ = QuantizedActivations
    return model


VIRTUAL = "puts virtual tokens before the prompt: remove it"
TRUE_REASONS: dict[str, tuple[Callable[[], Any], str]] = {
    "LlamaModel": (lambda: without_head("LlamaModel"), "pass a ...ForCausalLM"),
    "LlamaForSequenceClassification": (
        lambda: without_head("LlamaForSequenceClassification"),
        "has no head that predicts tokens: pass a ...ForCausalLM",
    ),
    "prompt learning": (lambda: with_peft(is_prompt_learning=True), VIRTUAL),
    "aLoRA": (
        lambda: with_peft(is_prompt_learning=False, alora_invocation_tokens=[5]),
        "has an aLoRA adapter, which starts where its invocation tokens stand",
    ),
    "a layer in bfloat16": (
        lambda: with_layer_in(torch.bfloat16),
        "does not run, without a cache either: mat1 and mat2 must have the same dtype",
    ),
    "layers of different dtypes": (
        with_layers_of_different_dtypes,
        "compute keys of different dtypes (torch.float32, torch.bfloat16): cast it",
    ),
    "an offloaded layer": (lambda: offloaded("model.layers.1"), "on the device meta (offloaded?)"),
    "an offloaded head": (lambda: offloaded("lm_head"), "load all of it into memory"),
    "not in inference mode": (not_in_inference_mode, "does not run, in torch.inference_mode"),
    "quantized keys": (quantized_activations, "computes keys and values as Quantized"),
}


@pytest.mark.parametrize("kind", TRUE_REASONS)
def test_models_are_refused_for_the_true_reason(kind: str) -> None:
    make, reason = TRUE_REASONS[kind]
    for drafter in ("none", "auto"):
        with pytest.raises(UnsupportedModelError) as caught:
            LLM(make(), drafter)
        assert reason in str(caught.value)
        assert "rolled back" not in str(caught.value)


def test_plain_lora_is_taken() -> None:
    LLM(with_peft(is_prompt_learning=False, alora_invocation_tokens=None), "lookup")


@pytest.mark.parametrize("part", ["", "model.layers.1.self_attn", "model.norm"])
def test_an_inner_module_in_training_mode_counts_as_training(part: str) -> None:
    model = zoo.tiny("llama")
    model.get_submodule(part).training = True
    name = f" \\({part}\\)" if part else ""
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM{name} is in training mode"):
        LLM(model)
    model.eval().lm_head.train()  # a linear layer does not ask, nor a list of layers
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    LLM(model, "none")


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_a_decoder_with_positions_of_another_name(drafter: str) -> None:
    config = transformers.WhisperConfig(
        d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=2,
        encoder_attention_heads=2, decoder_ffn_dim=32, encoder_ffn_dim=32, vocab_size=97,
        max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=96,
        decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForCausalLM(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(4)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    llm = LLM(model, drafter, max_batch=2)
    assert llm.engine.verifier.max_context == 40
    out = llm.generate([3, 5, 7], SamplingParams(temperature=0, max_tokens=30))[0]
    assert out.token_ids == zoo.reference(model, [3, 5, 7], 30)
