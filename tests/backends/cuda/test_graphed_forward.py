"""A model's own forward as CUDA graphs: on a GPU, and on an emulated one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.backends import select
from draftahead.backends.cuda.hf_graph import GraphedForward
from draftahead.models.runner import ModelRunner
from drafted import ALL, KnowsOutput
from emulated_gpu import emulated_gpu
from graph_checks import assert_same_entries, eager
from llama_shaped import llama_shaped, runner_of

GREEDY = SamplingParams(temperature=0, max_tokens=32)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=32, seed=3)
PARAMS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def tiny(name: str, device: str, dtype: torch.dtype = torch.float64) -> Any:
    return zoo.tiny(name, dtype=dtype).to(device)


def backend_of(runner: ModelRunner) -> GraphedForward:
    assert isinstance(runner._backend, GraphedForward)
    return runner._backend


# ----------------------------------------------------------------------------- whole outputs


def test_a_triton_that_does_not_load_leaves_the_models_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton compiles C for its driver, which fails in many ways."""
    pytest.importorskip("triton")

    def fails(_: Any) -> None:
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr("draftahead.core.device.Device.load_triton", fails)
    model = llama_shaped("qwen3").bfloat16()
    with emulated_gpu(), pytest.warns(UserWarning, match="libcuda.*our GPU kernels are not used"):
        runner = runner_of(model)
        choice = runner.backend_choice
    assert choice.name == "cuda graphs" and "libcuda" in choice.reason


@pytest.mark.filterwarnings("ignore:.*cannot be captured")  # experts that count on the host
@pytest.mark.parametrize("name", [n for n in zoo.ARCHITECTURES if n != "phi3_longrope"])
def test_greedy_output_is_that_of_generate(name: str, gpu_device: str) -> None:
    model, prompts = tiny(name, gpu_device), zoo.ragged_prompts(4)
    answers = {tuple(p): zoo.reference(model, p, 32) for p in prompts}
    for drafter in (KnowsOutput(answers), "lookup"):
        outs = LLM(model, drafter, max_batch=4).generate(prompts, GREEDY)
        assert [out.token_ids for out in outs] == list(answers.values())


@PARAMS
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "garbage_tree",
        "auto_with_model",
        pytest.param("lookup", marks=pytest.mark.gpu),
        pytest.param("draft_model_self", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("generous_policy")
def test_replay_output_is_that_of_plain_decoding(
    name: str, dtype: torch.dtype, params: SamplingParams, gpu_device: str
) -> None:
    """To the last bit, or refused."""
    model, prompts = tiny("llama", gpu_device, dtype), zoo.ragged_prompts(3)
    try:
        plain = LLM(model, "none", exact="replay", max_batch=3).generate(prompts, params)
    except errors.ReplayUnsupportedError as refused:
        pytest.skip(str(refused))
    llm = LLM(model, ALL[name](model), exact="replay", max_batch=3)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [o.token_ids for o in plain]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.gpu),
        pytest.param(SAMPLED, id="sampled"),
    ],
)
@pytest.mark.parametrize(
    "drafter",
    [
        "auto_adaptive",
        "recycle_adaptive",
        "draft_model_self_adaptive",
        "eagle_adaptive",
        "eagle_tree",
        "auto_with_head",
        "medusa_adaptive",
        "medusa_tree",
        "early_exit_adaptive",
        "layer_skip_adaptive",
    ],
)
@pytest.mark.usefixtures("generous_policy")
def test_output_with_drafts_is_that_of_plain_decoding(
    drafter: str, params: SamplingParams, gpu_device: str
) -> None:
    """In float32, where a near-tie is rare."""
    model, prompts = tiny("llama", gpu_device, torch.float32), zoo.ragged_prompts(3)
    plain = LLM(model, "none", max_batch=3).generate(prompts, params)
    outs = LLM(model, ALL[drafter](model), max_batch=3).generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    if drafter in ("auto_adaptive", "recycle_adaptive", "draft_model_self_adaptive"):
        assert sum(out.stats.accepted for out in outs) > (0 if params is SAMPLED else 20)


