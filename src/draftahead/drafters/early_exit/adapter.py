"""The exit adapter: maps the hidden states after a few layers to what the target's own lm_head
reads.

It lies on the exit branch alone, between a layer and the target's last norm: a norm and a low-rank
residual. The lm_head is the target's; a draft vocabulary selects a part of it, and the adapter
stores nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftahead.drafters.rms_norm import RMSNorm
from draftahead.models.support import text_config


@dataclass(frozen=True)
class ExitConfig:
    num_layers: int  # of the target, below the exit
    hidden_size: int
    rank: int
    vocab_size: int  # of the target
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary
    rms_norm_eps: float = 1e-5


class ExitAdapter(nn.Module):
    """Hidden states [..., H] after the exit's last layer -> inputs [..., H] of the target's last
    norm."""

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.down = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)  # a new adapter leaves the hidden states as they are
        self.draft_to_target: Tensor | None  # [D] the tokens of the draft vocabulary
        size = config.draft_vocab_size
        self.register_buffer("draft_to_target", None if size is None else torch.arange(size))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(F.silu(self.down(self.norm(hidden))))  # type: ignore[no-any-return]


def new_adapter(
    model: Any, num_layers: int, *, rank: int, draft_to_target: Tensor | None = None
) -> ExitAdapter:
    """An untrained adapter for a target, in float32 on its device."""
    text = text_config(model)
    config = ExitConfig(
        num_layers=num_layers,
        hidden_size=int(text.hidden_size),
        rank=rank,
        vocab_size=int(text.vocab_size),
        draft_vocab_size=None if draft_to_target is None else len(draft_to_target),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-5)),
    )
    adapter = ExitAdapter(config).to(model.device)
    if adapter.draft_to_target is not None and draft_to_target is not None:
        adapter.draft_to_target.copy_(draft_to_target)
    return adapter
