"""Catches exceptions of a drafter and checks its drafts, so that faults only cost speed. What it is
given it cannot write to (core/types.py), or it is a copy."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import TypeVar

from draftahead.control.promises import Offer
from draftahead.core.draft import DeviceDraft, Draft
from draftahead.core.types import Batch, ForwardOutput, SequenceView, Verdict
from draftahead.drafters.base import Drafter, validated
from draftahead.errors import DrafterFaultWarning

# Proposals that fail one after the other until the drafter is no longer asked. More cost more steps
# where it is broken for good; fewer give up one that fails on a single text.
GIVE_UP_AFTER = 8

Result = TypeVar("Result")
Item = TypeVar("Item")


class GuardedDrafter:
    """Calls a drafter. An exception or an invalid draft means no draft, and one warning."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        supports_device_draft: Callable[[DeviceDraft, Batch], bool],
    ) -> None:
        self.drafter = drafter
        self._vocab_size, self._supports = vocab_size, supports_device_draft
        self._faults = 0  # proposals that failed, in a row
        self._warned = False

    @property
    def gave_up(self) -> bool:
        return self._faults >= GIVE_UP_AFTER

    def propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        """A valid draft. What the draft sampler has drawn is the draft, even if the drafter failed
        after the draw."""
        self._faults += 1
        proposed = self._call(lambda: self._propose(batch), None)
        return batch.draft_sampler.draft() or proposed

    def _propose(self, batch: Batch) -> Draft | DeviceDraft | None:
        proposed = self.drafter.propose(batch)
        if isinstance(proposed, DeviceDraft):
            is_tree = proposed.trees is not None and proposed.probs is None
            if not is_tree or not self._supports(proposed, batch):
                proposed, _ = proposed.to_host()
        if isinstance(proposed, Draft):
            proposed = validated(proposed, batch, self._vocab_size)
        elif proposed is not None and not isinstance(proposed, DeviceDraft):
            raise TypeError(f"propose returned {type(proposed).__name__}, not a Draft or None")
        self._faults = 0
        return proposed

    def learn(self, batch: Batch, draft: Draft, output: ForwardOutput, verdict: Verdict) -> None:
        """With copies of draft and verdict, so that a drafter cannot modify the engine's."""
        shown = Draft(
            _copied(draft.tokens),
            _copied(draft.parents),
            list(draft.num_nodes),
            draft.confidence and _copied(draft.confidence),
        )
        told = Verdict(_copied(verdict.paths), _copied(verdict.tokens))
        self._call(lambda: self.drafter.learn(batch, shown, output, told), None)

    def release(self, sequence: SequenceView) -> None:
        self._call(lambda: self.drafter.release(sequence), None)

    # What follows is optional: an object that does not subclass Drafter may lack it.

    @property
    def adaptive(self) -> bool:
        return self._call(lambda: bool(getattr(self.drafter, "adaptive", False)), False)

    def idle_work(self) -> None:
        self._call(lambda: getattr(self.drafter, "idle_work", _nothing)(), None)

    @property
    def expected_offer(self) -> Offer | None:
        return self._call(self._expected_offer, None)

    def _expected_offer(self) -> Offer | None:
        if inspect.getattr_static(self.drafter, "expected_offer", None) is None:
            return None
        found = self.drafter.expected_offer
        if found is not None and not isinstance(found, Offer):
            raise TypeError(f"expected_offer is {type(found).__name__}, not an Offer or None")
        return found

    def explain(self) -> list[str]:
        return self._call(lambda: [*map(str, getattr(self.drafter, "explain", list)())], [])

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return call()
        except Exception as fault:
            message = (
                f"drafter {type(self.drafter).__name__} raised an exception and is ignored: "
                f"{type(fault).__name__}: {fault}"
            )
            logging.getLogger("draftahead").debug(message, exc_info=True)
            if not self._warned:
                self._warned = True
                warnings.warn(message, DrafterFaultWarning, stacklevel=2)
            return otherwise


def _nothing() -> None:
    return


def _copied(lists: list[list[Item]]) -> list[list[Item]]:
    return [list(items) for items in lists]
