"""Shared by all tests. One thread: tiny tensors gain nothing from more, and bits stay put."""

from __future__ import annotations

from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The embedded model and its tokenizer, fetched and converted once."""
    from draftahead import hub

    return hub.load("smollm2", device="cpu")