@pytest.mark.gpu  # torch.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own affair
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3", "phi3"])
def test_compiled_layers_give_the_same_output(name: str) -> None:
    """One compiled layer serves all of a kind: not one each."""
    torch._dynamo.reset()
    model, prompts = tiny(name, "cuda"), zoo.ragged_prompts(2)
    answers = [zoo.reference(model, prompt, 24) for prompt in prompts]
    llm = LLM(model, {"method": "lookup", "num_speculative_tokens": 3}, max_batch=2, compile=True)
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    assert [out.token_ids for out in outs] == answers
    assert backend_of(llm.engine.verifier.runner).graphs.can_capture
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_waits_for_the_device_runs_eagerly(
    gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = tiny("gpt2", gpu_device), zoo.ragged_prompts(2)
    answers = [zoo.reference(model, prompt, 16) for prompt in prompts]
    block = type(model.transformer.h[0])
    forward = block.forward

    def waiting(self: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        hidden.sum().item()
        return forward(self, hidden, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(block, "forward", waiting)
        patch.setattr(select, "foreign_code", lambda model: None)
        with pytest.warns(UserWarning, match="run eagerly"):
            llm = LLM(model, "lookup", max_batch=2)
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    assert [out.token_ids for out in outs] == answers
    # The process is as it was: its stream, its random numbers, and captures of others.
    if gpu_device == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(4, device=gpu_device).isfinite().all()
    other = LLM(tiny("llama", gpu_device), "lookup", max_batch=2)
    other.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert backend_of(other.engine.verifier.runner).graphs.can_capture


@pytest.mark.gpu
def test_random_numbers_are_the_same_on_every_device() -> None:
    from draftahead.sampling.noise import rng_key, uniforms

    keys = [rng_key(i) for i in range(8)]
    assert torch.equal(uniforms(keys, 5000, "cuda").cpu(), uniforms(keys, 5000))


# ----------------------------------------------------------------------------- single forwards


def runner_on(device: str) -> ModelRunner:
    return ModelRunner(tiny("llama", device), max_batch=2, max_context=90, scratch_entries=64)


def test_a_forward_is_captured_once_and_replayed() -> None:
    with emulated_gpu() as gpu:
        runner = runner_on("cpu")
        runner.prefill(0, [5, 6, 7])
        before, blocks = gpu.captures, ([8, 9], [10, 11], [8, 9])
        found = [runner.forward(torch.tensor([nodes])).logits.clone() for nodes in blocks]
        assert gpu.captures == before + 2  # a graph is busy for one launch
        assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
        expected = eager(runner).forward(torch.tensor([[10, 11]])).logits
        assert torch.allclose(found[1], expected)


def test_tokens_that_only_the_device_knows() -> None:
    """They are not in the block that the host writes."""
    with emulated_gpu() as gpu:
        runner = runner_on("cpu")
        runner.prefill(0, [5, 6, 7])
        expected = runner.forward(torch.tensor([[8, 9]])).logits.clone()
        gpu.tokens_on_device = True
        for nodes in ([10, 11], [12, 13], [8, 9]):
            found = runner.forward(torch.tensor([nodes])).logits
        assert torch.equal(found, expected)
        keys: Any = backend_of(runner).graphs._graphs
        assert {key[-1] for key in keys} == {"all", "shape"}


def test_a_graph_serves_one_slice_of_the_cache(
    gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one slot on, over so many KV entries."""
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.MIN_KV_LEN", 16)
    ours, expected = runner_on(gpu_device), eager(runner_on(gpu_device))
    nodes = torch.tensor([[8, 9]])
    for slot, length in ((0, 5), (0, 25), (1, 25), (0, 60), (1, 5)):
        found = []
        for runner in (ours, expected):
            runner.prefill(slot, [5 + (3 + slot) * i % 90 for i in range(length)])
            found.append(runner.forward(nodes, first_slot=slot).logits.clone())
        assert torch.allclose(*found, atol=1e-9), (slot, length)
    assert len(backend_of(ours).graphs) > 4


def test_graphs_are_not_used_for_what_they_were_not_captured_for(gpu_device: str) -> None:
    """Hidden states are captured from the third step on, and moved with accepted nodes."""
    both = runner_on(gpu_device), eager(runner_on(gpu_device))
    for step in range(6):
        for runner in both:
            if step == 2:
                runner.add_aux_layers((1,))
            for slot in range(2):
                runner.prefill(slot, [5, 6 + slot, 7])
            root, _, right, last = nodes = [8 + step, 19, 30 + step, 41]
            parents = torch.tensor([[-1, 0, 0, 2]] * 2)
            runner.forward(torch.tensor([nodes] * 2), parents=parents)
            runner.cache.commit([[0, 2, 3], [0, 2]], [[root, right, last], [root, right]])
        assert_same_entries(*both)
