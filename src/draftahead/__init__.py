"""draftahead: speculative decoding of transformers models with provably the same output."""

from draftahead.drafters import Drafter, register
from draftahead.errors import DraftaheadError, DrafterFaultWarning
from draftahead.llm import LLM
from draftahead.types import (
    Batch,
    Completion,
    Draft,
    Piece,
    Sampling,
    Scores,
    Sequence,
    Stats,
    TokenLogprob,
    Verdict,
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Batch",
    "Completion",
    "Draft",
    "DraftaheadError",
    "Drafter",
    "DrafterFaultWarning",
    "Piece",
    "Sampling",
    "Scores",
    "Sequence",
    "Stats",
    "TokenLogprob",
    "Verdict",
    "register",
]
