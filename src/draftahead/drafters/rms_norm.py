"""RMSNorm as trained heads use it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """In the dtype of its input: weights in float32 do not widen hidden states in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)
