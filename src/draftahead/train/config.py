"""How a drafter is trained. Each field is also an option of the commands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from draftahead.errors import ConfigError

LR_FLOOR = 0.02  # share of the learning rate at the last step


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: Annotated[int, Option(help="Steps of the optimizer.")] = 4000
    lr: Annotated[float, Option(help="Learning rate, after the warm-up.")] = 6e-4
    warmup: Annotated[int, Option(help="Steps of the warm-up.")] = 200
    accumulate: Annotated[int, Option(help="Batches per step.")] = 1
    ema_decay: Annotated[float, Option(help="Of the moving average of the weights.")] = 0.999
    eval_interval: Annotated[int, Option(help="Steps between evaluations, with checkpoints.")] = 500
    patience: Annotated[int, Option(help="Evaluations without a gain that end it; 0: never.")] = 0
    bfloat16: Annotated[
        bool, Option("--bfloat16/--no-bfloat16", help="On a GPU: autocast to bfloat16.")
    ] = True
    seed: Annotated[int, Option(help="The same seed gives the same drafter.")] = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "accumulate": 1, "eval_interval": 1, "warmup": 0, "patience": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} must be {bound} or more, not {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr must be above 0, not {self.lr}")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay must be 0 or more and less than 1, not {self.ema_decay}")

    def lr_at(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))
        return self.lr * (LR_FLOOR + (1 - LR_FLOOR) * cosine)
