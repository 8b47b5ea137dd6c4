"""Any value of any parameter gives a result or an error of our own, and no other exception."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

import zoo
from any_value import KEYS, TEXTS, VALUES, draw, examples, one_of, or_any, profiles
from draftahead import LLM, Completion, LLMConfig, SamplingParams
from draftahead.drafters import registry
from draftahead.errors import DraftaheadError
from draftahead.loader import hub

pytestmark = pytest.mark.filterwarnings("ignore::draftahead.DrafterFaultWarning")

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
# Values near the ends of what each may be, which reach further than those that are refused.
LIKELY: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1e-300, 0.7, 1e4),
    "top_k": (-1, 0, 1, 97, 2**70),
    "top_p": (0, 5e-324, 0.5, 1),
    "min_p": (0, 5e-324, 0.5, 1),
    "repetition_penalty": (1e-6, 1, 1e4),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "logit_bias": ({5: -float("inf")}, {5: 1e30, 6: -1e300}, {97: 1.0}, {-1: 0.0}, {}),
    "bad_words": (["w5"], [[5]], [[5, 97]], ["\n"]),
    "min_tokens": (0, 3, 10**30),
    "max_tokens": (0, 1, 3, 10**30),
    "stop": ("w5", ["w5", " "], ""),
    "stop_token_ids": ([5], [97], list(range(97))),
    "n": (1, 2),
    "seed": (0, -1, 2**200),
    "logprobs": (0, 97, 98),
    "prompt_logprobs": (0, 97, 98),
    "processors": (
        [lambda ids, scores: scores],
        [lambda ids, scores: None],
        [lambda ids, scores: scores[:, :5]],
        [lambda: None],
        [lambda ids, scores: scores * float("nan")],
    ),
}
PARAMS = st.fixed_dictionaries({}, optional={n: or_any(*LIKELY.get(n, ())) for n in FIELDS})
ONE = st.sampled_from(FIELDS).flatmap(
    lambda name: or_any(*LIKELY.get(name, ())).map(lambda value: {name: value})
)
PROMPTS = st.one_of(
    one_of(["w5 w7", [5, 7], {"prompt": "w5"}, [{"role": "user", "content": "w5"}]]),
    st.lists(st.one_of(TEXTS, st.lists(st.integers(-1, 98), max_size=4)), max_size=3),
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), VALUES), max_size=2),
    st.fixed_dictionaries({}, optional={"prompt": VALUES, "prompt_token_ids": VALUES}),
    VALUES,
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(zoo.tiny("llama"), "lookup", tokenizer=zoo.tokenizer(), max_batch=2, max_context=24)


def is_small(params: SamplingParams) -> bool:
    """Whether it can be run in a test."""
    return params.n <= 4


@profiles()
def test_any_sampling_parameters(llm: LLM, count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        named = draw(data, st.one_of(ONE, ONE, PARAMS))
        with suppress(DraftaheadError):
            params = SamplingParams(**named)
            assert len(repr(params)) < 3000
            hash(params.seed)
            if is_small(params):
                params = dataclasses.replace(params, max_tokens=min(params.max_tokens or 3, 3))
                assert all(isinstance(out, Completion) for out in llm.generate("w5 w7", params))

    check()
    assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting


@profiles()
def test_any_prompt_of_every_method(llm: LLM, count: int) -> None:
    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        prompt = draw(data, PROMPTS)
        method = data.draw(st.sampled_from(["generate", "chat", "stream", "encode"]))
        with suppress(DraftaheadError):
            if method == "encode":
                llm.encode(prompt)
            elif method == "stream":
                list(llm.stream(prompt, max_tokens=2))
            else:
                getattr(llm, method)(prompt, max_tokens=2)

    check()


@profiles()
def test_any_argument_of_every_method(llm: LLM, count: int) -> None:
    """Besides the prompt."""
    options = {
        "generate": ("sampling_params", "errors", "namespace"),
        "chat": ("sampling_params", "namespace"),
        "stream": ("sampling_params", "reuse", "namespace"),
        "with_drafter": ("drafter",),
        "from_config": ("report",),
    }
    likely = {
        "sampling_params": ({"max_tokens": 2}, [{"max_tokens": 2}], [None]),
        "errors": ("return",),
        "namespace": ("ann",),
        "reuse": (True,),
        "drafter": ("lookup", None),
    }

    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        method = data.draw(st.sampled_from(sorted(options)))
        name = data.draw(st.one_of(st.sampled_from(options[method]), KEYS.filter(is_name)))
        value = draw(data, or_any(*likely.get(name, ())))
        with suppress(DraftaheadError):
            if method == "from_config":
                if not callable(value):  # what a function of the user's raises is the user's
                    LLM.from_config(llm.config, report=value)
            elif method == "with_drafter":
                llm.with_drafter(**{"drafter": None, name: value})
            else:
                found = getattr(llm, method)("w5 w7", **{name: value})
                if method == "stream":
                    next(found)

    check()


def is_name(key: Any) -> bool:
    return isinstance(key, str) and key not in ("prompt", "prompts", "messages", "self")


OPTIONS = [field.name for field in dataclasses.fields(LLMConfig) if field.name != "model"]
OPTIONS_LIKELY: dict[str, tuple[Any, ...]] = {
    "exact": ("replay",),
    "rule": ("token",),
    "lossless": (False,),
    "tokenizer": (zoo.tokenizer(),),
    "max_batch": (1, 3, 10**4, 10**12),
    "max_context": (1, 2, 5, 128, 129, 10**12),
    "dtype": ("float32", torch.float32),
    "device": ("cpu", "cuda:99", torch.device("cuda", 99)),
    "quantize": ("int8",),
    "kv_cache_dtype": ("bfloat16", "int8"),
    "activations": ("float32",),  # the others are for .gguf files
    "compile": (True,),
}


def drafters() -> st.SearchStrategy[Any]:
    """Configurations of every drafter, with any value of each of its options."""

    def of(name: str) -> st.SearchStrategy[Any]:
        options = {key: or_any(1, 2, 3) for key in registry.options_of(name) if key != "model"}
        return st.fixed_dictionaries({"method": st.just(name)}, optional=options)

    return st.one_of(or_any("auto"), *(of(name) for name in registry.names()))


@profiles()
def test_any_option_of_an_llm(llm: LLM, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = zoo.tiny("llama"), zoo.tokenizer()
    monkeypatch.setattr(hub, "load", lambda *_, **__: loaded)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    values = {name: or_any(*OPTIONS_LIKELY.get(name, ())) for name in OPTIONS}
    values["drafter"] = drafters()

    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=3, unique=True))
        options = {name: draw(data, values[name]) for name in names}
        model = llm.model if data.draw(st.booleans()) else "org/name"
        options.setdefault("max_batch", 2)
        with suppress(DraftaheadError):
            made = LLM(model, **options)
            assert len(repr(made)) < 200
            assert len(repr(made.config)) < 1000
            made.describe()
            made.generate([5, 7], max_tokens=2)

    check()


@profiles()
def test_any_model(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model = draw(data, VALUES)
        with pytest.raises(DraftaheadError):
            LLM(model, "none")

    check()


FIELDS_OF_THE_MODEL = sorted(vars(GenerationConfig()))


@profiles()
def test_any_field_of_a_generation_config(count: int) -> None:
    model = zoo.tiny("llama")
    llm = LLM(model, "lookup", tokenizer=zoo.tokenizer(), max_batch=2, max_context=24)

    @examples(count)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
        names = st.lists(st.sampled_from(FIELDS_OF_THE_MODEL), min_size=1, max_size=2)
        for name in [*data.draw(names), *data.draw(st.sampled_from([[], ["do_sample"]]))]:
            setattr(model.generation_config, name, draw(data, or_any(True, 1, 0.5, [5], [[5]])))
        with suppress(DraftaheadError):
            llm.generate("w5 w7")

    check()
