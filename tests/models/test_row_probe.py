"""Models whose logits for a token depend on the other tokens of a forward: found at load."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from draftahead import LLM, SamplingParams
from draftahead.errors import UnsupportedModelError
from draftahead.models import row_probe
from draftahead.models.runner import ModelRunner
from llama_shaped import llama_shaped

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = zoo.ragged_prompts(3)


class ScaledTogether(nn.Linear):
    """Quantizes its input with one scale for all tokens, as dynamic quantization does."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)


class OutlierColumns(nn.Linear):
    """Columns with an outlier in any row are exact, the others quantized, as in LLM.int8."""

    def forward(self, x: Tensor) -> Tensor:
        exact = (x.abs() > 2 * x.std()).flatten(0, -2).any(0)
        scale = x.abs().amax(-1, keepdim=True) / 127
        quantized = torch.where(exact, x, (x / scale).round() * scale)
        return nn.functional.linear(quantized, self.weight, self.bias)


def with_linears(kind: type, dtype: torch.dtype = torch.float32, only: str = "") -> Any:
    model = zoo.tiny("llama", dtype=dtype)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and only in name:
            module.__class__ = kind
    return model


def dynamically_quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove it
        quantize = torch.ao.quantization.quantize_dynamic
        return quantize(llama_shaped("llama"), {nn.Linear}, dtype=torch.qint8).eval()


DEPENDENT: dict[str, Callable[[], Any]] = {
    "torch.ao": dynamically_quantized,
    "one scale": lambda: with_linears(ScaledTogether),
    "one scale in bfloat16": lambda: with_linears(ScaledTogether, torch.bfloat16),
    "one scale in float64": lambda: with_linears(ScaledTogether, torch.float64),
    "one layer": lambda: with_linears(ScaledTogether, only="layers.2.mlp.up_proj"),
    "outliers": lambda: with_linears(OutlierColumns),
    "outliers in float16": lambda: with_linears(OutlierColumns, torch.float16),
}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_lossless_drafting_is_refused_by_name(kind: str) -> None:
    model = DEPENDENT[kind]()
    for drafter in ("lookup", "auto"):
        with pytest.raises(UnsupportedModelError) as caught:
            LLM(model, drafter)
    message = str(caught.value)
    for part in (type(model).__name__, "other tokens of the forward", "'none'", "lossless=False"):
        assert part in message
    with_none = LLM(model, "none").generate(PROMPTS[0], GREEDY)[0]
    assert len(with_none.token_ids) == 12
    assert not LLM(model, "lookup", lossless=False).generate(PROMPTS[0], GREEDY)[0].lossless


class PerToken(nn.Linear):
    """Quantizes each token by itself."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)


def test_a_model_that_is_quantized_token_by_token_is_taken() -> None:
    model = with_linears(PerToken, torch.float64)
    plain = LLM(model, "none", max_batch=1).generate(PROMPTS, GREEDY)
    drafted = LLM(model, "lookup").generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]


@pytest.mark.parametrize("max_batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "phi3_longrope", "mixtral", "gpt_oss"])
def test_rounding_is_allowed(name: str, dtype: torch.dtype, max_batch: int) -> None:
    model = zoo.tiny(name, dtype=dtype)
    runner = ModelRunner(model, max_batch=max_batch, max_context=64, scratch_entries=64)
    gap, allowed = row_probe.dependence(runner)
    assert gap < allowed / 4
    assert runner.cache.tokens_in == [[]] * max_batch
    assert not any(tensor.any() for tensor in runner.cache.tensors())


def test_plain_models_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_probe, "dependence", lambda runner: pytest.fail("probed"))
    for name in ("gemma2", "gpt2", "mixtral"):
        LLM(zoo.tiny(name), "lookup", max_batch=1, max_context=32)
    LLM(llama_shaped("llama"), "lookup")


def test_a_model_that_is_quantized_after_loading_is_refused_too() -> None:
    model = zoo.tiny("llama", dtype=torch.float32)
    drafted, plain = LLM(model, "lookup"), LLM(model, "none")
    drafted.generate(PROMPTS[0], GREEDY)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ScaledTogether
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="other tokens of the forward"):
            drafted.generate(PROMPTS[0], GREEDY)
    assert len(plain.generate(PROMPTS[0], GREEDY)[0].token_ids) == 12


def test_a_context_without_room_for_the_probe() -> None:
    LLM(with_linears(ScaledTogether), "lookup", max_context=5)
