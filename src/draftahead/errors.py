"""Every error a user can cause or meet, each with a message that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftahead.core.types import Completion


class DraftaheadError(Exception):
    """Base of all errors of draftahead: bad input, a request that failed, a target that cannot be
    run. The CLI prints its message as one line."""

    # What the other requests of the batch gave, when one of them failed: nothing is lost.
    completions: list[Completion] | None = None


class ModelNotFoundError(DraftaheadError):
    """The model name is no alias, folder, file or reachable hub id."""


class DamagedModelError(ModelNotFoundError):
    """Files of a model are cut short, damaged, or do not fit each other."""


class ModelMemoryError(DraftaheadError):
    """The weights of the model do not fit into memory."""


class DownloadError(DraftaheadError):
    """The embedded model could not be fetched, checked or converted."""


class UnsupportedModelError(DraftaheadError):
    """The model keeps state that cannot be rolled back, or masks attention in its own way."""


class UnknownDrafterError(DraftaheadError):
    """No drafter is registered under this name."""


class ConfigError(DraftaheadError):
    """An option or configuration key is unknown or has a value that cannot work."""


class VocabularyMismatchError(DraftaheadError):
    """The draft model does not share the target's vocabulary."""


class HeadMismatchError(DraftaheadError):
    """A trained head was made for another model than this one."""


class TrainingError(DraftaheadError):
    """A training went wrong: its loss is not finite, or exploded. What was good is kept."""


class PromptError(DraftaheadError):
    """The prompt is empty, or holds ids outside the vocabulary."""


class ContextLengthError(DraftaheadError):
    """The prompt, or the prompt plus max_tokens, does not fit the context."""


class CacheMemoryError(DraftaheadError):
    """The key-value cache does not fit into memory."""


class NonFiniteLogitsError(DraftaheadError):
    """The target itself computed NaN or infinite logits."""


class ProcessorError(DraftaheadError):
    """A logits processor of the user's failed."""


class ReplayUnsupportedError(DraftaheadError):
    """The kernels on this machine do not hold what exact="replay" promises."""


class OtherEngineError(DraftaheadError):
    """Another engine, measured beside ours, does not start, ended, or answered something else."""


class DrafterFaultWarning(UserWarning):
    """A drafter failed. The text goes on without its guesses; only speed is lost."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped word: the nearest known one, then the whole list."""
    names = sorted(known)
    return f"{similar(word, names)} (known: {', '.join(names)})"


def similar(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped word, if one of these is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
