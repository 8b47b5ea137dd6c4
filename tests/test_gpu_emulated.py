"""Graphed forwards without a GPU: the tests of test_gpu.py, on an emulated one.

Kernels of our own are left out here (see tests/interpreted), so every forward is the model's own.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import draftahead.runtime
import pytest
import torch

import test_gpu
import test_gpu_heads
import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cuda.graphs import GraphPool, Inputs
from draftahead.backends.cuda.hf_graph import GraphedForward
from draftahead.core.device import CudaDevice
from draftahead.models.runner import ModelRunner
from emulated_gpu import EmulatedGpu, emulated_gpu


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    for name in ("gpu_kernels", "gpu_growth"):
        monkeypatch.setitem(sys.modules, f"draftahead.runtime.{name}", None)
        monkeypatch.delattr(draftahead.runtime, name, raising=False)
    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(test_gpu_heads, "DEVICE", "cpu")
    with emulated_gpu() as found:
        yield found


# -------------------------------------------------------- what a GPU would be asked for as well


@pytest.mark.filterwarnings("ignore:.*cannot be recorded")  # experts that count on the host
@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", "qwen3_sliding", "phi3", "opt", "gpt_oss", "deepseek_v3"]
)
def test_greedy_equals_generate(name: str) -> None:
    test_gpu.test_greedy_equals_generate(name)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("drafter", ["lookup", "garbage_tree"])
def test_replay(drafter: str) -> None:
    test_gpu.test_replay(drafter, torch.float32, test_gpu.WARM)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("drafter", ["auto_guided", "draft_model_self_guided"])
def test_adaptive_drafters_give_the_text_of_plain_decoding(drafter: str) -> None:
    test_gpu.test_guided_drafters_give_the_text_of_plain_decoding(drafter, test_gpu.WARM)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("drafter", ["eagle_tree", "medusa_guided"])
def test_texts_are_those_of_plain_decoding(drafter: str) -> None:
    test_gpu_heads.test_texts_are_those_of_plain_decoding(drafter, test_gpu_heads.WARM)


def test_hidden_states_are_those_of_the_models_own_forward() -> None:
    test_gpu_heads.test_states_are_those_of_the_models_own_forward(True)


def test_prompts_are_filled_by_graphs() -> None:
    test_gpu_heads.test_prompts_are_filled_by_recordings("recorded")


# --------------------------------------------------------------------- graphs and their emulation


def runner(**options: Any) -> ModelRunner:
    return ModelRunner(zoo.tiny("llama"), max_batch=2, max_context=90, spare=64, **options)


def test_forwards_are_captured_once_and_replayed(gpu: EmulatedGpu) -> None:
    passes = runner()
    decoder = passes._decoder
    assert isinstance(decoder, GraphedForward)
    passes.prefill(0, [5, 6, 7])
    before, blocks = gpu.captures, ([8, 9], [10, 11], [8, 9])
    found = [passes.run(torch.tensor([tokens])).clone() for tokens in blocks]
    assert decoder.graphs.works and gpu.captures == before + 2  # a graph is busy for one launch
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    passes._decoder = None
    assert torch.allclose(found[1], passes.run(torch.tensor([[10, 11]])))


def test_tokens_that_only_the_device_knows(gpu: EmulatedGpu) -> None:
    """They are no part of the block that the host writes."""
    passes = runner()
    passes.prefill(0, [5, 6, 7])
    here = passes.run(torch.tensor([[8, 9]])).clone()
    gpu.tokens_on_device = True
    for _ in range(3):
        assert torch.equal(passes.run(torch.tensor([[8, 9]])), here)
    assert passes._decoder is not None
    keys = passes._decoder.graphs._kept  # type: ignore[attr-defined]
    assert {key[-1] for key in keys} == {"all", "shape"}


def eager(passes: ModelRunner) -> ModelRunner:
    passes._decoder = passes._fill = passes.cache.mover = None
    return passes


def same_entries(one: ModelRunner, other: ModelRunner) -> None:
    """Whether two caches hold the same: keys, values and hidden states."""
    for slot, held in enumerate(one.cache.tokens_in):
        assert held == other.cache.tokens_in[slot]
        for here, there in zip(one.cache.stored(), other.cache.stored(), strict=True):
            part = (slice(None), slot, slice(None), slice(len(held)))
            assert torch.allclose(here[part], there[part], atol=1e-9)


def test_graphs_are_not_used_for_what_they_were_not_captured_for() -> None:
    """Hidden states are captured since the third turn: in forwards and in moves of kept nodes."""
    both = runner(), eager(runner())
    for turn in range(6):
        for passes in both:
            if turn == 2:
                passes.watch((1,))
            for slot in range(2):
                passes.prefill(slot, [5, 6 + slot, 7])
            root, _, right, last = nodes = [8 + turn, 19, 30 + turn, 41]
            parents = torch.tensor([[-1, 0, 0, 2]] * 2)
            passes.run(torch.tensor([nodes] * 2), parents=parents)
            passes.cache.keep([[0, 2, 3], [0, 2]], [[root, right, last], [root, right]])
        same_entries(*both)


def test_a_prefill_is_captured_for_each_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.SHORTEST", 16)
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.FEWEST", 4)
    both = runner(), eager(runner())
    for passes in both:
        for slot in (0, 1, 0, 1):
            for length in (6, 12, 40, 46, 52):
                passes.prefill(slot, [5 + (i * (slot + 3)) % 50 for i in range(length)])
            passes.cache.tokens_in[1 - slot].clear()
    assert both[0]._fill is not None
    assert {key[1] for key in both[0]._fill.graphs._kept} >= {16, 64}
    same_entries(*both)


class Number(Inputs):
    """One number of the host."""

    def __init__(self) -> None:
        super().__init__([(1,)], torch.device("cpu"))


def run_graph(graphs: GraphPool, body: Any, number: int = 3) -> Any:
    return graphs.run("key", body, Number, lambda inputs: inputs.words.fill(number))


@pytest.mark.usefixtures("gpu")
def test_a_replay_reads_its_inputs_anew_and_nothing_else() -> None:
    graphs, frozen = GraphPool(torch.device("cpu"), "it"), [10]

    def body(inputs: Number) -> Any:
        (number,) = inputs.parts
        return (torch.cat([number * 2, number + frozen[0]]).view(2, 1).t(),)

    assert run_graph(graphs, body)[0].tolist() == [[6, 13]]
    frozen[0] = 20  # a value that should have been part of the key
    assert run_graph(graphs, body, 4)[0].tolist() == [[8, 24]]  # captured, the first being busy
    assert run_graph(graphs, body, 5)[0].tolist() == [[10, 15]]  # replayed


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
@pytest.mark.parametrize("inference", [False, True])
def test_what_waits_for_the_device_is_found(
    waits: Any, inference: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs eagerly from then on, and that is said once."""
    graphs = GraphPool(torch.device("cpu"), "a model")
    with (
        torch.inference_mode(inference),
        caplog.at_level(logging.WARNING, "draftahead"),
        pytest.warns(UserWarning, match="passes of a model cannot be recorded"),
    ):
        assert run_graph(graphs, lambda inputs: (waits(inputs.parts[0]),)) is None
    assert not graphs.works and len(graphs) == 0
    (told,) = [record for record in caplog.records if record.name == "draftahead"]
    assert "at the host's pace" in told.message


