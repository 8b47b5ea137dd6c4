"""Which models are taken: those known to be right, and others that agree with themselves."""

from __future__ import annotations

import pytest

import zoo
from draftahead import LLM
from draftahead.errors import ConfigError, UnsupportedModelError
from draftahead.kv import attention
from draftahead.models import support


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_models_that_cannot_roll_back_are_refused_by_name(name: str) -> None:
    model = zoo.tiny(name)
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        LLM(model)


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No architecture counts as tested; attention may be patched."""
    monkeypatch.setattr(support, "TESTED", frozenset())
    return monkeypatch


def test_an_untested_architecture_that_agrees_with_itself_is_taken(untested: object) -> None:
    LLM(zoo.tiny("mistral"))


def test_an_untested_architecture_with_a_small_context(untested: object) -> None:
    for max_context in (3, 10):
        LLM(zoo.tiny("mistral"), max_context=max_context)
    with pytest.raises(ConfigError, match="max_context must be 3 or more"):
        LLM(zoo.tiny("mistral"), max_context=2)


def test_an_untested_architecture_that_disagrees_is_refused(
    untested: pytest.MonkeyPatch,
) -> None:
    """One whose sliding window we would miss."""
    grouped_attention = attention.grouped_attention

    def without_window(*args: object, **kwargs: object) -> object:
        return grouped_attention(*args, **{**kwargs, "sliding_window": None})  # type: ignore[arg-type]

    untested.setattr(attention, "grouped_attention", without_window)
    with pytest.raises(UnsupportedModelError, match="other logits"):
        LLM(zoo.tiny("mistral"))
