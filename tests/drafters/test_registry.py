"""Drafters by name."""

from __future__ import annotations

import pytest

import zoo
from draftahead import LLM, Batch, Draft, Drafter, register
from draftahead.drafters import registry
from draftahead.drafters.base import DrafterContext
from draftahead.drafters.lookup import Lookup


class Mine(Drafter):
    def __init__(self, context: DrafterContext) -> None: ...

    def propose(self, batch: Batch) -> Draft | None:
        return None


@pytest.mark.parametrize("name", ["lookup", "ngram"])
def test_a_drafter_of_the_user_replaces_a_built_in_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the built-in one was imported before or is imported afterwards, and by its synonyms
    too."""
    registry.names()  # imports all of them
    built_in = {key: maker for key, maker in registry._REGISTRY.items() if key != "lookup"}
    monkeypatch.setattr(registry, "_REGISTRY", built_in)
    monkeypatch.setattr(registry, "_SYNONYMS", {})
    as_built_in = register("lookup", synonyms=("ngram",))
    register(name)(Mine)
    as_built_in(Lookup)
    assert isinstance(LLM(zoo.tiny("llama"), name).engine.drafter, Mine)
    del registry._REGISTRY[name]
    as_built_in(Lookup)
    assert isinstance(LLM(zoo.tiny("llama"), name).engine.drafter, Lookup)
    register(name)(Mine)
    assert isinstance(LLM(zoo.tiny("llama"), name).engine.drafter, Mine)
