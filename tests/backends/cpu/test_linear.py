"""Linear layers by the CPU kernels, in float32 and in int8."""

from __future__ import annotations

import pytest
import torch

from draftahead.backends.base import UnsupportedSpecError
from draftahead.backends.cpu import linear
from draftahead.backends.cpu.addresses import Addresses
from draftahead.backends.cpu.linear import (
    MAX_TOKENS_FLOAT32,
    Int8Linear,
    SmallBatchLinears,
    group_size_for,
    quantize,
    run_linear,
    weights_of,
)
from draftahead.loader.stored import StoredLinear
from llama_shaped import needs_kernels
from tiny_gguf import random_rows

pytestmark = needs_kernels


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 9, 24])
@pytest.mark.parametrize(("out", "in_"), [(5, 16), (48, 64), (77, 131), (200, 576), (70, 2100)])
def test_a_float32_layer_is_what_torch_computes(num_tokens: int, out: int, in_: int) -> None:
    """Also where the inputs of many tokens leave the first-level cache, and are taken in parts."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(in_, out)
    x = torch.randn(2, num_tokens, in_)
    torch.testing.assert_close(run_linear(layer, x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 20])
def test_an_int8_layer_is_what_its_integers_say(num_tokens: int) -> None:
    """Against the same quantization written in torch, and near the float32 layer it came from."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(192, 100)
    small, x = Int8Linear(layer), torch.randn(num_tokens, 192)
    assert small.group_size == 192
    groups = x.view(num_tokens, 1, 192)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / scale).round() * scale).view(num_tokens, 192)
    exact = rounded.double() @ small.dequantized().double().T + layer.bias.double()
    torch.testing.assert_close(small(x).double(), exact, rtol=1e-4, atol=1e-5)
    assert (small(x) - layer(x)).norm() < 0.01 * layer(x).norm()


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bad", [0, 17, 191])
def test_inputs_of_an_int8_layer_that_are_not_finite_show_in_all_outputs_of_their_token(
    number: float, bad: int
) -> None:
    """They have no int8 value."""
    torch.manual_seed(0)
    layer, x = Int8Linear(torch.nn.Linear(192, 100)), torch.randn(3, 192)
    before = layer(x)
    x[1, bad] = number
    found = layer(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(("in_", "size"), [(64, 64), (576, 192), (1536, 256), (640, 128)])
def test_group_sizes_divide_the_inputs(in_: int, size: int) -> None:
    assert group_size_for(in_) == size


def test_int8_weights_of_extreme_size() -> None:
    weight = torch.zeros(2, 128)
    weight[0, 3], weight[1, 64:] = 1e30, 1e-25
    integers, scales = quantize(weight, 64)
    back = (integers.view(2, 2, 64).float() - 128) * scales[..., None]
    torch.testing.assert_close(back.view(2, 128), weight, rtol=1e-2, atol=0)


def test_a_layer_of_another_size_is_not_read() -> None:
    """Kernels take the sizes of the model's configuration for the sizes of its layers."""
    for layer in (torch.nn.Linear(64, 8), Int8Linear(torch.nn.Linear(64, 8))):
        assert weights_of(layer, Addresses(), "it", 8, 64).out_features == 8
        for out, in_ in ((9, 64), (8, 128)):
            with pytest.raises(UnsupportedSpecError, match=r"it has size \(8, 64\), not"):
                weights_of(layer, Addresses(), "it", out, in_)


@pytest.mark.parametrize("size", [0, -64, 32, 128])
def test_groups_that_do_not_divide_the_inputs_are_not_read(size: int) -> None:
    layer = Int8Linear(torch.nn.Linear(192, 8))
    layer.group_size = size
    with pytest.raises(UnsupportedSpecError, match=f"it has groups of {size} weights"):
        weights_of(layer, Addresses(), "it")


def test_which_layers_of_other_models_run_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 layers those of few tokens, stored ones all; and none within autocast, nor one that
    the user has patched."""
    plain = torch.nn.Linear(64, 8)
    stored = StoredLinear(torch.from_numpy(random_rows("Q8_0", 8, 2)), "Q8_0", 64)
    model = torch.nn.ModuleList([plain, stored])
    own, ran = linear.run_linear, list[object]()

    def note(layer: object, x: torch.Tensor) -> torch.Tensor:
        ran.append(layer)
        return own(layer, x)

    monkeypatch.setattr(linear, "run_linear", note)
    linears = SmallBatchLinears(model)

    def by_kernels(count: int, dtype: torch.dtype = torch.float32) -> list[object]:
        ran.clear()
        with linears.patched():
            for layer in model:
                expected = type(layer).forward(layer, x := torch.randn(count, 64).to(dtype))
                torch.testing.assert_close(layer(x).float(), expected.float(), rtol=0.1, atol=0.1)
        return list(ran)

    assert by_kernels(1) == by_kernels(MAX_TOKENS_FLOAT32) == [plain, stored]
    assert by_kernels(MAX_TOKENS_FLOAT32 + 1) == [stored]
    linears.enabled = False
    assert by_kernels(1) == [stored]
    linears.enabled = True
    with torch.autocast("cpu"):
        assert by_kernels(1) == []
    plain.forward = lambda x: torch.nn.functional.linear(x, plain.weight, plain.bias)
    assert by_kernels(1) == [stored]
