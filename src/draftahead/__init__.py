"""draftahead: speculative decoding of transformers models with provably the same output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftahead.core.sampling_params import SamplingParams
    from draftahead.core.stats import Stats
    from draftahead.core.types import (
        Batch,
        Completion,
        Draft,
        ForwardOutput,
        SequenceState,
        StreamChunk,
        TokenLogprob,
        Verdict,
    )
    from draftahead.drafters.base import Drafter
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
    "DrafterFaultWarning",
    "ForwardOutput",
    "SamplingParams",
    "SequenceState",
    "Stats",
    "StreamChunk",
    "TokenLogprob",
    "Verdict",
    "register",
]

_HOMES = {
    "LLM": "llm",
    "Drafter": "drafters.base",
    "register": "drafters.registry",
    "SamplingParams": "core.sampling_params",
    "Stats": "core.stats",
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
