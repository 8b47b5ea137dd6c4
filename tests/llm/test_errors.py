"""Invalid input raises a typed error that says what to do; the other requests go on."""

from __future__ import annotations

from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams, errors
from draftahead.core.device import Device

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(zoo.tiny("llama"), drafter="none", max_context=64)


BAD_PROMPTS: dict[str, tuple[Any, SamplingParams, type[Exception], str]] = {
    "empty": ([], GREEDY, errors.PromptError, "the prompt is empty"),
    "outside": ([1, 97], GREEDY, errors.PromptError, "token 97 is outside the vocabulary of 97"),
    "too long": ([1] * 64, GREEDY, errors.ContextLengthError, r"64 tokens.*max_context \(at most"),
    "no room": (
        [1] * 60,
        GREEDY,
        errors.ContextLengthError,
        "60 prompt tokens and max_tokens=8 exceed the context of 64: ask for at most 4",
    ),
    "text": ("hello", GREEDY, errors.ConfigError, "pass tokenizer="),
    "bias": (
        [1],
        SamplingParams(logit_bias={500: 1.0}),
        errors.ConfigError,
        "token 500 is outside",
    ),
    "stop": ([1], SamplingParams(stop_token_ids=[-1]), errors.ConfigError, "token -1 is outside"),
    "banned": (
        [1],
        SamplingParams(bad_words=[[10**6]]),
        errors.ConfigError,
        "token 1000000 is outside",
    ),
    "stops": ([1], SamplingParams(stop="x"), errors.ConfigError, "use stop_token_ids"),
    "nothing": (None, GREEDY, errors.PromptError, "None of type NoneType is no prompt"),
    "words": ([1], SamplingParams(bad_words=["no"]), errors.ConfigError, "need a tokenizer"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_request_is_raised_and_the_others_go_on(llm: LLM, name: str) -> None:
    prompt, params, kind, message = BAD_PROMPTS[name]
    good = zoo.ragged_prompts(2)
    expected = [zoo.reference(llm.model, p, 8) for p in good]
    batch, params_of_each = [good[0], prompt, good[1]], [GREEDY, params, GREEDY]
    with pytest.raises(kind, match=message) as caught:
        llm.generate(batch, params_of_each)
    assert isinstance(caught.value, errors.DraftaheadError)
    outs = caught.value.completions
    assert outs is not None
    assert [o.token_ids for o in (outs[0], outs[2])] == expected
    outs = llm.generate(batch, params_of_each, errors="return")
    assert [o.finish_reason for o in outs] == ["length", "error", "length"]
    assert isinstance(outs[1].error, kind)


def test_unset_max_tokens_is_cut_to_what_the_context_has_room_for(llm: LLM) -> None:
    assert len(llm.generate([1] * 60, SamplingParams(temperature=0))[0].token_ids) == 4


BAD_DRAFTERS: list[tuple[Any, type[Exception], str]] = [
    ("lokup", errors.UnknownDrafterError, "did you mean 'lookup'"),
    ({"method": "ngrams"}, errors.UnknownDrafterError, "did you mean 'ngram'"),
    (
        {"method": "lookup", "num_speculative_token": 3},
        errors.ConfigError,
        "did you mean 'num_speculative_tokens'",
    ),
    ({"method": "none", "model": "x"}, errors.ConfigError, "it takes none"),
    ({"num_speculative_tokens": 3}, errors.ConfigError, "needs 'method'"),
    ({"method": "lookup", "num_speculative_tokens": 0}, errors.ConfigError, "from 1 to 63"),
    ({"method": "lookup", "prompt_lookup_min": 5}, errors.ConfigError, "must not exceed"),
    ("draft_model", errors.ConfigError, "needs 'model'"),
    (7, errors.ConfigError, "not int"),
    ({"method": 5}, errors.UnknownDrafterError, "no drafter 5"),
    (
        {"method": "draft_model", "model": 5},
        errors.ConfigError,
        "a model of transformers, or .*, not 5",
    ),
]


@pytest.mark.parametrize(("drafter", "kind", "message"), BAD_DRAFTERS)
def test_bad_drafter(drafter: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        LLM(zoo.tiny("llama"), drafter=drafter)


def test_bad_options_of_the_llm() -> None:
    model = zoo.tiny("llama")
    with pytest.raises(errors.ConfigError, match="did you mean 'replay'"):
        LLM(model, exact="replays")  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="max_context must be 1 to 128"):
        LLM(model, max_context=4096)
    with pytest.raises(errors.ConfigError, match="max_batch must be a whole number, 1 or more"):
        LLM(model, max_batch=0)
    with pytest.raises(errors.ConfigError, match=r"model.eval\(\)"):
        LLM(zoo.tiny("llama").train())
    with pytest.raises(
        errors.ConfigError, match=r"model must be a model of transformers, or .*, not 5"
    ):
        LLM(5)
    with pytest.raises(
        errors.ConfigError,
        match="errors must be 'raise' or 'return', not 'rase'; did you mean 'raise'",
    ):
        LLM(model).generate([1], errors="rase")  # type: ignore[arg-type]
    with pytest.raises(errors.ModelNotFoundError, match="did you mean 'smollm2'"):
        LLM("smollm")


def test_cache_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_memory", lambda device: 1 << 20)
    with pytest.raises(
        errors.CacheMemoryError, match=r"needs 0\.\d+ GiB \(64 slots.*lower max_batch"
    ):
        LLM(zoo.tiny("llama"), max_batch=64)


def test_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = llm.engine.step, []

    def step() -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(zoo.ragged_prompts(3), GREEDY)
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting
    monkeypatch.undo()
    outs = llm.generate(zoo.ragged_prompts(3), GREEDY)
    expected = [zoo.reference(llm.model, p, 8) for p in zoo.ragged_prompts(3)]
    assert [o.token_ids for o in outs] == expected
