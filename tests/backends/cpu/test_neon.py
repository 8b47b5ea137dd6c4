"""The ARM kernels, compiled for it and run by an emulator: against the `gguf` package and float64,
and against the kernels of this machine. No ARM hardware has run them in these tests."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy
import pytest
import torch

from draftahead.backends.cpu import abi, build, compiler
from draftahead.backends.cpu.linear import Int8Linear
from llama_shaped import needs_kernels

COMPILER, EMULATORS = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
DRIVER = Path(__file__).with_name("kernel_driver.cpp")
FLAGS = ["-O1"]  # a third of the time to compile

emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"{COMPILER} is not installed"),
    pytest.mark.skipif(not emulator, reason="qemu-user is not installed"),
]

# An instruction set and a CPU that the emulator plays: the Cortex-A53 has no dot products.
CPUS = {"neon": "cortex-a53", "dotprod": "max"}
Driver = Callable[..., bytes]


def drive(command: list[str]) -> Driver:
    def run(*arguments: str, stdin: bytes = b"") -> bytes:
        done = subprocess.run(
            [*command, *arguments], input=stdin, capture_output=True, timeout=600, check=False
        )
        assert done.returncode == 0, (done.returncode, done.stderr.decode()[-2000:])
        return done.stdout

    return run


def compile_driver(command: list[str], folder: Path, isa: str, *options: str) -> Path:
    flags = [*compiler.FLAGS, *FLAGS, *compiler.FLAGS_OF[isa], f"-DKERNEL_ISA={isa}"]
    sources = [DRIVER, compiler.SOURCES / "kernels.cpp", compiler.SOURCES / "cpu.cpp"]
    include = ["-I", str(compiler.SOURCES)]
    driver = folder / f"driver-{isa}"
    compiler.output_of(
        [*command, *flags, *include, *map(str, sources), *options, "-o", str(driver)]
    )
    return driver


@pytest.fixture(scope="module", params=CPUS)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    isa, folder = request.param, tmp_path_factory.mktemp("arm")
    driver = compile_driver([COMPILER], folder, isa, "-static")
    assert emulator
    return drive([emulator, "-cpu", CPUS[isa], str(driver)])


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    library = build.library()
    assert library
    folder = tmp_path_factory.mktemp("native")
    return drive([str(compile_driver(compiler.find(), folder, library.isa))])


def test_the_instruction_sets_of_the_cpu_are_found(arm: Driver, request: object) -> None:
    isa = request.node.callspec.params["arm"]  # type: ignore[attr-defined]
    assert arm("isas").decode().split() == {"neon": ["neon"], "dotprod": ["dotprod", "neon"]}[isa]


class Case(NamedTuple):
    kind: str
    arithmetic: str
    data: bytes
    scales: numpy.ndarray
    group_size: int
    weights: numpy.ndarray  # [out, in] float64: what the data stand for
    bias: numpy.ndarray
    x: numpy.ndarray

    def request(self, first: int, count: int) -> bytes:
        """Of some of the tokens."""
        out, in_ = self.weights.shape
        header = struct.pack(
            "8q",
            abi.KINDS.index(self.kind),
            abi.ARITHMETICS.index(self.arithmetic),
            out,
            in_,
            count,
            self.group_size,
            len(self.data),
            self.scales.size,
        )
        arrays = self.scales, self.bias, self.x[first : first + count]
        return header + self.data + b"".join(array.tobytes() for array in arrays)

    def expected(self) -> numpy.ndarray:
        return self.x.astype(float) @ self.weights.T + self.bias

    def tolerance(self) -> numpy.ndarray:
        """What rounding may do to each output: of sums in float32, and of inputs to 8 bits."""
        rounding = 1e-6 * (numpy.abs(self.x) @ numpy.abs(self.weights).T + 1)
        if self.arithmetic != "int8" and self.kind != "INT8":
            return rounding
        step = numpy.abs(self.x).max(1, keepdims=True) / 127
        return rounding + 0.51 * step * numpy.abs(self.weights).sum(1)


OUT, IN, TOKENS = 50, 512, 9


def case(kind: str, arithmetic: str) -> Case:
    random = numpy.random.default_rng(len(kind))
    bias = random.standard_normal(OUT).astype("f4")
    x = random.standard_normal((TOKENS, IN)).astype("f4")
    x[3] *= 100
    scales, group_size = numpy.empty(0, "f4"), 0
    weights = random.standard_normal((OUT, IN)).astype("f4")
    if kind == "INT8":
        layer = Int8Linear(torch.nn.Linear(IN, OUT))
        data, scales = layer.weight.numpy().tobytes(), layer.scales.numpy()
        group_size, weights = layer.group_size, layer.dequantized().numpy()
    elif kind == "F32":
        data = weights.tobytes()
    else:
        data, weights = random_blocks(kind, random)
    return Case(kind, arithmetic, data, scales, group_size, weights.astype(float), bias, x)


def random_blocks(kind: str, random: numpy.random.Generator) -> tuple[bytes, numpy.ndarray]:
    """Random bytes with scales that are finite, and the weights that `gguf` reads from them."""
    type_ = gguf.GGMLQuantizationType[kind]
    per_block, size = gguf.GGML_QUANT_SIZES[type_]
    if per_block == 1:  # halves
        rows = random.standard_normal((OUT, IN)).astype("f4")
        rows = gguf.quants.quantize(rows, type_)
    else:
        rows = random.integers(0, 256, (OUT, IN // per_block, size), dtype=numpy.uint8)
        halves = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q6_K": [208]}.get(kind, [0, 2])
        for at in halves:
            half = random.uniform(0.01, 0.1, rows.shape[:2]).astype("f2")
            rows[..., at : at + 2] = half[..., None].view(numpy.uint8)
        rows = rows.reshape(OUT, -1)
    return rows.tobytes(), gguf.quants.dequantize(rows, type_)


def all_cases() -> list[tuple[str, str]]:
    plain = [(kind, "float32") for kind in abi.KINDS]
    assert len(plain) > 10
    blocks = [kind for kind in abi.KINDS if kind.startswith("Q")]
    return plain + [(kind, how) for kind in blocks for how in ("int24", "int8")]


@pytest.mark.parametrize(("kind", "arithmetic"), all_cases())
def test_linear_layers_and_that_bits_depend_neither_on_tokens_nor_on_threads(
    kind: str, arithmetic: str, arm: Driver
) -> None:
    one = case(kind, arithmetic)
    shape = TOKENS, OUT
    found = numpy.frombuffer(arm("linear", "1", stdin=one.request(0, TOKENS)), "f4").reshape(shape)
    assert (numpy.abs(found - one.expected()) <= one.tolerance()).all()
    for parts in ([1] * TOKENS, [2, 3, 4]):
        first = numpy.cumsum([0, *parts])
        requests = b"".join(map(one.request, first.tolist(), parts))
        assert arm("linear", "3", stdin=requests) == found.tobytes()


@needs_kernels
def test_forwards_agree_with_this_machines(arm: Driver, native: Driver) -> None:
    found = arm("forward", "1")
    at_once, one_by_one = numpy.frombuffer(found, "f4").reshape(2, 7, 101)
    assert at_once.tobytes() == one_by_one.tobytes()
    assert arm("forward", "3") == found
    theirs = numpy.frombuffer(native("forward", "2"), "f4").reshape(2, 7, 101)
    assert numpy.abs(at_once).mean() > 0.3
    numpy.testing.assert_allclose(at_once, theirs[0], rtol=1e-4, atol=1e-4)
