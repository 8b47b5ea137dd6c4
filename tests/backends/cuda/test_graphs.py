"""CUDA graphs by key, and the inputs that they read: on an emulated GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from draftahead.backends.base import DeviceTree
from draftahead.backends.cuda import graphs as graphs_module
from draftahead.backends.cuda.graphs import ForwardInputs, GraphPool, Inputs
from draftahead.core.device import CudaDevice
from emulated_gpu import EmulatedGpu, emulated_gpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as found:
        yield found


# ------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("known", ["all", "shape"])
def test_a_forward_reads_its_inputs_from_one_block(known: Any) -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 1]])
    inputs = ForwardInputs(2, 3, CPU, known)
    inputs.write(tokens, [10, 20], None, 1)
    inputs.copy_to_device()
    assert inputs.num_context_tokens.tolist() == [1]
    assert inputs.num_cached.tolist() == [10, 20]
    assert inputs.tokens.tolist() == tokens.tolist()
    assert inputs.depths.tolist() == [[0, 1, 2]] * 2
    assert inputs.ancestors.tolist() == [[0b1, 0b11, 0b111]] * 2
    inputs.write(tokens, [11, 21], [[-1, 0, 0], [-1, 0, 1]], 2)
    assert inputs.num_cached.tolist() == [10, 20]  # nothing is copied before the forward itself
    inputs.copy_to_device()
    assert inputs.num_cached.tolist() == [11, 21]
    assert inputs.depths.tolist() == [[0, 1, 1], [0, 1, 2]]
    assert inputs.ancestors.tolist() == [[0b1, 0b11, 0b101], [0b1, 0b11, 0b111]]


def test_of_a_device_tree_only_the_roots_come_from_the_host() -> None:
    trees = torch.arange(18).view(2, 3, 3)
    inputs = ForwardInputs(2, 3, CPU, "roots")
    inputs.write(trees[:, 0], [10, 20], DeviceTree([5, 6], trees), 1)
    inputs.tokens.fill_(-1)
    inputs.copy_to_device()
    assert len(inputs.words) == 5
    assert inputs.num_context_tokens.tolist() == [1] and inputs.num_cached.tolist() == [10, 20]
    assert inputs.roots.tolist() == [5, 6]
    assert torch.equal(inputs.trees, trees[:, :2])
    assert bool((inputs.tokens == -1).all())  # for a kernel to fill in


def test_pinned_memory_is_kept_for_the_next_owner(gpu: EmulatedGpu) -> None:
    """But not while the device may still read it."""
    first, second = (ForwardInputs(3, 11, CPU, "all") for _ in range(2))
    address, waits = first._host.data_ptr(), gpu.waits
    assert second._host.data_ptr() != address
    del first
    assert ForwardInputs(3, 11, CPU, "all")._host.data_ptr() == address
    assert gpu.waits == waits + 1


# ------------------------------------------------------------------------------------- graphs


class Number(Inputs):
    """One number of the host."""

    def __init__(self) -> None:
        super().__init__([(1,)], CPU)


def run(graphs: GraphPool, body: Callable[[Any], Any], number: int = 3, key: str = "key") -> Any:
    return graphs.run(key, body, Number, lambda inputs: inputs.words.fill(number))


def doubled(inputs: Number) -> Any:
    return (inputs.parts[0] * 2,)


def test_a_replay_reads_its_inputs_anew_and_nothing_else() -> None:
    graphs, frozen = GraphPool(CPU, "it"), [10]

    def body(inputs: Number) -> Any:
        (number,) = inputs.parts
        return (torch.cat([number * 2, number + frozen[0]]).view(2, 1).t(),)

    assert run(graphs, body)[0].tolist() == [[6, 13]]
    frozen[0] = 20  # a value that should have been part of the key
    assert run(graphs, body, 4)[0].tolist() == [[8, 24]]  # captured, the first being busy
    assert run(graphs, body, 5)[0].tolist() == [[10, 15]]  # replayed


def test_a_body_that_may_run_once_is_captured_with_zeros() -> None:
    """It adds to a total: what is added while capturing may not count."""
    graphs, total = GraphPool(CPU, "it"), torch.zeros(1, dtype=torch.int64)

    def body(inputs: Number) -> Any:
        total.add_(inputs.parts[0])
        return ()

    for _ in range(3):
        graphs.run("key", body, Number, lambda inputs: inputs.words.fill(3), once=True)
    assert total.tolist() == [9]


def test_graphs_are_bounded_and_the_least_recently_used_is_dropped(gpu: EmulatedGpu) -> None:
    graphs = GraphPool(CPU, "it")
    graphs.max_graphs = 3
    for key in "abca":  # one of b is dropped for the second of a
        assert run(graphs, doubled, key=key)[0].tolist() == [6]
    assert len(graphs) == 3
    before = gpu.captures
    assert run(graphs, doubled, 4, key="a")[0].tolist() == [8]
    assert gpu.captures == before
    run(graphs, doubled, key="b")
    assert gpu.captures == before + 1 and len(graphs) == 3


def test_graphs_of_one_key_that_may_be_under_way_are_bounded(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the oldest is waited for."""
    monkeypatch.setattr(graphs_module, "MAX_IN_FLIGHT", 3)
    monkeypatch.setattr("emulated_gpu.EmulatedEvent.query", lambda event: not event._is_under_way)
    graphs = GraphPool(CPU, "it")
    for number in range(8):
        assert run(graphs, doubled, number)[0].tolist() == [2 * number]
    assert gpu.captures == len(graphs) == 3


