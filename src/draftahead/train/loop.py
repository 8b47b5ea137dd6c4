"""The training loop of every drafter. It selects weights by simulated acceptance, not by the loss.

A task defines what is trained; the loop adds the rest: warm-up and cosine decay, accumulation,
several processes, a moving average of the weights, checkpoints, and the end: after the last step,
when acceptance stops rising, or when the loss diverges (the last good weights are kept then).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from draftahead.core.device import device_of
from draftahead.errors import ConfigError, TrainingError
from draftahead.train.batches import TrainBatch
from draftahead.train.config import TrainConfig
from draftahead.train.task import TrainTask

CHECKPOINT, HISTORY = "checkpoint.pt", "history.json"
DIVERGED = 4.0  # a loss this many times the running mean ends the training
SETTLED = 100  # steps before the loss is compared: the first ones fall steeply
CHECK_INTERVAL = 20  # steps between reads of the loss, which wait for the device
WEIGHT_DECAY = 0.01  # of matrices; vectors (norms, biases) have none
MAX_GRAD_NORM = 1.0  # larger gradients are scaled down


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


def refuse_overwriting(folder: Path, *, resume: bool) -> None:
    """A training that is there already is continued or left alone."""
    if not resume and (folder / CHECKPOINT).exists():
        raise ConfigError(
            f"{folder} holds an unfinished or finished training: continue it with --resume, or "
            "name another folder"
        )


class TrainLoop:
    """One training in `folder`. `batches(n)` streams batches from number n on. `data_digest`
    identifies the data: a checkpoint of other data is refused."""

    def __init__(
        self,
        task: TrainTask,
        config: TrainConfig,
        folder: Path,
        batches: Callable[[int], Iterator[TrainBatch]],
        held_out: Iterable[TrainBatch],
        *,
        log: Callable[[str], None] = lambda line: None,
        data_digest: str = "",
    ) -> None:
        self.task, self.config, self.folder = task, config, folder
        self.batches, self.held_out = batches, held_out
        self.log, self._data_digest = log, data_digest
        self.weights = [p for p in task.module.parameters() if p.requires_grad]
        device = self.weights[0].device
        is_gpu = device_of(device).is_gpu
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.weights if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.weights if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=is_gpu)
        self._processes, self._parallel = PartialState(), None
        if self._processes.num_processes > 1:
            self._parallel = DistributedDataParallel(
                _Loss(task),
                find_unused_parameters=True,  # such as experts of a MoE draft model
                broadcast_buffers=False,
            )
        self._trained = nn.ParameterList(self.weights)  # frozen weights need no average
        self.averaged = AveragedModel(self._trained, multi_avg_fn=self._average)
        self.averaged.n_averaged += 1  # the initial weights count as one of them
        self.history = History()
        self.step, self.best, self.since_best = 0, 0.0, 0
        self._autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=config.bfloat16 and is_gpu
        )

    def run(self, *, resume: bool = False, advance: Callable[[], None] = lambda: None) -> History:
        """`advance` is called after each step, and for each one of the training that resumes."""
        refuse_overwriting(self.folder, resume=resume)
        if (self.folder / CHECKPOINT).exists():
            self._load()
        for _ in range(self.step):
            advance()
        batches = self.batches(self.step * self.config.accumulate)
        losses: list[Tensor] = []  # since the last evaluation
        usual = 0.0
        start = time.perf_counter() - (self.history.seconds or [0.0])[-1]
        while self.step < self.config.steps:
            losses.append(self._step(batches))
            advance()
            evaluates = self.step % self.config.eval_interval == 0 or self.step == self.config.steps
            if evaluates or self.step % CHECK_INTERVAL == 0:  # weights are checked before saving
                usual = self._check_loss(torch.stack(losses[-CHECK_INTERVAL:]), usual)
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
            # Gradients are averaged over processes with the last batch of a step only.
            with self._parallel.no_sync() if left and self._parallel else nullcontext():
                with self._autocast:
                    loss = (self._parallel or self.task.loss)(next(batches))
                    loss = loss / self.config.accumulate
                loss.backward()
            total += loss.detach()
        for weight in self.weights:
            if weight.grad is None:  # unused by these batches
                weight.grad = torch.zeros_like(weight)
        norm = nn.utils.clip_grad_norm_(self.weights, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.averaged.update_parameters(self._trained)
        mean: Tensor = reduce(total, "mean")
        return mean + 0.0 * norm

    def _average(self, averaged: Any, current: Any, _: Any) -> None:
        """The moving average of the weights; its decay rises with the steps, so that the initial
        weights are soon forgotten."""
        decay = min(self.config.ema_decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(averaged, current, 1 - decay)

    def _check_loss(self, losses: Tensor, usual: float) -> float:
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
        self.folder.mkdir(parents=True, exist_ok=True)
        self._swap_averaged()
        try:
            with self._autocast:
                acceptance = self.task.evaluate(self.held_out)
            self.since_best += 1
            if acceptance.length > self.best:
                self.best, self.since_best = acceptance.length, 0
                if self._processes.is_main_process:
                    self.task.save(self.folder)
        finally:
            self._swap_averaged()
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
        if self._processes.is_main_process:
            self._save()

    def _swap_averaged(self) -> None:
        """The task's module gets the averaged weights, or its own back."""
        averaged = self.averaged.module.parameters()
        for weight, average in zip(self.weights, averaged, strict=True):
            weight.data, average.data = average.data, weight.data

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
