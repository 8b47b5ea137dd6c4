"""Sampling parameters: what they may be, and what is said of a value or a name that cannot be."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from draftahead import SamplingParams
from draftahead.core.sampling_params import SMALLEST, params_of
from draftahead.errors import ConfigError

NAN, INF = float("nan"), float("inf")


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


TEMPERATURE = r"temperature must be a number from 0 \(greedy\) to 10000"
IDS, WORDS = "stop_token_ids must be a list of token ids", "bad_words must be a list of words"
BIAS, STOP = r"logit_bias must be a number, at most 1e\+30, for each", "stop must be text that is"
PROCESSORS = "processors must be a list of LogitsProcessors"
BAD: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, TEMPERATURE + ", not -0.1$"),
    ("temperature", NAN, TEMPERATURE),
    ("temperature", "0.7", TEMPERATURE + ", not '0.7'$"),
    ("temperature", 10**400, TEMPERATURE),
    ("temperature", Unshowable(), TEMPERATURE + r", not <Unshowable instance at 0x\w+>$"),
    ("temperature", True, TEMPERATURE),
    ("temperature", np.True_, TEMPERATURE),
    ("temperature", torch.tensor(1.0), TEMPERATURE),
    (
        "temperature",
        np.array([[1.0, 2.0], [3.0, 4.0]]),
        TEMPERATURE + r", not array\(\[\[1., 2.\], \[3., 4.\]\]\)$",
    ),
    ("top_p", -1e-9, "top_p must be a number from 0 to 1, not -1e-09$"),
    ("top_p", 1.5, "top_p must be"),
    ("top_k", -2, r"top_k must be a whole number, 1 or more, or 0 or -1 \(all\), not -2$"),
    ("top_k", 1.5, "top_k must be"),
    ("min_p", 2, "min_p must be a number from 0 to 1"),
    ("repetition_penalty", 0, "repetition_penalty must be a number from 1e-06 to 10000"),
    ("presence_penalty", INF, "presence_penalty must be a number from -100 to 100"),
    ("frequency_penalty", -101, "frequency_penalty must be a number from -100 to 100"),
    ("max_tokens", -1, "max_tokens must be a whole number, 0 or more"),
    ("max_tokens", 1.0, "max_tokens must be a whole number, 0 or more"),
    ("prompt_logprobs", -1, "prompt_logprobs must be a whole number, 0 or more"),
    ("min_tokens", -1, "min_tokens must be a whole number, 0 or more"),
    ("n", 0, "n must be a whole number from 1 to 16384"),
    ("n", True, "n must be a whole number"),
    ("n", 10**9, "n must be a whole number from 1 to 16384"),
    ("n", np.array([1]), "n must be a whole number"),
    ("n", 10**5000, "n must be .* not this int$"),
    ("seed", 1.5, "seed must be a whole number, not 1.5"),
    ("seed", "1", "seed must be a whole number, not '1'"),
    ("logprobs", -1, "logprobs must be a whole number, 0 or more"),
    ("logit_bias", {"5": 1.0}, BIAS),
    ("logit_bias", {5: "x"}, BIAS),
    ("logit_bias", {5: NAN}, BIAS),
    ("logit_bias", {5: INF}, BIAS),
    ("logit_bias", [5], BIAS),
    ("stop", ["a", ""], STOP),
    ("stop", [1], STOP),
    ("stop", b"a", STOP),
    ("stop", "\ud800", STOP),
    ("stop", {"a": 1}, STOP),
    ("stop_token_ids", ["1"], IDS),
    ("stop_token_ids", [1.0], IDS),
    ("stop_token_ids", b"ab", IDS),
    ("stop_token_ids", {1: 2}, IDS),
    ("stop_token_ids", range(10**12), IDS),
    ("stop_token_ids", range(10**30), IDS),
    ("stop_token_ids", 5, IDS),
    ("stop_token_ids", torch.tensor([[1]]), IDS),
    ("bad_words", [[]], WORDS),
    ("bad_words", ["a", ""], WORDS),
    ("bad_words", ["\ud800"], WORDS),
    ("bad_words", [3], WORDS),
    ("bad_words", "foo", WORDS),
    ("ignore_eos", "no", "ignore_eos must be True or False, not 'no'"),
    ("ignore_eos", 1, "ignore_eos must be True or False"),
    ("raw_logprobs", [], "raw_logprobs must be True or False"),
    ("processors", ["x"], PROCESSORS),
    ("processors", [type], PROCESSORS),  # a class is callable, and makes no logits
    ("processors", 5, PROCESSORS),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[name for name, _, _ in BAD])
def test_values_that_cannot_be(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_min_tokens_and_max_tokens_must_agree() -> None:
    for most in (0, 3):
        with pytest.raises(ConfigError, match=r"min_tokens .9. must not exceed"):
            SamplingParams(min_tokens=9, max_tokens=most)
    with pytest.raises(ConfigError, match=r"min_tokens .this int. must not exceed"):
        SamplingParams(min_tokens=10**5000, max_tokens=3)


class OddText(str):
    """Text of a class of the user's, which raises when it is used."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]
    __len__ = encode = __str__ = __repr__ = __eq__  # type: ignore[assignment]


def test_text_of_any_class_becomes_pythons() -> None:
    found = SamplingParams(stop=[OddText("end")], bad_words=[OddText("word")])
    assert (found.stop, found.bad_words) == (("end",), ("word",))
    assert {type(text) for text in (*found.stop, *found.bad_words)} == {str}
    assert SamplingParams(stop=OddText("end")).stop == ("end",)
    with pytest.raises(ConfigError, match="seed must be a whole number, not '5'"):
        SamplingParams(seed=OddText("5"))


