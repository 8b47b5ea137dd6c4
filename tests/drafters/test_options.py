"""Options that several drafters share."""

from __future__ import annotations

import pytest

import zoo
from draftahead import LLM, errors


@pytest.mark.parametrize("method", ["auto", "suffix", "recycle", "draft_model"])
def test_zero_speculative_tokens_are_refused(method: str) -> None:
    needed = {"model": zoo.tiny("llama")} if method == "draft_model" else {}
    with pytest.raises(errors.ConfigError, match="whole number from 1"):
        LLM(zoo.tiny("llama"), {"method": method, "num_speculative_tokens": 0, **needed})
