"""The training loop of every drafter. It selects weights by simulated acceptance, not by the loss.

A task defines what is trained; the loop adds the rest: warm-up and cosine decay, accumulation,
several processes, a moving average of the weights, checkpoints, and the end: after the last step,
when acceptance stops rising, or when the loss diverges (the last good weights are kept then).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from draftahead.core.device import device_of
from draftahead.errors import ConfigError, TrainingError
from draftahead.train.acceptance import Acceptance
from draftahead.train.batches import TrainBatch

CHECKPOINT, HISTORY = "checkpoint.pt", "history.json"
DIVERGED = 4.0  # a loss that is so many times the usual one ends the training
SETTLED = 100  # steps before the loss is compared: the first ones fall steeply
CHECK_INTERVAL = 20  # steps between reads of the loss, which wait for the device
LR_FLOOR = 0.02  # share of the learning rate at the last step
WEIGHT_DECAY = 0.01  # of matrices; vectors (norms, biases) have none
MAX_GRAD_NORM = 1.0  # larger gradients are scaled down


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 2000
    lr: float = 6e-4  # after the warm-up
    warmup: int = 100  # steps
    accumulate: int = 1  # batches per step
    ema_decay: float = 0.999  # share of the averaged weights that a step keeps
    eval_interval: int = 500  # steps between evaluations and checkpoints
    patience: int = 0  # evaluations without a gain after which it ends; 0: never
    bfloat16: bool = True  # autocast on a GPU
    seed: int = 0

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


class TrainTask(Protocol):
    module: nn.Module

    def loss(self, batch: TrainBatch) -> Tensor: ...

    def evaluate(self) -> Acceptance: ...

    def save(self, folder: Path) -> None:
        """Writes the trained drafter as it will be loaded."""


@dataclass
class History:
    """One entry per evaluation."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # means since the previous evaluation
    lengths: list[float] = field(default_factory=list)  # simulated acceptance lengths
    by_depth: list[list[float]] = field(default_factory=list)  # and acceptance by depth
    seconds: list[float] = field(default_factory=list)


class _Loss(nn.Module):
    """The loss as a module's forward, which is what DistributedDataParallel wraps."""

    def __init__(self, task: TrainTask) -> None:
        super().__init__()
        self.trained, self._loss = task.module, task.loss

    def forward(self, batch: TrainBatch) -> Tensor:
        return self._loss(batch)