def test_values_at_the_ends_of_their_range_are_accepted() -> None:
    banned = {5: float("-inf"), 6: 1e30}
    SamplingParams(
        temperature=1e-6, top_p=1, min_p=1, top_k=0, logit_bias=banned, stop="", seed=-(2**70)
    )
    SamplingParams(stop=("a",), bad_words=["a", [1, 2]], stop_token_ids={1}, presence_penalty=-100)
    SamplingParams(n=2**14, top_p=1e-6, repetition_penalty=1e4, max_tokens=10**12)


def test_numbers_and_lists_of_other_libraries_become_pythons() -> None:
    found = SamplingParams(
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        top_k=np.int64(3),
        ignore_eos=np.True_,
        stop="end",
        stop_token_ids=np.array([1, 2]),
        bad_words=[torch.tensor([3, 4]), "x"],
        logit_bias={np.int32(7): np.float64(0.5)},
    )
    assert found == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        ignore_eos=True,
        stop=("end",),
        stop_token_ids=(1, 2),
        bad_words=((3, 4), "x"),
        logit_bias={7: 0.5},
    )
    assert type(found.temperature) is type(found.top_p) is float
    assert type(found.top_k) is int
    assert found.ignore_eos is True
    assert [type(i) for i in found.stop_token_ids] == [int, int]


@pytest.mark.parametrize("value", [5e-324, 1e-300])
def test_what_float32_rounds_to_zero_becomes_the_smallest_number_of_it(value: float) -> None:
    params = SamplingParams(temperature=value, top_p=value)
    assert params.temperature == params.top_p == SMALLEST == torch.finfo(torch.float32).tiny
    assert SamplingParams(top_p=0).top_p == SMALLEST  # the most likely token stays
    assert SamplingParams(temperature=0).is_greedy


def test_what_was_given_may_be_changed_afterwards() -> None:
    ids, bias = [1], {2: 3.0}
    found = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(5)
    bias.clear()
    assert (found.stop_token_ids, found.logit_bias) == ((1,), {2: 3.0})


def test_none_is_the_default_and_minus_one_keeps_all() -> None:
    names = ("stop", "n", "ignore_eos", "presence_penalty", "processors", "seed", "bad_words")
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


UNKNOWN = {
    "temprature": "did you mean 'temperature'",
    "max_new_tokens": "no parameter 'max_new_tokens': write max_tokens",
    "do_sample": "temperature=0 is greedy",
    "num_return_sequences": "write n",
    "best_of": "take n samples",
    "max_model_len": "an option of LLM: max_context",
    "assistant_model": "the drafter of LLM",
    "speculative_config": "the drafter of LLM",
    "quux": "known: bad_words, ",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_names_of_other_libraries_and_mistyped_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=UNKNOWN[name]):
        SamplingParams(**{name: 1})


def test_parameters_are_given_by_name() -> None:
    with pytest.raises(ConfigError, match="by name"):
        SamplingParams(0.7)  # type: ignore[misc]


def test_advice_is_for_names_that_are_not_parameters() -> None:
    assert not set(SamplingParams.advice) & set(vars(SamplingParams()))


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    found = repr(SamplingParams(temperature=0, presence_penalty=0, n=2, stop=["a"]))
    assert found == "SamplingParams(temperature=0.0, stop=('a',), n=2)"


def test_copies_are_equal() -> None:
    params = SamplingParams(temperature=0, stop="a", logit_bias={1: 2.0})
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


FIVE, COLD = SamplingParams(max_tokens=5), SamplingParams(temperature=0)


def test_parameters_for_all_prompts_for_each_and_by_name() -> None:
    assert params_of(FIVE, {}, 2) == [FIVE, FIVE]
    assert params_of({"max_tokens": 5}, {}, 2) == [FIVE, FIVE]
    assert params_of(None, {"max_tokens": 5}, 2) == [FIVE, FIVE]
    assert params_of(None, {}, 1) == [SamplingParams()]
    assert params_of([FIVE, {"temperature": 0}, None], {}, 3) == [FIVE, COLD, SamplingParams()]
    assert params_of((FIVE,), {}, 1) == [FIVE]
    assert params_of([], {}, 0) == params_of(None, {}, 0) == []


FORMS = "sampling_params must be SamplingParams, a dictionary of its parameters, or a list"
BAD_FORMS: list[tuple[Any, dict[str, Any], str]] = [
    (FIVE, {"n": 2}, "give sampling_params or n=, not both"),
    ({}, {"n": 2}, "give sampling_params or n=, not both"),
    ([FIVE], {}, "1 sampling_params for 2 prompts"),
    (5, {}, f"{FORMS} of one for each prompt, not 5$"),
    ("greedy", {}, FORMS),
    (b"greedy", {}, FORMS),
    (SamplingParams, {}, FORMS),
    ([FIVE, 5], {}, FORMS),
    (np.array([1, 2]), {}, FORMS),
    (np.array(1), {}, FORMS),
    ({1: 2}, {}, FORMS),
    ({"max_token": 2}, {}, "did you mean 'max_tokens'"),
    (None, {"max_new_tokens": 2}, "write max_tokens"),
    (None, {"use_tqdm": False}, "leave it out"),
    (None, {"temperature": "hot"}, "temperature must be"),
]


@pytest.mark.parametrize(("given", "named", "message"), BAD_FORMS)
def test_what_are_no_parameters(given: Any, named: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        params_of(given, named, 2)
