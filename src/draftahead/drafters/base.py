"""The Drafter protocol, and validation of drafts.

A drafter cannot change the output: the engine checks every draft, and treats an exception or an
invalid draft as no draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from draftahead.control.promises import Offer
from draftahead.core import tree
from draftahead.core.checks import whole
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceView, Verdict
from draftahead.errors import ConfigError
from draftahead.models.runner import ModelRunner

# Nodes of lower confidence are not drafted: they do not repay their share of the verification.
MIN_CONFIDENCE = 0.02


@runtime_checkable
class Drafter(Protocol):
    """Drafts the next tokens of each sequence. Subclass it: only `propose` must be written."""

    # The policy decides when it is asked, and how many of its nodes are verified. So it does once a
    # draft has stated its confidence (Draft.confidence).
    adaptive: bool = False

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        """A tree for each sequence, no deeper than `batch.max_depths`; None: no draft.
        Deeper host drafts are cut. Device drafts have the shape of a CUDA graph and are verified
        whole; tokens beyond `max_tokens` are dropped afterwards.

        A drafter that samples draws with `batch.draft_sampler` and returns None: what it drew is
        the draft. Tokens that it does not draw there are taken as deterministic (q = 1).
        """
        ...

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        """The outcome of a step for which it was asked: the draft that was verified (the part of
        its own that the policy kept), the target's output for it, and the verdict.
        `batch.sequences` do not hold the new tokens yet."""
        return

    def release(self, sequence: SequenceView) -> None:
        """Frees the state kept for a sequence that has ended."""
        return

    def idle_work(self) -> None:
        """Called while a GPU runs a forward: deferred work costs no time there."""
        return

    @property
    def expected_offer(self) -> Offer | None:
        """Confidence by rank and seconds of its draft if it ran now, by which the policy asks a
        drafter whose recent drafts were small."""
        return None

    def explain(self) -> list[str]:
        """Sentences for `--explain`."""
        return []


class DeviceDrafter(Drafter, Protocol):
    """A drafter that can build trees on a GPU, asynchronously."""

    @property
    def drafts_on_device(self) -> bool: ...

    def launch(self, batch: Batch) -> DeviceDraft | None:
        """Starts building trees; None if that is not possible for this batch."""
        ...

    def observe(self, launched: DeviceDraft, draft: Draft) -> None:
        """`launched` has been verified: it, or where the target takes host drafts only, its part
        `draft`."""


def as_built(launched: DeviceDraft, draft: Draft) -> Draft:
    """A device draft on the host, before the policy cut it to `draft`. To be called before the
    next launch, which overwrites its memory."""
    if draft.num_nodes == launched.num_nodes:
        return draft
    return launched.to_host()[0]


@dataclass(frozen=True)
class DrafterContext:
    """The target's properties that drafters may use."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    tokenizer: Any  # of the target; None if the user gave none
    max_batch: int
    max_context: int
    load: Callable[[str], tuple[Any, Any]]  # name -> (model, tokenizer), on this device
    successors: Path | None = None  # a table for `recycle` that comes with the model
    head: Path | None = None  # a trained EAGLE head that comes with the model
    target: ModelRunner | None = None  # for drafters that use parts of the target itself

    def target_runner(self, name: str) -> ModelRunner:
        """The target's runner, for a drafter that cannot do without."""
        if self.target is None:
            raise ConfigError(f"drafter {name!r} drafts with the target itself, and was given none")
        return self.target


def with_drafts_for(batch: Batch, mask: Iterable[bool]) -> Batch:
    """The batch with a max_depth of 0 for all sequences but those of `mask` [B]."""
    pairs = zip(batch.max_depths, mask, strict=True)
    return replace(batch, max_depths=tuple(depth if drafts else 0 for depth, drafts in pairs))


# ------------------------------------------------------------------------------ valid drafts only


def validated(draft: Draft, batch: Batch, vocab_size: int) -> Draft:
    """A checked copy of a draft, without `probs`: only those of the draft sampler are trusted."""
    check_draft(draft, batch, vocab_size)
    trees = [
        list(zip(tokens[1:size], parents[1:size], strict=True))
        for tokens, parents, size in zip(draft.tokens, draft.parents, draft.num_nodes, strict=True)
    ]
    return Draft.trees(batch.roots, trees, validated_confidence(draft))


def check_draft(draft: Draft, batch: Batch, vocab_size: int) -> None:
    """Refuses a draft that is no tree of known tokens over this batch's roots."""
    size = len(batch.sequences)
    if not len(draft.tokens) == len(draft.parents) == len(draft.num_nodes) == size:
        raise ValueError(f"a draft of {len(draft.tokens)} trees for a batch of {size}")
    for b, (tokens, parents) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        num_nodes = draft.num_nodes[b]
        if len(tokens) != len(parents) or not 1 <= num_nodes <= len(tokens):
            raise ValueError(
                f"{num_nodes} nodes, {len(tokens)} tokens and {len(parents)} parents do not fit"
            )
        if not all(isinstance(value, Integral) for value in [*tokens, *parents]):
            raise ValueError("tokens and parents must be whole numbers")
        if tokens[0] != batch.roots[b]:
            raise ValueError("node 0 must be the last token of the sequence")
        if not 0 <= min(tokens[:num_nodes]) <= max(tokens[:num_nodes]) < vocab_size:
            raise ValueError(f"a token outside the vocabulary of {vocab_size}")
        if not tree.is_valid(parents[:num_nodes]):
            raise ValueError("a parent must stand before its children")


def validated_confidence(draft: Draft) -> list[list[float]] | None:
    """The confidence with each node limited to its parent's; None if it is missing or invalid."""
    stated = draft.confidence
    if stated is None or [1 + len(values) for values in stated] != list(draft.num_nodes):
        return None
    found = []
    for values, parents in zip(stated, draft.parents, strict=True):
        if not all(0 <= float(value) <= 1 for value in values):
            return None
        found.append(tree.limit_to_parents([float(value) for value in values], parents))
    return found


def positive_int(name: str, value: Any, max_value: int = 63, default: int | None = None) -> int:
    """Checks an option of a drafter; without a value, returns the default."""
    if value is None and default is not None:
        return default
    checked: int = whole(1, max_value).of(name, value)
    return checked
