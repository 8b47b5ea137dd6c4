"""Forwards by our Triton kernels on a GPU. Without one: test_compiled_kernels.py and
test_interpreted_kernels.py."""

from __future__ import annotations

import gc

import pytest
import torch

import zoo
from cuda_models import cuda_model
from draftahead import LLM, SamplingParams
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.models.runner import ModelRunner
from drafted import ALL
from graph_checks import assert_waits_once_per_step, eager, relative_error

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=32)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=32, seed=3)


def runner_of(model: object, max_batch: int = 1, max_context: int = 512) -> ModelRunner:
    return ModelRunner(model, max_batch=max_batch, max_context=max_context, scratch_entries=64)


def random_tokens(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 300, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_len", [None, 1600], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_are_as_near_the_truth_as_the_models_own(
    kind: str, dtype: torch.dtype, kv_len: int | None
) -> None:
    model = cuda_model(kind, dtype, "cuda")
    ours = runner_of(model, 3, 1700)
    assert isinstance(ours._backend, CudaDecoder)
    theirs = eager(runner_of(model, 3, 1700))
    exact = eager(runner_of(cuda_model(kind, dtype, "cuda").double(), 3, 1700))
    lengths = [1, 70, 300] if kv_len is None else [1, 257, 1500]
    for slot, length in enumerate(lengths):
        for runner in (ours, theirs, exact):
            runner.prefill(slot, random_tokens(length, seed=slot).tolist())
    trees = [[-1, 0, 0, 1, 3, 2, 2], [-1, 0, 1, 2, 0, 4, 5], [-1, 0, 0, 0, 0, 0, 0]]
    for nodes, parents in ((1, None), (7, None), (7, torch.tensor(trees)), (40, None)):
        tokens = random_tokens(3, nodes)
        truth = exact.forward(tokens, parents=parents).logits
        usual = relative_error(theirs.forward(tokens, parents=parents).logits, truth)
        found = ours.forward(tokens, parents=parents, kv_len=kv_len).logits
        gap = relative_error(found, truth)
        assert gap < 1.3 * usual + 1e-3, (nodes, gap, usual)


def test_accepted_kv_entries_stay_and_others_are_overwritten() -> None:
    """A text computed in steps, with drafted tokens that are rejected, ends with the logits of one
    forward."""
    runner = runner_of(cuda_model("llama", torch.bfloat16, "cuda"), 2)
    text, wrong = random_tokens(60).tolist(), random_tokens(2, 4, seed=2)
    for slot in range(2):
        runner.prefill(slot, text[:20])
    for start in range(20, 60, 3):
        right = text[start : start + 3]
        runner.forward(torch.cat([torch.tensor([right, right]), wrong], 1))
        runner.cache.commit([range(len(right))] * 2, [right] * 2)
    last = runner.forward(torch.tensor([[7], [7]])).logits[:, 0].float()
    runner.cache.tokens_in[0].clear()
    runner.prefill(0, text)
    once = eager(runner).forward(torch.tensor([[7]])).logits[0, 0]
    assert torch.equal(last[0], last[1])
    assert relative_error(last[0], once) < 0.05


def test_every_split_of_a_longer_and_longer_context() -> None:
    """The attention splits a context in other ways as it grows; each has a graph of its own."""
    runner = runner_of(cuda_model("llama", torch.bfloat16, "cuda"), max_context=2000)
    backend, text = runner._backend, random_tokens(2000).tolist()
    block = torch.tensor([text[:3]])
    for length in (1, 62, 63, 64, 65, 130, 250, 500, 510, 900, 1020, 1023, 1026, 1500, 1900):
        runner.prefill(0, text[:length])
        runner._backend = None
        theirs = runner.forward(block).logits.clone()
        runner._backend = backend
        found = runner.forward(block)
        assert relative_error(found.logits, theirs) < 0.15, length
        assert found.argmax is not None
        assert torch.equal(found.argmax.clone(), runner.forward(block).logits.argmax(-1))


def test_a_dropped_graph_is_captured_again_and_gives_the_same_bits() -> None:
    runner = runner_of(cuda_model("llama", torch.bfloat16, "cuda"))
    assert isinstance(runner._backend, CudaDecoder)
    graphs = runner._backend.graphs
    graphs.max_graphs = 3

    def logits() -> list[torch.Tensor]:
        return [runner.forward(torch.full((1, n), 5)).logits.clone() for n in range(1, 9)]

    before = logits()
    assert len(graphs) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, logits(), strict=True))


def test_models_may_be_freed_while_another_is_captured() -> None:
    """They are in cycles, so the garbage collector finds them, at any moment."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(4):
            llm = LLM(cuda_model("llama", torch.bfloat16, "cuda"), "lookup", max_batch=1)
            llm.generate([[1, 2, 3, 1, 2]], SamplingParams(temperature=0, max_tokens=12))
            del llm
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize(
    "drafter",
    [
        "lookup",
        "draft_model_self",
        "garbage_tree",
        "garbage",
        "auto_adaptive",
        "recycle",
        "eagle_adaptive",
        "auto_with_head",
        "medusa_adaptive",
        "early_exit",
    ],
)
def test_replay_output_is_that_of_plain_decoding(drafter: str, params: SamplingParams) -> None:
    model, prompts = cuda_model("qwen3", torch.bfloat16, "cuda"), zoo.ragged_prompts(3)
    plain = LLM(model, "none", exact="replay", max_batch=3)
    assert isinstance(plain.engine.verifier.runner._backend, CudaDecoder)
    drafted = LLM(model, ALL[drafter](model), exact="replay", max_batch=3)
    outputs = [[o.token_ids for o in llm.generate(prompts, params)] for llm in (plain, drafted)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_waits_for_the_device_once(temperature: float) -> None:
    model = cuda_model("llama", torch.bfloat16, "cuda")
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=1, ignore_eos=True)
    llm = LLM(model, ALL["draft_model_self"](model), max_batch=2)
    assert_waits_once_per_step(llm, [[1, 2, 3], [4, 5, 6]], params)
