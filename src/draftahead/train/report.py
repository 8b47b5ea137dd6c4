"""A training as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from draftahead.errors import ConfigError
from draftahead.train.loop import History


def check_drawing() -> None:
    """Before the work, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install 'draftahead[bench]'")


def draw(history: History, file: Path, speedups: list[float] | None = None) -> None:
    """Loss, acceptance by depth, acceptance length; with what it would bring here, if known."""
    check_drawing()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4))
    left.plot(history.steps, history.losses)
    left.set(title="loss", xlabel="step")
    for depth, hits in enumerate(zip(*history.by_depth, strict=True), start=1):
        middle.plot(history.steps, hits, label=f"guess {depth}")
    middle.set(title="right, where those before it were", xlabel="step", ylim=(0, 1))
    middle.legend(fontsize="small")
    right.plot(history.steps, history.lengths, label="tokens a pass")
    if speedups is not None:
        right.plot(history.steps, speedups, linestyle="--", label="times as fast here, estimated")
    right.set(title="on held-out texts", xlabel="step")
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