class TrainLoop:
    """One training in `folder`. `batches(n)` streams batches from number n on. `data_digest`
    identifies the data: a checkpoint of other data is refused."""

    def __init__(
        self,
        task: TrainTask,
        config: TrainConfig,
        folder: Path,
        batches: Callable[[int], Iterator[TrainBatch]],
        *,
        log: Callable[[str], None] = lambda line: None,
        data_digest: str = "",
    ) -> None:
        self.task, self.config, self.folder, self.batches = task, config, folder, batches
        self.log, self._data_digest = log, data_digest
        self.weights = [p for p in task.module.parameters() if p.requires_grad]
        device = self.weights[0].device
        is_gpu = device_of(device).is_gpu
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.weights if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
                {"params": [p for p in self.weights if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(0.9, 0.95),
            fused=is_gpu,
        )
        self._loss: nn.Module = _Loss(task)
        self._processes = distributed.get_world_size() if distributed.is_initialized() else 1
        self._is_main = self._processes == 1 or distributed.get_rank() == 0
        if self._processes > 1:  # a batch may leave weights unused: experts of a MoE draft model
            self._loss = DistributedDataParallel(
                self._loss, find_unused_parameters=True, broadcast_buffers=False
            )
        self.averaged = AveragedModel(task.module, multi_avg_fn=self._average)
        self.averaged.n_averaged += 1  # the initial weights count as one of them
        self.history = History()
        self.step, self.best, self.since_best = 0, 0.0, 0
        self._autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=config.bfloat16 and is_gpu
        )

    def run(self, *, resume: bool = False) -> History:
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / CHECKPOINT).exists():
            if not resume:
                raise ConfigError(
                    f"{self.folder} holds an unfinished or finished training: continue it with "
                    "--resume, or name another folder"
                )
            self._load()
        batches = self.batches(self.step * self.config.accumulate)
        losses: list[Tensor] = []  # since the last evaluation
        usual = 0.0
        start = time.perf_counter() - (self.history.seconds or [0.0])[-1]
        while self.step < self.config.steps:
            losses.append(self._step(batches))
            evaluates = self.step % self.config.eval_interval == 0 or self.step == self.config.steps
            if evaluates or self.step % CHECK_INTERVAL == 0:  # weights are checked before saving
                usual = self._checked(torch.stack(losses[-CHECK_INTERVAL:]), usual)
            if evaluates:
                seconds = time.perf_counter() - start
                self._evaluate(float(torch.stack(losses).mean()), seconds)
                losses.clear()
                if 0 < self.config.patience <= self.since_best:
                    self.log(f"acceptance has not risen in {self.since_best} evaluations: finished")
                    break
        return self.history

    def _step(self, batches: Iterator[TrainBatch]) -> Tensor:
        """One step of the optimizer. Returns the loss, which is not finite if the gradient is not;
        all processes get the same."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        total = torch.zeros((), device=self.weights[0].device)
        for left in reversed(range(self.config.accumulate)):
            with self._gradients(synchronise=not left):
                with self._autocast:
                    loss = self._loss(next(batches)) / self.config.accumulate
                loss.backward()
            total += loss.detach()
        if self._processes > 1:
            distributed.all_reduce(total)
            total /= self._processes
        for weight in self.weights:
            if weight.grad is None:  # unused by these batches
                weight.grad = torch.zeros_like(weight)
        norm = nn.utils.clip_grad_norm_(self.weights, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.averaged.update_parameters(self.task.module)
        return total + 0.0 * norm

    def _gradients(self, *, synchronise: bool) -> AbstractContextManager[None]:
        """Gradients are averaged over processes with the last batch of a step only."""
        if isinstance(self._loss, DistributedDataParallel) and not synchronise:
            return self._loss.no_sync()
        return nullcontext()

    def _average(self, averaged: Any, current: Any, _: Any) -> None:
        """The moving average of the weights; its decay rises with the steps, so that the initial
        weights are soon forgotten."""
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(averaged, current, 1 - decay)

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """The task's module holds the averaged weights meanwhile."""
        pairs = list(
            zip(self.task.module.parameters(), self.averaged.module.parameters(), strict=True)
        )

        def swap() -> None:
            for weight, average in pairs:
                weight.data, average.data = average.data, weight.data

        swap()
        try:
            yield
        finally:
            swap()

    def _checked(self, losses: Tensor, usual: float) -> float:
        """The usual loss, updated; raises TrainingError if the latest loss diverged from it."""
        loss = float(losses.mean())
        diverged = usual and self.step > SETTLED and loss > DIVERGED * usual
        if diverged or not math.isfinite(loss):
            before = f" (it was about {usual:.3g})" if usual else ""
            kept = f"; the weights in {self.folder} are the last good ones" if self.best else ""
            raise TrainingError(
                f"the loss or its gradient became {loss:.3g} by step {self.step}{before}: lower "
                f"--lr, or use a longer warm-up{kept}"
            )
        return 0.7 * usual + 0.3 * loss if usual else loss

    def _evaluate(self, loss: float, seconds: float) -> None:
        with self._averaged_weights():
            with self._autocast:
                acceptance = self.task.evaluate()
            self.since_best += 1
            if acceptance.length > self.best:
                self.best, self.since_best = acceptance.length, 0
                if self._is_main:
                    self.task.save(self.folder)
        history = self.history
        history.steps.append(self.step)
        history.losses.append(loss)
        history.lengths.append(acceptance.length)
        history.by_depth.append(acceptance.by_depth)
        history.seconds.append(seconds)
        depths = " ".join(f"{share:.2f}" for share in acceptance.by_depth)
        self.log(
            f"step {self.step} of {self.config.steps}: loss {loss:.3f}, acceptance length "
            f"{acceptance.length:.3f} (acceptance by depth {depths}), {seconds:.0f} s"
        )
        if self._is_main:
            self._save()

    # ----------------------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        state = {
            "data": self._data_digest,
            "module": self.task.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averaged": self.averaged.state_dict(),
            "step": self.step,
            "best": self.best,
            "since_best": self.since_best,
            "history": asdict(self.history),
        }
        part = self.folder / (CHECKPOINT + ".part")
        torch.save(state, part)
        part.replace(self.folder / CHECKPOINT)
        text = json.dumps({"config": asdict(self.config), **asdict(self.history)}, indent=1)
        (self.folder / HISTORY).write_text(text + "\n", "utf-8")

    def _load(self) -> None:
        file = self.folder / CHECKPOINT
        try:
            state = torch.load(file, map_location=self.weights[0].device, weights_only=True)
            same_data = state["data"] == self._data_digest
            self.task.module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.averaged.load_state_dict(state["averaged"])
            self.step, self.best = int(state["step"]), float(state["best"])
            self.since_best = int(state["since_best"])
            self.history = History(**state["history"])
        except Exception as problem:
            raise ConfigError(f"{file} is not a checkpoint of this training: {problem}") from None
        if not same_data:  # other held-out texts may be training texts of the checkpoint
            raise ConfigError(
                f"{self.folder} holds a training on other data, of another model or with another "
                "seed: continue with the same, or name another folder"
            )
        self.log(f"continuing from step {self.step}")