@pytest.mark.usefixtures("gpu")
def test_a_model_that_waits_runs_eagerly(recwarn: pytest.WarningsRecorder) -> None:
    model, prompts = zoo.tiny("gpt2"), zoo.ragged_prompts(2)
    answers = [zoo.reference(model, prompt, 8) for prompt in prompts]
    block = type(model.transformer.h[0])
    forward = block.forward

    def peeking(self: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        hidden.sum().item()
        return forward(self, hidden, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "forward", peeking)
        with pytest.warns(UserWarning, match="run eagerly"):
            llm = LLM(model, "lookup", max_batch=2)
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert [out.token_ids for out in outs] == answers


@pytest.mark.parametrize("fault", [TypeError, ValueError, AssertionError, KeyError])
def test_faults_that_capture_does_not_raise_are_not_hidden(fault: type[Exception]) -> None:
    graphs = GraphPool(torch.device("cpu"), "it")

    def faulty(_: Any) -> Any:
        raise fault("ours")

    def writing(_: Any) -> None:
        raise RuntimeError("writing")

    with pytest.raises(fault):
        run_graph(graphs, faulty)
    assert graphs.works
    with pytest.raises(RuntimeError, match="writing"):  # nor one outside of the capture
        graphs.run("other", lambda _: (), Number, writing)
    assert graphs.works


def test_kernels_that_do_not_compile_are_left_to_eager_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TritonError(Exception): ...

    class TooLargeError(TritonError): ...

    errors = types.ModuleType("triton.errors")
    errors.TritonError = TritonError  # type: ignore[attr-defined]
    real = CudaDevice(torch.device("cuda"))
    monkeypatch.delitem(sys.modules, "triton.errors", raising=False)
    assert real.capture_errors == (RuntimeError,)
    monkeypatch.setitem(sys.modules, "triton.errors", errors)
    monkeypatch.setattr(EmulatedGpu, "capture_errors", real.capture_errors)
    graphs = GraphPool(torch.device("cpu"), "it")

    def uncompiled(_: Any) -> Any:
        raise TooLargeError("out of resources: shared memory")

    with pytest.warns(UserWarning, match="shared memory"):
        assert run_graph(graphs, uncompiled) is None
    assert not graphs.works
