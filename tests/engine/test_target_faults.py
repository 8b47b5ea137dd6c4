"""Logits of the target that are not finite end their own request, not the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.backends.select import CPU_KERNELS
from drafted import KnowsOutput
from llama_shaped import llama_shaped, needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def test_nan_logits_end_their_own_request_only() -> None:
    target, prompts = zoo.tiny("llama"), zoo.ragged_prompts(3)
    expected = [c.token_ids for c in LLM(target, drafter="none").generate(prompts, GREEDY)]

    def nan_after_five_tokens(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        late = input_ids.shape[1] >= len(prompts[1]) + 5
        return torch.full_like(scores, torch.nan) if late else scores

    broken = SamplingParams(temperature=0, max_tokens=30, processors=[nan_after_five_tokens])
    for drafter in ("none", "lookup"):
        llm = LLM(target, drafter=drafter)
        with pytest.raises(errors.NonFiniteLogitsError) as caught:
            llm.generate(prompts, [GREEDY, broken, GREEDY])
        outs = caught.value.completions
        assert outs is not None
        assert [o.finish_reason for o in outs] == ["length", "error", "length"]
        assert [o.token_ids for o in outs] == [expected[0], expected[1][:5], expected[2]]


# Models by the backend that runs them.
BACKENDS: dict[str, Callable[[], Any]] = {
    "cpu kernels": lambda: llama_shaped("llama"),
    "transformers": lambda: zoo.tiny("llama", dtype=torch.float32),
}
backends = pytest.mark.parametrize(
    "backend", [pytest.param("cpu kernels", marks=needs_kernels), "transformers"]
)
NAN_TOKEN = 50  # not among the tokens that backends are compared with the model on, when it loads


def with_nan_token(model: Any, backend: str, drafter: str) -> LLM:
    """Of NAN_TOKEN everything is NaN, its KV entries too."""
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
    llm = LLM(model, drafter, max_batch=2)
    assert llm.engine.verifier.runner.backend_choice.name == backend
    return llm


@backends
def test_nan_in_the_prompt_is_an_error(backend: str) -> None:
    """Also from a token that is only read; and it leaves nothing behind for the next sequence in
    that slot."""
    model, clean = BACKENDS[backend](), [3, 5, 7]
    expected = LLM(model, drafter="none").generate(clean, GREEDY)[0].token_ids
    assert NAN_TOKEN not in expected
    llm = with_nan_token(model, backend, "lookup")
    outs = llm.generate([[3, NAN_TOKEN, 5], clean], GREEDY, errors="return")
    assert isinstance(outs[0].error, errors.NonFiniteLogitsError)
    assert outs[1].token_ids == expected
    with pytest.raises(errors.NonFiniteLogitsError):
        list(llm.stream([3, NAN_TOKEN, 5], GREEDY, reuse=True))
    with pytest.raises(errors.NonFiniteLogitsError):
        list(llm.stream([3, NAN_TOKEN, 5, 9], GREEDY, reuse=True))
    assert llm.generate(clean, GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("drafter", ["none", "lookup"])
@backends
def test_a_short_sequence_beside_a_longer_one_in_slots_that_held_nan(
    backend: str, drafter: str
) -> None:
    """A forward reads as many entries of every slot as its longest sequence has. Behind a mask a
    NaN that an earlier sequence left there would still reach the short one: 0 * NaN."""
    model, short = BACKENDS[backend](), [3, 5, 7]
    params = SamplingParams(temperature=0, max_tokens=24)
    long = [token for token in zoo.ragged_prompts(3)[1] if token != NAN_TOKEN] * 2
    plain = LLM(model, "none", max_batch=2).generate([short, long], params)
    expected = [out.token_ids for out in plain]
    assert NAN_TOKEN not in expected[0] + expected[1] + long
    llm = with_nan_token(model, backend, drafter)
    # Longer than both prompts: entries that their prefill does not overwrite.
    nan_prompt = [9, 8, 7, 6, NAN_TOKEN, *[5, 4, 3, 2, 1, 2, 3] * 5]
    assert len(short) < len(long) < len(nan_prompt) < len(long) + 24
    for nan_prompts in ([nan_prompt], [short, nan_prompt]):
        for order in ([0, 1], [1, 0]):
            outs = llm.generate(nan_prompts, params, errors="return")
            assert isinstance(outs[-1].error, errors.NonFiniteLogitsError)
            assert len(outs) == 1 or outs[0].token_ids == expected[0]
            outs = llm.generate([[short, long][i] for i in order], params)
            assert [out.token_ids for out in outs] == [expected[i] for i in order]


class OverflowingKey(torch.nn.Linear):
    """Of one token the key, or the value, overflows, and nothing else."""

    of_token: torch.Tensor  # what the layer is given for it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        overflows = (x - self.of_token).abs().amax(-1, keepdim=True) < 1e-3
        return super().forward(x).masked_fill(overflows, torch.inf)


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_a_drafted_token_whose_key_overflows_is_an_error_as_without_drafts(name: str) -> None:
    """0 is stored for it, with which its logits would be finite."""
    model: Any = zoo.tiny("llama", dtype=torch.float16)
    prompt = zoo.ragged_prompts(2)[1]
    text = LLM(model, "none").generate(prompt, GREEDY)[0].token_ids
    # KnowsOutput drafts four tokens, so that each fifth is the target's own.
    drafted = [i for i in range(30) if i % 5 < 3]
    index = next(i for i in drafted if text[i] not in [*prompt, *text[:i]])
    layer = model.model.layers[0]
    linear = getattr(layer.self_attn, name)
    linear.__class__ = OverflowingKey
    linear.of_token = layer.input_layernorm(model.get_input_embeddings().weight[text[index]])
    for drafter in ("none", KnowsOutput({tuple(prompt): text})):
        llm = LLM(model, drafter, max_batch=2)
        (out,) = llm.generate(prompt, GREEDY, errors="return")
        assert isinstance(out.error, errors.NonFiniteLogitsError)
        assert out.token_ids == text[: index + 1]
        assert out.drafted[index] == (drafter != "none")


@needs_kernels
def test_the_same_by_the_cpu_kernels() -> None:
    """One number of its value overflows, which nothing reads: infinity times 0 is NaN, 0 is not."""
    model: Any = llama_shaped("llama")
    layer, embeddings = model.model.layers[0], model.get_input_embeddings().weight
    attention, head_dim = layer.self_attn, model.config.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    attention.o_proj.weight.data[:, : group * head_dim : head_dim] = 0
    prompt = zoo.ragged_prompts(2)[1]
    text = LLM(model, "none").generate(prompt, GREEDY)[0].token_ids
    inputs = layer.input_layernorm(embeddings.data)
    largest, second = inputs.topk(2, 0).values
    drafted = [i for i in range(30) if i % 5 < 3 and text[i] not in [*prompt, *text[:i]]]
    pairs = [(i, int(d)) for i in drafted for d in (inputs[text[i]] == largest).nonzero()]
    index, dim = next((i, d) for i, d in pairs if largest[d] > 1.001 * second[d] > 0)
    attention.v_proj.weight.data[0] = 0
    most = torch.finfo(torch.float32).max
    attention.v_proj.weight.data[0, dim] = most / (largest[dim] / 2 + second[dim] / 2)
    for drafter in ("none", KnowsOutput({tuple(prompt): text})):
        llm = LLM(model, drafter, max_batch=2)
        assert llm.engine.verifier.runner.backend_choice.name == CPU_KERNELS
        (out,) = llm.generate(prompt, GREEDY, errors="return")
        assert isinstance(out.error, errors.NonFiniteLogitsError)
        assert out.token_ids == text[: index + 1]
        assert out.drafted[index] == (drafter != "none")
