"""draftahead: speculative decoding of transformers models with provably the same output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftahead.config import LLMConfig
    from draftahead.core.draft import Draft
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.core.stats import Stats
    from draftahead.core.types import (
        Batch,
        Completion,
        ForwardOutput,
        SequenceView,
        StreamChunk,
        TokenLogprob,
        Verdict,
    )
    from draftahead.drafters.base import Drafter, DrafterContext
    from draftahead.drafters.registry import register
    from draftahead.errors import DraftaheadError, DrafterFaultWarning
    from draftahead.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Batch",
    "Completion",
    "Draft",
    "DraftaheadError",
    "Drafter",
    "DrafterContext",
    "DrafterFaultWarning",
    "ForwardOutput",
    "LLMConfig",
    "SamplingParams",
    "SequenceView",
    "Stats",
    "StreamChunk",
    "TokenLogprob",
    "Verdict",
    "register",
]

# The module that defines each public name, where it is not core.types.
_HOMES = {
    "LLM": "llm",
    "LLMConfig": "config",
    "Draft": "core.draft",
    "SamplingParams": "core.sampling_params",
    "Stats": "core.stats",
    "Drafter": "drafters.base",
    "DrafterContext": "drafters.base",
    "register": "drafters.registry",
    "DraftaheadError": "errors",
    "DrafterFaultWarning": "errors",
}


def __getattr__(name: str) -> Any:
    """Loads torch and transformers when they are first needed: `draftahead --help` is quick."""
    if name not in __all__:
        raise AttributeError(f"module 'draftahead' has no attribute {name!r}")
    home = importlib.import_module(f"draftahead.{_HOMES.get(name, 'core.types')}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
