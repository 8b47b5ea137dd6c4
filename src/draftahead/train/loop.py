"""The training loop of every head: it goes by the acceptance it would bring, not by the loss alone.

A task says what is trained and how; the loop does the rest: warm-up and cosine, accumulation, an
average of the weights, checkpoints, and the end: when the steps are done, when acceptance on held
out texts has stopped rising, or when the loss goes wrong (then with the last good weights kept).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftahead.core.device import device_of
from draftahead.errors import ConfigError, TrainingError
from draftahead.train.blocks import Block

CHECKPOINT, HISTORY = "checkpoint.pt", "history.json"
EXPLODED = 4.0  # times the usual loss
SETTLED = 100  # steps until there is a usual loss
LOOKS = 20  # steps between looks at it: reading it back waits for the device


@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int = 2000
    rate: float = 6e-4
    warmup: int = 100
    floor: float = 0.02  # of the rate, at the end
    decay: float = 0.01  # of the weights
    clip: float = 1.0  # norm of a gradient
    accumulate: int = 1  # blocks to a step
    average: float = 0.999  # how much of the averaged weights a step keeps
    every: int = 500  # steps between evaluations, and checkpoints
    patience: int = 0  # evaluations without a gain after which it ends; 0: never
    half: bool = True  # bfloat16 for the products, on a GPU
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("warmup", "patience"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"rate must be above 0, not {self.rate}")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average must be 0 up to less than 1, not {self.average}")

    def rate_at(self, step: int) -> float:
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))
        return self.rate * (self.floor + (1 - self.floor) * cosine)


@dataclass(frozen=True)
class Acceptance:
    """What drafts of this head would bring on held-out texts."""

    length: float  # tokens a pass: the target's own and the guesses before it that were right
    by_depth: list[float]  # how often a guess was right where those before it were


class Task(Protocol):
    module: nn.Module

    def loss(self, block: Block) -> Tensor: ...

    def evaluate(self) -> Acceptance: ...

    def save(self, folder: Path) -> None:
        """The trained part as it will be loaded."""


@dataclass
class History:
    """What was seen, for the table and the picture."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # means since the entry before
    lengths: list[float] = field(default_factory=list)
    by_depth: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Average:
    """A slow copy of the weights, which is better than any of them."""

    def __init__(self, module: nn.Module, keep: float) -> None:
        self._live: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.values = [p.detach().clone() for p in self._live]
        self._keep, self._count = keep, 0

    @torch.no_grad()
    def update(self) -> None:
        self._count += 1
        keep = min(self._keep, (1 + self._count) / (10 + self._count))  # soon near, later slow
        torch._foreach_lerp_(self.values, self._live, 1 - keep)

    @torch.no_grad()
    def swap(self) -> None:
        for live, value in zip(self._live, self.values, strict=True):
            spare = live.clone()
            live.copy_(value)
            value.copy_(spare)

    def state(self) -> dict[str, Any]:
        return {"values": self.values, "count": self._count}

    def load(self, state: dict[str, Any]) -> None:
        self._count = int(state["count"])
        for value, stored in zip(self.values, state["values"], strict=True):
            value.copy_(stored)


