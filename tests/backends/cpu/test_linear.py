"""Linear layers by the CPU kernels, in float32 and in int8."""

from __future__ import annotations

import pytest
import torch

from draftahead.backends.cpu.linear import Int8Linear, group_size_for, quantize, run_linear
from llama_shaped import needs_kernels

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
