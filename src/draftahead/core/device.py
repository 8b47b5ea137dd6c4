"""The device that tensors lie on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def small_tensor(values: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A small tensor on a device, without waiting for it."""
    found = torch.tensor(values, dtype=dtype)
    return found if str(device) == "cpu" else found.pin_memory().to(device, non_blocking=True)
