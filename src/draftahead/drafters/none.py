"""Plain decoding: the drafter that proposes nothing. Baseline and speculation share every line."""

from __future__ import annotations

from draftahead.drafters import Drafter, Setting, register
from draftahead.types import Batch, Draft


@register("none")
class NoDrafter(Drafter):
    def __init__(self, setting: Setting) -> None:
        pass

    def propose(self, batch: Batch) -> Draft | None:
        return None
