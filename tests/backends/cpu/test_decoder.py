"""The CPU kernels decode as the model's own forward does, with the same bits for every token in
every forward, and notice when the model is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams
from draftahead.backends.cpu.linear import quantize_model
from draftahead.kv.formats import KV_CACHE_DTYPES
from drafted import ALL, KnowsOutput
from llama_shaped import SHAPES, llama_shaped, needs_kernels, runner_of

pytestmark = needs_kernels
GREEDY = SamplingParams(temperature=0, max_tokens=32)
PROMPT = [1, 2, 3]


# ------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_output_of_the_kernels_equals_generate(name: str) -> None:
    """Deep in trees, over sliding windows, in a ragged batch."""
    model, prompts = llama_shaped(name), zoo.ragged_prompts(4)
    answers = {tuple(p): zoo.reference(model, p, 32) for p in prompts}
    llm = LLM(model, KnowsOutput(answers), max_batch=4)
    assert llm.engine.verifier.runner.batch_invariant
    outs = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in outs] == list(answers.values())
    assert all(out.stats.mean_acceptance_length > 3 for out in outs)


def test_activations_of_extreme_size() -> None:
    """Gates far below and above what an exponential can hold."""
    model = llama_shaped("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.mul_(60)
    prompts = zoo.ragged_prompts(2)
    llm = LLM(model, "none")
    assert llm.engine.verifier.runner.batch_invariant
    expected = [zoo.reference(model, prompt, 32) for prompt in prompts]
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == expected


# ------------------------------------------------------------------------------ batch invariance


@pytest.mark.parametrize("kv_cache_dtype", [None, *KV_CACHE_DTYPES])
@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_bits_do_not_depend_on_the_forward(int8: bool, kv_cache_dtype: str | None) -> None:
    """One node, a chain, a tree, other sequences, other threads, chunks of prefill: the same logits
    and keys to the last bit."""
    model = llama_shaped("qwen3")
    if int8:
        quantize_model(model)
    runner = runner_of(model, max_batch=3, kv_cache_dtype=kv_cache_dtype)

    def logits(tokens: torch.Tensor, parents: torch.Tensor | None = None) -> torch.Tensor:
        return runner.forward(tokens, parents=parents).logits[0]

    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, 97, (50,), generator=generator).tolist()
    for slot in range(3):
        runner.prefill(slot, text[slot:30])
    chain = torch.tensor([text[30:50]])
    together = logits(chain)
    for index, token in enumerate(text[30:50]):
        assert torch.equal(logits(torch.tensor([[token]]))[0], together[index])
        runner.cache.tokens_in[0].append(token)
    del runner.cache.tokens_in[0][30:]
    batch = torch.randint(1, 97, (3, 11), generator=generator)
    batch[0] = chain[0, :11]
    assert torch.equal(logits(batch), together[:11])
    # The same path in a tree, between other branches.
    tokens = torch.tensor([[text[30], 5, text[31], 6, 7, text[32]]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2]])
    assert torch.equal(logits(tokens, parents)[[0, 2, 5]], together[:3])
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(logits(chain), together)
    finally:
        torch.set_num_threads(1)
    keys = runner.cache.keys[2][0, :, :30].clone()
    runner.cache.tokens_in[0].clear()
    for end in (1, 4, 17, 30):
        runner.prefill(0, text[:end])
    assert torch.equal(runner.cache.keys[2][0, :, :30], keys)


@pytest.mark.parametrize("hidden_size", [240, 336])
def test_no_output_is_computed_twice(hidden_size: int) -> None:
    """Layers that add to their outputs, cut into chunks of which the last ones are shorter."""
    runner = runner_of(llama_shaped("llama", hidden_size=hidden_size))
    assert runner.batch_invariant
    tokens = torch.tensor([PROMPT])
    alone = runner.forward(tokens).logits
    try:
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            assert torch.equal(runner.forward(tokens).logits, alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("generous_policy")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_replay_output_is_that_of_plain_decoding_in_forwards_of_any_shape(
    name: str, temperature: float
) -> None:
    """Sampled drafts and trees included: replay needs no fixed shape here."""
    model, prompts = llama_shaped("llama"), zoo.ragged_prompts(3)
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=2)
    plain = LLM(model, "none", exact="replay").generate(prompts, params)
    llm = LLM(model, ALL[name](model), exact="replay", max_batch=2)
    assert not llm.engine.verifier.fixed_shape
    outs = llm.generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]


# ------------------------------------------------------------------------------ a changed model


def test_a_model_changed_after_loading_is_noticed() -> None:
    """Its owner moves, replaces or patches weights: the output is that of the model as it is."""
    model = llama_shaped("llama")
    llm = LLM(model, "none")

    def agrees() -> bool:
        return llm.generate(PROMPT, GREEDY)[0].token_ids == zoo.reference(model, PROMPT, 32)

    assert agrees()
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[2].mlp.up_proj.weight * 1.5
    assert agrees()
    model.lm_head = torch.nn.Linear(192, 97, bias=False).requires_grad_(False)
    assert agrees()
    assert llm.engine.verifier.runner.batch_invariant
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    assert agrees()
    assert not llm.engine.verifier.runner.batch_invariant


def test_a_patched_linear_layer_is_used_and_stays() -> None:
    model: Any = llama_shaped("llama")
    layer = model.model.layers[0].self_attn.q_proj
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 1.3
    before = zoo.reference(model, PROMPT, 32)
    assert LLM(model, "none").generate(PROMPT, GREEDY)[0].token_ids == before
    assert zoo.reference(model, PROMPT, 32) == before
