"""The configuration of an LLM, and a second engine on the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import zoo
from draftahead import LLM, LLMConfig, SamplingParams
from draftahead.errors import ConfigError, DraftaheadError
from draftahead.loader import hub

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_from_config_makes_what_the_options_make() -> None:
    target = zoo.tiny("llama")
    config = LLMConfig(model=target, drafter="lookup", rule="token", max_batch=3, max_context=77)
    made, given = (
        LLM.from_config(config),
        LLM(target, "lookup", rule="token", max_batch=3, max_context=77),
    )
    assert made.config == given.config == config
    assert made.generate([1, 2, 3], GREEDY)[0].token_ids == (
        given.generate([1, 2, 3], GREEDY)[0].token_ids
    )


@pytest.mark.parametrize("options", [{"exact": "replay"}, {"lossless": False}, {"rule": "token"}])
def test_second_engine_keeps_every_option(options: dict[str, object]) -> None:
    llm = LLM(zoo.tiny("llama"), "none", max_batch=3, max_context=77, **options)
    other = llm.with_drafter("lookup")
    assert other.model is llm.model
    assert dataclasses.replace(other.config, drafter="none") == llm.config
    assert other.engine.verifier.max_context == 77
    assert other.engine.rule == llm.engine.rule and other.engine.lossless == llm.engine.lossless


def test_second_engine_takes_changes() -> None:
    llm = LLM(zoo.tiny("llama"), "none", max_batch=3)
    assert llm.with_drafter("lookup", max_batch=2).config.max_batch == 2
    assert llm.config.max_batch == 3
    with pytest.raises(ConfigError, match="did you mean"):
        llm.with_drafter("lookup", exact="distributon")


def test_config_cannot_be_changed() -> None:
    config = LLM(zoo.tiny("llama"), "none").config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rule = "token"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("lokup", "did you mean 'lookup'"),
        ({"method": "lookup", "prompt_lookup_mx": 3}, "did you mean 'prompt_lookup_max'"),
        ({"prompt_lookup_max": 3}, "needs 'method'"),
        (3, "must be a name"),
        ({5: "lookup"}, "a dictionary with names as keys, not {5: 'lookup'}"),
        ({"method": ["lookup"]}, r"no drafter \['lookup'\]"),
    ],
)
def test_a_misspelt_drafter_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, drafter: Any, message: str
) -> None:
    monkeypatch.setattr(hub, "load", lambda *args, **options: pytest.fail("the model is loaded"))
    with pytest.raises(DraftaheadError, match=message):
        LLM("org/name", drafter)


def test_a_revision_is_of_the_target_not_of_its_draft_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {}

    def load(name: str, *, revision: str | None, **options: Any) -> tuple[Any, Any]:
        seen[name] = revision
        return zoo.tiny("llama"), None

    monkeypatch.setattr(hub, "load", load)
    LLM("org/target", {"method": "draft_model", "model": "org/draft"}, revision="v2")
    assert seen == {"org/target": "v2", "org/draft": None}


def test_what_is_reported_to_must_be_a_function() -> None:
    for wrong in (5, "print", None):
        with pytest.raises(ConfigError, match="report must be a function"):
            LLM(zoo.tiny("llama"), "none", report=wrong)  # type: ignore[arg-type]