class Loop:
    """One training. `blocks(number)` gives the blocks from one on; `reduce` averages the loss and
    its gradients over processes, where there are several: what they decide by it is the same.
    `about`: what it learns from, which must be the same where it goes on."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        folder: Path,
        blocks: Callable[[int], Iterator[Block]],
        *,
        told: Callable[[str], None] = lambda line: None,
        reduce: Callable[[list[Tensor]], None] = lambda tensors: None,
        is_main: bool = True,
        about: str = "",
    ) -> None:
        self.about = about
        self.task, self.plan, self.folder, self.blocks = task, plan, folder, blocks
        self.told, self._reduce, self._is_main = told, reduce, is_main
        self.weights = [p for p in task.module.parameters() if p.requires_grad]
        # Vectors (norms, biases) are not pulled towards zero.
        matrices = [p for p in self.weights if p.ndim > 1]
        vectors = [p for p in self.weights if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": plan.decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        device = self.weights[0].device
        self.optimizer = torch.optim.AdamW(
            groups, lr=plan.rate, betas=(0.9, 0.95), fused=device_of(device).is_gpu
        )
        self.average = Average(task.module, plan.average)
        self.history = History()
        self.step, self.best, self.since_best = 0, 0.0, 0
        self._half = plan.half and device_of(device).is_gpu
        self._device = device.type

    def run(self, *, resume: bool = False) -> History:
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / CHECKPOINT).exists():
            if not resume:
                raise ConfigError(
                    f"{self.folder} holds a training that was begun: go on with --resume, or name "
                    "another folder"
                )
            self._load()
        blocks = self.blocks(self.step * self.plan.accumulate)
        losses: list[Tensor] = []
        usual = 0.0
        start = time.perf_counter() - (self.history.seconds or [0.0])[-1]
        while self.step < self.plan.steps:
            loss = self._step(blocks)
            losses.append(loss)
            self.step += 1
            evaluates = self.step % self.plan.every == 0 or self.step == self.plan.steps
            if self.step % LOOKS == 0 or evaluates:  # no weights are kept unlooked at
                usual = self._checked(torch.stack(losses[-LOOKS:]), usual)
            if evaluates:
                seconds = time.perf_counter() - start
                self._evaluate(float(torch.stack(losses).mean()), seconds)
                losses.clear()
                if 0 < self.plan.patience <= self.since_best:
                    self.told(f"acceptance has not risen {self.since_best} times: that is all")
                    break
        return self.history

    def _step(self, blocks: Iterator[Block]) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate_at(self.step)
        total = torch.zeros((), device=self.weights[0].device)
        for _ in range(self.plan.accumulate):
            with torch.autocast(self._device, torch.bfloat16, enabled=self._half):
                loss = self.task.loss(next(blocks)) / self.plan.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        for weight in self.weights:
            if weight.grad is None:  # nothing in these blocks spoke of it
                weight.grad = torch.zeros_like(weight)
        self._reduce([total, *(p.grad for p in self.weights if p.grad is not None)])
        norm = nn.utils.clip_grad_norm_(self.weights, self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update()
        return total + 0.0 * norm  # not finite if one of the two is not

    def _checked(self, losses: Tensor, usual: float) -> float:
        """The usual loss, if this one is in order."""
        now = float(losses.mean())
        wrong = not math.isfinite(now)
        if wrong or (usual and self.step > SETTLED and now > EXPLODED * usual):
            before = f" (it was about {usual:.3g})" if usual else ""
            kept = f"; the weights in {self.folder} are the last good ones" if self.best else ""
            raise TrainingError(
                f"the loss or its gradient became {now:.3g} by step {self.step}{before}: lower the "
                f"rate, or warm up for longer{kept}"
            )
        return now if not usual else 0.7 * usual + 0.3 * now

    def _evaluate(self, loss: float, seconds: float) -> None:
        self.average.swap()
        try:
            with torch.autocast(self._device, torch.bfloat16, enabled=self._half):
                found = self.task.evaluate()
            self.since_best += 1
            if found.length > self.best:
                self.best, self.since_best = found.length, 0
                if self._is_main:
                    self.task.save(self.folder)
        finally:
            self.average.swap()
        history = self.history
        history.steps.append(self.step)
        history.losses.append(loss)
        history.lengths.append(found.length)
        history.by_depth.append(found.by_depth)
        history.seconds.append(seconds)
        depths = " ".join(f"{hit:.2f}" for hit in found.by_depth)
        self.told(
            f"step {self.step} of {self.plan.steps}: loss {loss:.3f}, acceptance length "
            f"{found.length:.3f} (right by depth {depths}), {seconds:.0f} s"
        )
        if self._is_main:
            self._save()

    # ----------------------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        state = {
            "about": self.about,
            "module": self.task.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state(),
            "step": self.step,
            "best": self.best,
            "since_best": self.since_best,
            "history": asdict(self.history),
        }
        part = self.folder / (CHECKPOINT + ".part")
        torch.save(state, part)
        part.replace(self.folder / CHECKPOINT)
        text = json.dumps({"plan": asdict(self.plan), **asdict(self.history)}, indent=1)
        (self.folder / HISTORY).write_text(text + "\n", "utf-8")

    def _load(self) -> None:
        place = self.folder / CHECKPOINT
        try:
            state = torch.load(place, map_location=self._device, weights_only=True)
            is_this = state["about"] == self.about
            self.task.module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.average.load(state["average"])
            self.step, self.best = int(state["step"]), float(state["best"])
            self.since_best = int(state["since_best"])
            self.history = History(**state["history"])
        except Exception as problem:
            raise ConfigError(f"{place} is no checkpoint of such a training: {problem}") from None
        if not is_this:
            # Held-out texts would be some that it learnt from, and its vocabulary another one.
            raise ConfigError(
                f"{self.folder} holds a training on other texts, of another model or with another "
                "seed: go on with the same, or name another folder"
            )
        self.told(f"going on from step {self.step}")
