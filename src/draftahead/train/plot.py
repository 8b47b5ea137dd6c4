"""A training as a PNG file."""

from __future__ import annotations

from pathlib import Path

from draftahead.bench.report import figure
from draftahead.train.loop import History


def draw(history: History, file: Path, speedups: list[float] | None = None) -> None:
    """Loss, acceptance by depth, acceptance length; and the estimated speed-up, if there is one."""
    with figure(3, file) as (loss, acceptance, length):
        loss.plot(history.steps, history.losses)
        loss.set(title="loss", xlabel="step")
        for depth, shares in enumerate(zip(*history.by_depth, strict=True), start=1):
            acceptance.plot(history.steps, shares, label=f"depth {depth}")
        acceptance.set(title="acceptance by depth", xlabel="step", ylim=(0, 1))
        acceptance.legend(fontsize="small")
        length.plot(history.steps, history.lengths, label="acceptance length")
        if speedups is not None:
            length.plot(history.steps, speedups, linestyle="--", label="estimated speed-up")
        length.set(title="held-out texts", xlabel="step")
        length.legend(fontsize="small")
