"""On a CUDA device: the same parity, the same losslessness. Not run in CI, which has none."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.backends.cuda.decoder import CudaDecoder
from draftahead.backends.cuda.hf_graph import GraphedForward
from draftahead.models.runner import ModelRunner
from drafted import ALL, Clairvoyant

pytestmark = pytest.mark.gpu
DEVICE = "cuda"  # "cpu" where a GPU is emulated: test_gpu_emulated.py
GREEDY = SamplingParams(temperature=0, max_tokens=32)
WARM = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=32, seed=3)


def tiny(name: str, dtype: torch.dtype = torch.float64) -> Any:
    return zoo.tiny(name, dtype=dtype).to(DEVICE)


@pytest.mark.filterwarnings("ignore:.*cannot be recorded")  # experts that count on the host
@pytest.mark.parametrize("name", [n for n in zoo.ARCHITECTURES if n != "phi3_longrope"])
def test_greedy_equals_generate(name: str) -> None:
    model, prompts = tiny(name), zoo.ragged_prompts(4)
    answers = {tuple(p): zoo.reference(model, p, 32) for p in prompts}
    for drafter in (Clairvoyant(answers), "lookup"):
        outs = LLM(model, drafter, max_batch=4).generate(prompts, GREEDY)
        assert [out.token_ids for out in outs] == list(answers.values())


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", ["lookup", "garbage_tree", "draft_model_self", "auto_with_model"])
def test_replay(name: str, dtype: torch.dtype, sampling: SamplingParams) -> None:
    """Equal to plain decoding to the last bit, or refused."""
    model, prompts = tiny("llama", dtype), zoo.ragged_prompts(3)
    try:
        plain = LLM(model, "none", exact="replay", max_batch=3).generate(prompts, sampling)
    except errors.ReplayUnsupportedError as refused:
        pytest.skip(str(refused))
    llm = LLM(model, ALL[name](model), exact="replay", max_batch=3)
    assert [o.token_ids for o in llm.generate(prompts, sampling)] == [o.token_ids for o in plain]


def test_noise_is_the_same_on_every_device() -> None:
    from draftahead.sampling.noise import rng_key, uniforms

    keys = [rng_key(i) for i in range(8)]
    assert torch.equal(uniforms(keys, 5000, "cuda").cpu(), uniforms(keys, 5000))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own affair
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3", "phi3"])
def test_compiled_layers_say_the_same(name: str) -> None:
    """One compiled layer serves all of a kind: not one each."""
    torch._dynamo.reset()
    model, prompts = tiny(name), zoo.ragged_prompts(2)
    answers = [zoo.reference(model, prompt, 24) for prompt in prompts]
    llm = LLM(model, {"method": "lookup", "num_speculative_tokens": 3}, max_batch=2, compile=True)
    assert isinstance(llm.engine.verifier.runner._decoder, GraphedForward)
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    assert [out.token_ids for out in outs] == answers
    assert llm.engine.verifier.runner._decoder.graphs.works
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_cannot_be_recorded_runs_eagerly_and_says_so() -> None:
    model, prompts = tiny("gpt2"), zoo.ragged_prompts(2)
    answers = [zoo.reference(model, prompt, 16) for prompt in prompts]
    block = type(model.transformer.h[0])
    forward = block.forward

    def peeking(self: Any, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        hidden.sum().item()  # waits for the device: no graph can hold that
        return forward(self, hidden, *args, **options)

    block.forward = peeking
    try:
        with pytest.warns(UserWarning, match="run eagerly"):
            llm = LLM(model, "lookup", max_batch=2)
        outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    finally:
        block.forward = forward
    assert [out.token_ids for out in outs] == answers
    # and leaves the process as it was: its stream, its noise, and others' recordings
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(4, device="cuda").isfinite().all()
    other = LLM(tiny("llama"), "lookup", max_batch=2)
    assert isinstance(other.engine.verifier.runner._decoder, GraphedForward)
    other.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert other.engine.verifier.runner._decoder.graphs.works


# ------------------------------------------------------------------- our kernels and CUDA graphs

COMMON = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def shaped(kind: str, dtype: torch.dtype) -> Any:
    """A model whose shape the kernels know, all its parameters random."""
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    options = COMMON | ({"sliding_window": 40} if kind == "mistral" else {})
    config = getattr(transformers, f"{names[kind]}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{names[kind]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, 0.3 if name.endswith("bias") else 0.12)
    return model.to(DEVICE, dtype)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("live", [None, 1600], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_kernels_are_as_near_the_truth_as_the_models_own_forward(
    kind: str, dtype: torch.dtype, live: int | None
) -> None:
    model = shaped(kind, dtype)
    passes = ModelRunner(model, max_batch=3, max_context=1700, scratch_entries=64)
    assert isinstance(passes._decoder, CudaDecoder)
    exact = ModelRunner(
        shaped(kind, dtype).double(), max_batch=3, max_context=1700, scratch_entries=64
    )
    exact._decoder = None
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 70, 300] if live is None else [1, 257, 1500]
    for row, length in enumerate(lengths):
        text = torch.randint(0, 300, (length,), generator=generator).tolist()
        passes.prefill(row, text)
        exact.prefill(row, text)
    decoder = passes._decoder
    for nodes, parents in (
        (1, None),
        (7, None),
        (7, torch.tensor([[-1, 0, 0, 1, 3, 2, 2], [-1, 0, 1, 2, 0, 4, 5], [-1, 0, 0, 0, 0, 0, 0]])),
        (40, None),
    ):
        tokens = torch.randint(0, 300, (3, nodes), generator=generator)
        truth = exact.forward(tokens, parents=parents)
        passes._decoder = None
        theirs = error(passes.forward(tokens, parents=parents), truth)
        passes._decoder = decoder
        ours = error(passes.forward(tokens, parents=parents, kv_len=live), truth)
        assert ours < 1.3 * theirs + 1e-3, (nodes, ours, theirs)


def test_accepted_keys_stay_and_the_rest_is_overwritten() -> None:
    """A text fed in steps, with guesses that are dropped, ends with the logits of one pass."""
    model = shaped("llama", torch.bfloat16)
    passes = ModelRunner(model, max_batch=2, max_context=512, scratch_entries=64)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 300, (60,), generator=generator).tolist()
    for row in range(2):
        passes.prefill(row, text[:20])
    at = 20
    while at < 60:
        right = text[at : at + 3]
        wrong = torch.randint(0, 300, (2, 4), generator=generator)
        nodes = torch.cat([torch.tensor([right, right]), wrong], 1)
        passes.forward(nodes)
        passes.cache.commit([range(len(right))] * 2, [right] * 2)
        at += 3
    last = passes.forward(torch.tensor([[7], [7]]))[:, 0].float()
    passes.cache.tokens_in[0].clear()
    passes.prefill(0, text)
    passes._decoder = None
    once = passes.forward(torch.tensor([[7]]))[0, 0].float()
    assert torch.equal(last[0], last[1])
    gap = error(last[0], once.double())
    assert gap < 0.05, gap


def test_a_text_that_grows_through_all_lengths() -> None:
    """The attention cuts a text in other ways as it grows; each cut has a graph of its own."""
    passes = ModelRunner(
        shaped("llama", torch.bfloat16), max_batch=1, max_context=2000, scratch_entries=64
    )
    decoder, generator = passes._decoder, torch.Generator().manual_seed(1)
    text = torch.randint(0, 300, (2000,), generator=generator).tolist()
    block = torch.tensor([text[:3]])
    for length in (1, 62, 63, 64, 65, 130, 250, 500, 510, 900, 1020, 1023, 1026, 1500, 1900):
        passes.prefill(0, text[:length])
        passes._decoder = None
        theirs = passes.forward(block).double().clone()
        passes._decoder = decoder
        assert error(passes.forward(block), theirs) < 0.15, length
        assert passes.best is not None
        assert torch.equal(passes.best, passes.forward(block).argmax(-1))


def test_graphs_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = ModelRunner(
        shaped("llama", torch.bfloat16), max_batch=1, max_context=512, scratch_entries=64
    )
    assert isinstance(passes._decoder, CudaDecoder)
    graphs = passes._decoder.graphs
    graphs.most = 3
    before = [passes.forward(torch.full((1, n), 5)).clone() for n in range(1, 9)]
    assert len(graphs) == 3
    after = [passes.forward(torch.full((1, n), 5)).clone() for n in range(1, 9)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_models_that_die_while_another_is_recorded() -> None:
    """They are in cycles, so the collector finds them, at any moment."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(4):
            llm = LLM(shaped("llama", torch.bfloat16), "lookup", max_batch=1)
            llm.generate([[1, 2, 3, 1, 2]], SamplingParams(temperature=0, max_tokens=12))
            del llm
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize(
    "drafter",
    [
        "lookup",
        "draft_model_self",
        "garbage_tree",
        "garbage",
        "auto_guided",
        "recycle",
        "eagle_guided",
        "auto_eagle",
        "medusa_guided",
        "early_exit",
    ],
)
def test_replay_in_half_precision_with_our_kernels(drafter: str, sampling: SamplingParams) -> None:
    model = shaped("qwen3", torch.bfloat16)
    prompts = [[p % 300 for p in prompt] for prompt in zoo.ragged_prompts(3)]
    plain = LLM(model, "none", exact="replay", max_batch=3)
    assert isinstance(plain.engine.verifier.runner._decoder, CudaDecoder)
    drafted = LLM(model, ALL[drafter](model), exact="replay", max_batch=3)
    texts = [[o.token_ids for o in llm.generate(prompts, sampling)] for llm in (plain, drafted)]
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("drafter", ["auto_guided", "recycle_guided", "draft_model_self_guided"])
def test_guided_drafters_give_the_text_of_plain_decoding(
    drafter: str, sampling: SamplingParams
) -> None:
    """In float32, where a near-tie is rare: greedy, and for a seed, trees and all."""
    model, prompts = tiny("llama", torch.float32), zoo.ragged_prompts(3)
    plain = LLM(model, "none", max_batch=3).generate(prompts, sampling)
    outs = LLM(model, ALL[drafter](model), max_batch=3).generate(prompts, sampling)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.accepted for out in outs) > (0 if sampling is WARM else 20)


@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "sampled"])
def test_a_step_reads_back_once(warm: bool) -> None:
    """Between two launches the host waits for the device one single time."""
    model = shaped("llama", torch.bfloat16)
    sampling = SamplingParams(
        temperature=0.8 if warm else 0, max_tokens=40, seed=1, ignore_eos=True
    )
    llm = LLM(model, ALL["draft_model_self"](model), max_batch=2)
    prompts = [[1, 2, 3], [4, 5, 6]]
    reads_back_once(llm, prompts, sampling)


def reads_back_once(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> None:
    llm.generate(prompts, sampling)  # captures the graphs
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outs = llm.generate(prompts, sampling)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in said if "synchronizing" in str(w.message)]
    steps = max(out.stats.steps for out in outs)
    where = {f"{w.filename}:{w.lineno}" for w in waits}
    assert steps <= len(waits) <= steps + 8, (len(waits), steps, where)  # prompts wait, too