def test_forgotten_graphs_are_captured_again(gpu: EmulatedGpu) -> None:
    graphs = GraphPool(CPU, "it")
    run(graphs, doubled)
    before, waits = gpu.captures, gpu.waits
    graphs.forget()
    assert len(graphs) == 0 and gpu.waits == waits + 1
    run(graphs, doubled)
    assert gpu.captures == before + 1


# ------------------------------------------------------------------- what cannot be captured


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.item(),
        lambda x: bool(x > 0),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x),
        lambda x: int(x),
    ],
)
def test_a_body_that_waits_for_the_device_is_not_captured(
    waits: Any, inference: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs eagerly from then on, with one warning."""
    graphs = GraphPool(CPU, "a model")
    with (
        torch.inference_mode(inference),
        caplog.at_level(logging.WARNING, "draftahead"),
        pytest.warns(UserWarning, match="forwards of a model cannot be captured"),
    ):
        assert run(graphs, lambda inputs: (waits(inputs.parts[0]),)) is None
    assert not graphs.can_capture and len(graphs) == 0
    assert not caplog.records  # a warning, and no traceback beside it


def test_graphs_are_not_dropped_while_the_device_may_run_them(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, calls = GraphPool(CPU, "it"), list[str]()
    for name in ("synchronize", "reset_pool"):
        monkeypatch.setattr(gpu, name, partial(calls.append, name))
    run(graphs, doubled)
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert run(graphs, lambda inputs: inputs.parts[0].item(), key="other") is None
    assert calls[-2:] == ["synchronize", "reset_pool"]


@pytest.mark.parametrize("fault", [TypeError, ValueError, AssertionError, KeyError])
def test_faults_of_our_own_are_not_hidden(fault: type[Exception]) -> None:
    graphs = GraphPool(CPU, "it")

    def faulty(_: Any) -> Any:
        raise fault("ours")

    def writing(_: Any) -> None:
        raise RuntimeError("writing")

    with pytest.raises(fault):
        run(graphs, faulty)
    assert graphs.can_capture
    with pytest.raises(RuntimeError, match="writing"):  # nor one outside of the capture
        graphs.run("other", lambda _: (), Number, writing)
    assert graphs.can_capture


def test_kernels_that_do_not_compile_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class TritonError(Exception): ...

    class TooLargeError(TritonError): ...

    errors = types.ModuleType("triton.errors")
    errors.TritonError = TritonError  # type: ignore[attr-defined]
    real = CudaDevice(torch.device("cuda"))
    monkeypatch.delitem(sys.modules, "triton.errors", raising=False)
    assert not issubclass(TritonError, real.capture_errors)
    monkeypatch.setitem(sys.modules, "triton.errors", errors)
    monkeypatch.setattr(EmulatedGpu, "capture_errors", real.capture_errors)
    graphs = GraphPool(CPU, "it")

    def uncompiled(_: Any) -> Any:
        raise TooLargeError("out of resources: shared memory")

    with pytest.warns(UserWarning, match="shared memory"):
        assert run(graphs, uncompiled) is None
    assert not graphs.can_capture


@pytest.mark.parametrize(
    "failure",
    [
        PermissionError("~/.triton"),
        subprocess.CalledProcessError(1, "ptxas"),
        ImportError("undefined symbol"),
    ],
)
def test_kernels_that_cannot_be_built_or_loaded_are_not_captured(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CudaDevice(torch.device("cuda"))
    monkeypatch.setattr(EmulatedGpu, "capture_errors", real.capture_errors)
    graphs = GraphPool(CPU, "it")

    def failing(_: Any) -> Any:
        raise failure

    with pytest.warns(UserWarning, match="run eagerly"):
        assert run(graphs, failing) is None
    assert not graphs.can_capture
