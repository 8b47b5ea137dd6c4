"""Kernels over weights as files store them: the bits of widened weights in float32 arithmetic, the
same bits for every number of tokens and threads in each arithmetic, and what integers lose."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from draftahead.backends.cpu import abi, build
from draftahead.backends.cpu.linear import widen_rows
from draftahead.loader.stored import ACTIVATIONS, STORED_KINDS, dequantize, dequantize_some
from llama_shaped import needs_kernels
from tiny_gguf import random_rows

pytestmark = needs_kernels

QUANTIZED = [kind for kind in STORED_KINDS if kind.startswith("Q")]
NUM_TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 63, 64, 65]  # all sizes of a pass, and several passes


class Layer:
    """A linear layer of random stored weights."""

    def __init__(self, kind: str, out: int, blocks: int, *, bias: bool = True) -> None:
        self.kind, self.out = kind, out
        self.rows = torch.from_numpy(random_rows(kind, out, blocks))
        self.weight = dequantize(self.rows, kind)
        self.in_features = self.weight.shape[1]
        self.bias = torch.randn(out) if bias else None
        self.panels = self._panels() if kind.startswith("Q") else None

    def _panels(self, memory: int = 255) -> Tensor:
        """In memory that holds this byte."""
        library, weights = build.library(), self.weights("float32")
        assert library is not None
        size = library.draftahead_panels_size(ctypes.byref(weights))
        panels = torch.full((size,), memory, dtype=torch.uint8)
        library.draftahead_make_panels(ctypes.byref(weights), panels.data_ptr(), 2)
        return panels

    def weights(self, activations: str) -> abi.Weights:
        return abi.Weights(
            data=self.rows.data_ptr(),
            panels=self.panels.data_ptr() if activations != "float32" else None,
            bias=None if self.bias is None else self.bias.data_ptr(),
            out_features=self.out,
            in_features=self.in_features,
            kind=abi.KINDS.index(self.kind),
            arithmetic=abi.ARITHMETICS.index(activations),
        )

    def __call__(self, x: Tensor, activations: str, threads: int = 2) -> Tensor:
        return products(self.weights(activations), x, threads)

    def widened(self, x: Tensor) -> Tensor:
        """By the kernel for float32 weights."""
        weights = self.weights("float32")
        weights.data, weights.kind = self.weight.data_ptr(), abi.KINDS.index("F32")
        return products(weights, x, 2)

    def exact(self, x: Tensor) -> Tensor:
        bias = 0 if self.bias is None else self.bias.double()
        return x.double() @ self.weight.double().T + bias

    def error(self, x: Tensor, activations: str) -> float:
        exact = self.exact(x)
        return float((self(x, activations) - exact).norm() / exact.norm())


def products(weights: abi.Weights, x: Tensor, threads: int) -> Tensor:
    library = build.library()
    assert library is not None
    x, pointer = x.contiguous(), ctypes.byref(weights)
    y = torch.full((len(x), weights.out_features), 7.0)
    size = len(x) * library.draftahead_integer_bytes(pointer)
    integers = torch.empty(size, dtype=torch.uint8)
    library.draftahead_linear(
        pointer, x.data_ptr(), len(x), y.data_ptr(), threads, integers.data_ptr()
    )
    return y


def blocks_of(kind: str, weights: int) -> int:
    return -(-weights // STORED_KINDS[kind][0])


@pytest.mark.parametrize("out", [1, 16, 37, 100])
@pytest.mark.parametrize("kind", STORED_KINDS)
def test_float32_arithmetic_has_the_bits_of_widened_weights(kind: str, out: int) -> None:
    for size in (32, 100, 1056):  # one block and more, tails, inputs that are taken in parts
        layer = Layer(kind, out, blocks_of(kind, size))
        x = torch.randn(max(NUM_TOKENS), layer.in_features)
        expected = layer.widened(x)
        for count in NUM_TOKENS:
            assert torch.equal(layer(x[:count], "float32"), expected[:count]), count


@pytest.mark.parametrize("kind", STORED_KINDS)
def test_rows_of_an_embedding_have_the_bits_of_torch(kind: str) -> None:
    for size in (32, 100, 512):  # one block, tails, several blocks
        random = torch.from_numpy(random_rows(kind, 11, blocks_of(kind, size)))
        any_bytes = torch.randint(0, 256, random.shape, dtype=torch.uint8)  # scales that are NaN
        for rows in (random, any_bytes):
            for ids in ([], [4], [10, 0, 3, 3, 9]):
                given = torch.tensor(ids, dtype=torch.int64)
                found, expected = widen_rows(rows, given, kind), dequantize_some(rows, given, kind)
                assert found.shape == expected.shape
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(widen_rows(random, given.int(), kind), dequantize_some(random, given, kind))
    every_other = torch.arange(6)[::2]
    for some in (random[::2], random):  # rows and ids that are not adjacent
        expected = dequantize(some[every_other], kind)
        assert torch.equal(widen_rows(some, every_other, kind), expected)


@pytest.mark.parametrize("bad", [-1, 11, 2**40])
def test_a_token_that_an_embedding_does_not_have_is_named(bad: int) -> None:
    rows = torch.from_numpy(random_rows("Q4_K", 11, 1))
    with pytest.raises(IndexError, match=f"token {bad} is none of the embedding's 11"):
        widen_rows(rows, torch.tensor([1, bad, 2]), "Q4_K")


@pytest.mark.parametrize("activations", ["int24", "int8"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_bits_depend_on_no_other_token_and_on_no_thread(kind: str, activations: str) -> None:
    for size in (96, 1056):
        layer = Layer(kind, 37, blocks_of(kind, size))
        x = torch.randn(max(NUM_TOKENS), layer.in_features)
        together = layer(x, activations)
        assert torch.equal(layer(x, activations, threads=1), together)
        assert torch.equal(layer(x, activations, threads=3), together)
        for count in NUM_TOKENS:
            some = slice(len(x) - count, len(x))
            assert torch.equal(layer(x[some], activations), together[some]), count


@pytest.mark.parametrize("kind", QUANTIZED)
def test_panels_are_the_same_bytes_whatever_the_memory_held(kind: str) -> None:
    """Also those of the outputs that the last panel lacks: NaN there would cost time."""
    layer = Layer(kind, 37, blocks_of(kind, 256))
    assert torch.equal(layer._panels(255), layer._panels(0))


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_24_bits_are_as_exact_as_float32(kind: str, heavy: bool) -> None:
    layer = Layer(kind, 64, blocks_of(kind, 1024))
    x = torch.randn(32, layer.in_features, generator=torch.Generator().manual_seed(0))
    x = x**5 if heavy else x  # the largest of a unit is then 1000 times the median
    assert layer.error(x, "int24") < 3 * layer.error(x, "float32")
    assert layer.error(x, "int8") < (0.05 if heavy else 0.01)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_whole_numbers_are_multiplied_exactly(kind: str) -> None:
    """Inputs whose integers are known: of up to 127 as they are, in both arithmetics."""
    layer = Layer(kind, 33, blocks_of(kind, 256), bias=False)
    x = torch.randint(-127, 128, (5, layer.in_features)).float()
    x[:, ::32] = 127  # the scale of each unit is 1
    for activations in ("int24", "int8"):
        assert layer.error(x, activations) < 1e-6


@pytest.mark.parametrize("exponent", [-60, -8, 0, 1, 20, 60])
def test_the_first_limb_never_overflows(exponent: int) -> None:
    """The largest input of a unit, of every mantissa near a power of two, with both signs."""
    layer = Layer("Q8_0", 16, 1, bias=False)
    tops = torch.cat([2 - torch.logspace(-7, -0.1, 400), 1 + torch.logspace(-7, -0.1, 100)])
    x = torch.randn(len(tops), 32) * 0.1
    x[:, 5] = tops * torch.tensor([1.0, -1.0]).repeat(len(tops) // 2)
    x *= 2.0**exponent
    exact = layer.exact(x)
    gaps = (layer(x, "int24") - exact).norm(dim=1) / exact.norm(dim=1)
    assert gaps.max() < 3e-6  # an overflow would be 1e-2


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_token(bad: float, activations: str) -> None:
    layer = Layer("Q4_K", 20, 2)
    x = torch.randn(6, layer.in_features)
    expected = layer(x, activations)
    x[3, 40] = bad
    found = layer(x, activations)
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(found[keep], expected[keep])
    assert not found[3].isfinite().any()


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_zeros_and_tiny_inputs_give_the_bias(activations: str) -> None:
    layer = Layer("Q6_K", 20, 1)
    assert layer.bias is not None
    for x in (torch.zeros(2, 256), torch.full((2, 256), 1e-38)):
        assert torch.equal(layer(x, activations), layer.bias.expand(2, -1))


def test_scales_that_are_not_finite_reach_their_output_alone() -> None:
    """A file may hold anything: each output's weights are its own."""
    layer = Layer("Q4_0", 20, 2, bias=False)
    clean = {a: layer(torch.ones(2, 64), a) for a in ACTIVATIONS}
    layer.rows[7, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    layer.panels = layer._panels()
    for activations in ACTIVATIONS:
        found = layer(torch.ones(2, 64), activations)
        assert not found[:, 7].isfinite().any()
        others = [n for n in range(20) if n != 7]
        assert torch.equal(found[:, others], clean[activations][:, others])
