"""Log-probabilities of a prompt are those of the model's own forward over it, however it is
filled: alone, in batches, beside reused entries, in replay, with and without an output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, Completion, SamplingParams
from draftahead.errors import ConfigError, ContextLengthError, NonFiniteLogitsError
from draftahead.models import runner
from llama_shaped import llama_shaped, needs_kernels

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
GREEDY = SamplingParams(temperature=0, max_tokens=6)
WITH_OUTPUT = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3)
PROMPTS = zoo.ragged_prompts(4)
LONG = torch.randint(1, 97, (100,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def llm(target: Any) -> LLM:
    return LLM(target, "lookup", tokenizer=zoo.tokenizer(), max_batch=3)


def assert_of_the_model(out: Completion, model: Any, tolerance: float = 1e-4) -> None:
    ids, found = out.prompt_token_ids, out.prompt_logprobs
    assert found is not None
    assert len(found) == len(ids)
    assert found[0] is None
    with torch.no_grad():
        expected = model(torch.tensor([ids], device=model.device)).logits[0].log_softmax(-1)
    for row, token, one in zip(expected, ids[1:], found[1:], strict=False):
        assert one is not None
        assert one.token_id == token
        assert one.logprob == pytest.approx(float(row[token]), abs=tolerance)
        values, top = row.topk(3)
        assert list(one.top) == top.tolist()
        assert list(one.top.values()) == pytest.approx(values.tolist(), abs=tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi3_longrope"])
def test_they_are_those_of_the_models_own_forward(name: str) -> None:
    model = zoo.tiny(name)
    llm = LLM(model, "lookup", max_batch=3)
    for prompt in (PROMPTS[0], LONG):
        assert_of_the_model(llm.generate([prompt], SCORE)[0], model)


@pytest.mark.parametrize("exact", ["distribution", "replay"])
def test_in_batches_and_in_chunks(exact: str, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOGITS_CHUNK", 4)
    llm = LLM(target, "lookup", exact=exact, max_batch=3)
    prompts = [*PROMPTS, LONG]
    params = [WITH_OUTPUT, SCORE, GREEDY, WITH_OUTPUT, SCORE]
    outs = llm.generate(prompts, params)
    for prompt, one, out in zip(prompts, params, outs, strict=True):
        if one is not GREEDY:
            assert_of_the_model(out, target)
        expected = zoo.reference(target, prompt, 6) if one.max_tokens else []
        assert (out.token_ids, out.finish_reason) == (expected, "length")
    assert outs[2].prompt_logprobs is None


@needs_kernels
def test_with_our_own_kernels() -> None:
    model = llama_shaped("llama")
    llm = LLM(model, "lookup", max_batch=2)
    assert llm.engine.verifier.runner.batch_invariant
    for out in llm.generate([LONG, PROMPTS[0]], SCORE):
        assert_of_the_model(out, model, 1e-3)


def test_on_a_gpu_whose_next_forward_is_launched_ahead(gpu_device: str) -> None:
    model = zoo.tiny("llama").to(gpu_device)
    llm = LLM(model, "lookup", max_batch=3)
    prompts = [*PROMPTS, LONG]
    for params in ([SCORE] * 5, [WITH_OUTPUT, SCORE, GREEDY, WITH_OUTPUT, SCORE]):
        for one, out in zip(params, llm.generate(prompts, params), strict=True):
            if one.prompt_logprobs is not None:
                assert_of_the_model(out, model)
            expected = zoo.reference(model, out.prompt_token_ids, 6) if one.max_tokens else []
            assert (out.token_ids, out.finish_reason) == (expected, "length")
    assert llm.engine._in_flight is None


def test_every_sample_has_them(llm: LLM, target: Any) -> None:
    outs = llm.generate(PROMPTS[1], SamplingParams(n=4, max_tokens=3, prompt_logprobs=3, seed=1))
    for out in outs:
        assert_of_the_model(out, target)


def test_nothing_that_a_slot_holds_is_reused(llm: LLM, target: Any) -> None:
    list(llm.stream(LONG[:60], GREEDY, reuse=True))
    stream = llm.stream(LONG[:70], WITH_OUTPUT, reuse=True)
    list(stream)
    assert stream.completion is not None
    assert_of_the_model(stream.completion, target)
    assert stream.completion.stats.reused_tokens == 0
    again = llm.stream(LONG[:70], GREEDY, reuse=True)
    list(again)
    assert again.completion is not None
    assert again.completion.stats.reused_tokens == 69


def test_an_interrupted_prompt_is_computed_again(
    llm: LLM, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOGITS_CHUNK", 16)
    stream = llm.stream(LONG, WITH_OUTPUT)
    forward, calls = runner.ModelRunner.forward, iter(range(1000))

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return forward(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(runner.ModelRunner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert_of_the_model(llm.generate([LONG], WITH_OUTPUT)[0], target)


def test_a_prompt_alone_ends_at_once(llm: LLM, target: Any) -> None:
    """One token, which nothing predicts; and one that fills the context."""
    (out,) = llm.generate([[5]], SCORE)
    assert (out.prompt_logprobs, out.token_ids, out.text) == ([None], [], "")
    full = (LONG * 2)[: llm.engine.verifier.max_context]
    assert_of_the_model(llm.generate([full], SCORE)[0], target)
    with pytest.raises(ContextLengthError, match="128 tokens and the context 128"):
        llm.generate([full], prompt_logprobs=0)
    with pytest.raises(ContextLengthError, match="129 tokens and the context 128"):
        llm.generate([[*full, 5]], SCORE)
    stream = llm.stream([5, 7], SCORE)
    (chunk,) = stream
    assert (chunk.token_ids, chunk.finish_reason) == ([], "length")
    (out,) = llm.generate([[5, 7]], max_tokens=0)
    assert (out.prompt_logprobs, out.finish_reason, out.stats.tokens) == (None, "length", 0)


def test_more_than_the_vocabulary_has_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs=98 is more than the vocabulary of 97"):
        llm.generate([[5]], prompt_logprobs=98)


def test_a_model_that_computes_no_numbers_fails_without_an_output_too() -> None:
    model = zoo.tiny("llama")
    llm = LLM(model, "none")
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(NonFiniteLogitsError):
        llm.generate([5, 7], SCORE)


def test_each_token_has_its_text(llm: LLM) -> None:
    """As it reads in the middle of a text, where a space is before it."""
    (out,) = llm.generate("w5 w7", temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=1)
    assert out.logprobs is not None and out.prompt_logprobs is not None
    for one in [*out.logprobs, out.prompt_logprobs[1]]:
        assert one is not None
        assert one.text == f" w{one.token_id}"
        assert one.texts == {i: f" w{i}" for i in {one.token_id, *one.top}}
    without = LLM(llm.model, "none").generate([5, 7], max_tokens=1, logprobs=1)[0]
    assert without.logprobs is not None
    assert (without.logprobs[0].texts, without.logprobs[0].text) == ({}, None)


@pytest.mark.model
def test_texts_of_a_real_tokenizer(smollm2: tuple[Any, Any]) -> None:
    from draftahead.outputs import TokenTexts

    tokenizer = smollm2[1]
    texts = TokenTexts(tokenizer)
    for text in (" Paris", "Paris", "\n", "<|im_end|>", " é"):
        for token in tokenizer(text, add_special_tokens=False).input_ids:
            assert texts._text(token) == tokenizer.decode([token])
