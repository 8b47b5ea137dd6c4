"""What a drafter is.

A drafter only guesses. Whatever it returns, raises or leaves out, the output stays the target's:
the engine checks every draft and treats a bad one as no draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from draftahead.core.types import Batch, Draft, ForwardOutput, SequenceState, Verdict
from draftahead.errors import ConfigError
from draftahead.models.runner import ModelRunner


@runtime_checkable
class Drafter(Protocol):
    """Three verbs. Subclass it to inherit the last two.

    One that says how likely its guesses are (`Draft.claims`), or that has an attribute `guided`
    that is true, leaves it to the policy whether it is asked. One with a method `meanwhile()` is
    told whenever a device is at work for a while: what can wait until then costs nothing. One that
    often keeps its best guesses back says in `hope` (promises.Offer) what they would be worth.
    """

    def propose(self, batch: Batch) -> Draft | None:
        """Guesses for each row, no deeper than `batch.rooms`; None for no guess at all.

        A drafter that samples draws with `batch.dice` and may return None: what it drew is the
        draft. Guesses that it does not draw there count as certain (point masses).
        """

    def learn(self, batch: Batch, verdict: Verdict, scores: ForwardOutput) -> None:
        """What became of the draft, and how the target scored `scores.draft`, the part of it that
        was worth a pass. `batch.sequences` do not hold the new tokens yet. Not called for steps
        that no guesses were asked for."""

    def release(self, sequence: SequenceState) -> None:
        """The sequence has ended; forget what was kept for it."""


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may know of the target it works for."""

    device: torch.device
    dtype: torch.dtype
    vocabulary: int
    tokenizer: Any  # of the target; None if the user gave none
    max_batch: int
    max_context: int
    load: Callable[[str], tuple[Any, Any]]  # name -> (model, tokenizer), on this device
    successors: Path | None = None  # a table for `recycle` that comes with the model
    head: Path | None = None  # a trained EAGLE head that comes with the model
    target: ModelRunner | None = None  # the model itself, for drafters that work with parts of it

    def target_runner(self, name: str) -> ModelRunner:
        """The target's, for a drafter that cannot do without."""
        if self.target is None:
            raise ConfigError(f"drafter {name!r} works with the target itself, and was given none")
        return self.target


# ------------------------------------------------------------------------- sound drafts only


def check(draft: Draft, batch: Batch, vocabulary: int) -> None:
    """Refuses a draft that is no tree of known tokens over this batch's roots."""
    rows = len(batch.sequences)
    if draft.tokens.ndim != 2 or draft.tokens.shape != draft.parents.shape:
        raise ValueError(
            f"tokens {draft.tokens.shape} and parents {draft.parents.shape} must match"
        )
    if len(draft.tokens) != rows or len(draft.num_nodes) != rows:
        raise ValueError(f"a draft of {len(draft.tokens)} rows for a batch of {rows}")
    if draft.tokens.is_floating_point() or draft.parents.is_floating_point():
        raise ValueError("tokens and parents must be whole numbers")
    width = draft.tokens.shape[1]
    if not all(1 <= size <= width for size in draft.num_nodes):
        raise ValueError(f"sizes {draft.num_nodes} do not fit {width} nodes")
    tokens, parents = draft.host_tokens, draft.host_parents
    for row, size in enumerate(draft.num_nodes):
        if tokens[row][0] != batch.roots[row]:
            raise ValueError("node 0 must be the last token of the text")
        if not 0 <= min(tokens[row][:size]) <= max(tokens[row][:size]) < vocabulary:
            raise ValueError(f"a token outside the vocabulary of {vocabulary}")
        if not all(0 <= parents[row][node] < node for node in range(1, size)):
            raise ValueError("a parent must stand before its children")


def sound(draft: Draft, batch: Batch, vocabulary: int) -> Draft:
    """A draft that was checked, without what a drafter may say and not know: a law that we did not
    draw from ourselves is only a claim."""
    check(draft, batch, vocabulary)
    guesses = [
        list(zip(tokens[1:size], parents[1:size], strict=True))
        for tokens, parents, size in zip(
            draft.host_tokens, draft.host_parents, draft.num_nodes, strict=True
        )
    ]
    return Draft.trees(batch.roots, guesses, sound_claims(draft))


def sound_claims(draft: Draft) -> list[list[float]] | None:
    """Likelihoods for every guess, none above its parent's; None for anything else."""
    if draft.confidence is None or [1 + len(row) for row in draft.confidence] != list(
        draft.num_nodes
    ):
        return None
    found = []
    for row, parents in zip(draft.confidence, draft.host_parents, strict=True):
        said = [1.0]
        for node, claim in enumerate(row, start=1):
            if not 0 <= float(claim) <= 1:
                return None
            said.append(min(float(claim), said[parents[node]]))
        found.append(said[1:])
    return found


def positive(name: str, value: Any, most: int = 63, default: int | None = None) -> int:
    """A checked whole number, for the options of drafters; without one, the default."""
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
    return value
