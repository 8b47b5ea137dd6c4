"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from draftahead.core.draft import Draft
from draftahead.core.types import Batch
from draftahead.drafters.base import Drafter, DrafterContext
from draftahead.drafters.registry import register


@register("none")
class NoDrafter(Drafter):
    """Plain decoding."""

    def __init__(self, context: DrafterContext) -> None:
        pass

    def propose(self, batch: Batch) -> Draft | None:
        return None
