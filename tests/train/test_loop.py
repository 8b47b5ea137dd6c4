"""The training loop: exact resumption, selection by acceptance, and its ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo
from draftahead.drafters.eagle import io
from draftahead.drafters.eagle.head import new_head
from draftahead.errors import ConfigError, TrainingError
from draftahead.train.acceptance import Acceptance
from draftahead.train.batches import TrainBatches
from draftahead.train.config import LR_FLOOR, TrainConfig
from draftahead.train.dataset import Dataset
from draftahead.train.eagle import EagleTask
from draftahead.train.loop import CHECKPOINT, HISTORY, SETTLED, TrainLoop

FILE = "weights.safetensors"


class Line:
    """A linear regression; the acceptance lengths of its evaluations are given."""

    def __init__(self, lengths: list[float] | None = None, width: int = 4) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Linear(width, 1)
        self._lengths = iter(lengths or [])
        self.seen: list[Tensor] = []  # the weights at evaluations
        self._count = 0.0

    def loss(self, batch: Any) -> Tensor:
        points, values = batch
        return (self.module(points)[:, 0] - values).square().mean()

    def evaluate(self, held_out: Any) -> Acceptance:
        self.seen.append(self.module.weight.detach().clone())
        self._count += 1
        return Acceptance(next(self._lengths, self._count), [0.5])

    def save(self, folder: Path) -> None:
        save_file(self.module.state_dict(), folder / FILE)


def points(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 4, generator=generator)
    return x, x.sum(1)


def from_number(
    number: int, wrong: Callable[[int, Any], Any] = lambda n, batch: batch
) -> Iterator[Any]:
    while True:
        yield wrong(number, points(number))
        number += 1


CONFIG = TrainConfig(steps=12, lr=1e-2, warmup=3, ema_decay=0.9, eval_interval=3)


def tiny_eagle() -> tuple[EagleTask, TrainBatches, TrainBatches]:
    torch.manual_seed(1)
    model = zoo.tiny("llama", dtype=torch.float32)
    data = Dataset.of([(p, zoo.reference(model, p, 12)) for p in zoo.ragged_prompts(10)])
    held_out = TrainBatches(data, model, (1, 2), tokens=200)
    batches = TrainBatches(data, model, (1, 2), tokens=80)
    head = new_head(model, torch.arange(zoo.VOCABULARY), aux_layers=(1, 2))
    return EagleTask(head, model, depth=2), batches, held_out


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Weights, averages and history to the bit. It resumes within an epoch, at a checkpoint."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    task, batches, held_out = tiny_eagle()
    assert len(batches) not in (1, 2, 3, 6)
    expected = TrainLoop(task, CONFIG, whole, batches.from_step, held_out)
    expected.run()

    def interrupted(number: int) -> Iterator[Any]:
        for batch, _ in zip(batches.from_step(number), range(7), strict=False):
            yield batch
        raise KeyboardInterrupt

    task, batches, held_out = tiny_eagle()
    with pytest.raises(KeyboardInterrupt):
        TrainLoop(task, CONFIG, part, interrupted, held_out).run()
    task, batches, held_out = tiny_eagle()
    lines: list[str] = []
    found = TrainLoop(task, CONFIG, part, batches.from_step, held_out, log=lines.append)
    found.run(resume=True)
    assert lines[0] == "continuing from step 6"
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        assert torch.equal(ours, theirs)
    for name in ("steps", "losses", "lengths", "by_depth"):
        assert getattr(found.history, name) == getattr(expected.history, name)
    assert found.history.seconds == sorted(found.history.seconds)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (part, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # A finished training does nothing.
    again = TrainLoop(tiny_eagle()[0], CONFIG, part, batches.from_step, held_out)
    assert again.run(resume=True).steps == [3, 6, 9, 12]


def test_two_accumulated_half_batches_equal_one_batch(tmp_path: Path) -> None:
    def halves(number: int) -> Iterator[Any]:
        for x, y in from_number(number // 2):
            yield x[:4], y[:4]
            yield x[4:], y[4:]

    one, two = Line(), Line()
    TrainLoop(one, CONFIG, tmp_path / "one", from_number, ()).run()
    config = replace(CONFIG, accumulate=2)
    TrainLoop(two, config, tmp_path / "two", halves, ()).run()
    assert torch.allclose(one.module.weight, two.module.weight, atol=1e-6)
    histories = [json.loads((tmp_path / n / HISTORY).read_text()) for n in ("one", "two")]
    assert histories[0]["losses"] == pytest.approx(histories[1]["losses"], rel=1e-5)


def nan_at_8(number: int, batch: Any) -> Any:
    return (batch[0], batch[1] * torch.nan) if number == 8 else batch


class Steep(Line):
    """A finite loss whose gradient is not."""

    def loss(self, batch: Any) -> Tensor:
        found = super().loss(batch)
        is_wrong = torch.equal(batch[0], points(8)[0])  # of the last step before an evaluation
        return found + (self.module.weight * 0).sum().sqrt() if is_wrong else found


@pytest.mark.parametrize(("kind", "wrong"), [(Line, nan_at_8), (Steep, lambda n, batch: batch)])
def test_nan_ends_the_training_and_keeps_the_last_good_files(
    kind: type[Line], wrong: Any, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"nan by step 9.*lower --lr.*last good ones"):
        TrainLoop(kind(), CONFIG, tmp_path, lambda n: from_number(n, wrong), ()).run()
    kept = load_file(tmp_path / FILE)
    assert all(value.isfinite().all() for value in kept.values())
    # It can be continued from the last checkpoint.
    task, lines = Line(), list[str]()
    TrainLoop(task, CONFIG, tmp_path, from_number, (), log=lines.append).run(resume=True)
    assert lines[0] == "continuing from step 6"
    assert task.module.weight.isfinite().all()


def test_nan_before_the_first_evaluation_leaves_no_files(tmp_path: Path) -> None:
    wrong = lambda n: from_number(n + 8, nan_at_8)  # noqa: E731
    with pytest.raises(TrainingError) as caught:
        TrainLoop(Line(), CONFIG, tmp_path, wrong, ()).run()
    assert "good ones" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_diverging_loss_ends_the_training(tmp_path: Path) -> None:
    def far(number: int, batch: Any) -> Any:
        return (batch[0], batch[1] + 1e3) if number >= 2 * SETTLED else batch

    config = TrainConfig(steps=4 * SETTLED, lr=1e-2, warmup=3, ema_decay=0.9, eval_interval=50)
    loop = TrainLoop(Line(), config, tmp_path, lambda n: from_number(n, far), ())
    with pytest.raises(TrainingError, match=r"became .*e\+0[56] by step 220 .*it was about"):
        loop.run()
    assert load_file(tmp_path / FILE)["weight"].abs().max() < 10
    assert loop.history.steps[-1] == 2 * SETTLED


def test_it_ends_when_acceptance_stops_rising(tmp_path: Path) -> None:
    config = TrainConfig(steps=100, eval_interval=2, patience=2)
    task, lines = Line([1.0, 3.0, 2.0, 3.5, 3.5, 3.4, 9.0]), list[str]()
    history = TrainLoop(task, config, tmp_path, from_number, (), log=lines.append).run()
    assert history.lengths == [1.0, 3.0, 2.0, 3.5, 3.5, 3.4]
    assert "not risen in 2 evaluations" in lines[-1]
    # The files are those of the best evaluation, not of the last.
    assert torch.equal(load_file(tmp_path / FILE)["weight"], task.seen[3])


def test_evaluations_use_averaged_weights_and_steps_do_not(tmp_path: Path) -> None:
    config = TrainConfig(steps=2, lr=1e-2, warmup=0, ema_decay=0.1, eval_interval=2)
    task = Line()
    start = task.module.weight.detach().clone()
    live: list[Tensor] = []

    def noting(number: int) -> Iterator[Any]:
        for batch in from_number(number):
            live.append(task.module.weight.detach().clone())
            yield batch

    TrainLoop(task, config, tmp_path, noting, ()).run()
    after_one, after_two = live[1], task.module.weight.detach()
    expected = 0.1 * (0.1 * start + 0.9 * after_one) + 0.9 * after_two
    assert torch.allclose(task.seen[0], expected, atol=1e-7)
    assert not torch.allclose(task.seen[0], after_two, atol=1e-5)
    unaveraged = Line()
    TrainLoop(unaveraged, replace(config, ema_decay=0.0), tmp_path / "2", from_number, ()).run()
    assert torch.equal(unaveraged.seen[0], unaveraged.module.weight)
    assert torch.equal(unaveraged.module.weight, after_two)


def test_frozen_weights_are_not_averaged(tmp_path: Path) -> None:
    task = Line()
    bias = task.module.get_parameter("bias").requires_grad_(False)
    loop = TrainLoop(task, CONFIG, tmp_path, from_number, ())
    assert [x.shape for x in loop.averaged.module.parameters()] == [task.module.weight.shape]
    loop.run()
    assert task.module.get_parameter("bias") is bias


def test_a_folder_with_a_training_is_not_overwritten(tmp_path: Path) -> None:
    TrainLoop(Line(), CONFIG, tmp_path, from_number, ()).run()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"training: continue it with --resume"):
        TrainLoop(Line(), CONFIG, tmp_path, from_number, ()).run()
    with pytest.raises(ConfigError, match="not a checkpoint of this training"):
        TrainLoop(Line(width=5), CONFIG, tmp_path, from_number, ()).run(resume=True)
    with pytest.raises(ConfigError, match="a training on other data"):
        TrainLoop(Line(), CONFIG, tmp_path, from_number, (), data_digest="others").run(resume=True)
    (tmp_path / CHECKPOINT).write_bytes(b"no checkpoint at all")
    with pytest.raises(ConfigError, match="not a checkpoint of this training"):
        TrainLoop(Line(), CONFIG, tmp_path, from_number, ()).run(resume=True)
    torch.save({"module": Line().module.state_dict()}, tmp_path / CHECKPOINT)
    with pytest.raises(ConfigError, match="not a checkpoint of this training"):
        TrainLoop(Line(), CONFIG, tmp_path, from_number, ()).run(resume=True)
    assert (tmp_path / FILE).read_bytes() == before


def test_the_learning_rate_warms_up_and_decays_to_its_floor() -> None:
    config = TrainConfig(steps=110, lr=1.0, warmup=10)
    assert config.lr_at(0) == pytest.approx(0.1)
    assert config.lr_at(9) == config.lr_at(10) == pytest.approx(1.0)
    assert config.lr_at(60) == pytest.approx((1 + LR_FLOOR) / 2)
    assert config.lr_at(110) == pytest.approx(LR_FLOOR)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more"),
        ({"accumulate": 0}, "accumulate must be 1 or more"),
        ({"eval_interval": -1}, "eval_interval must be 1 or more"),
        ({"warmup": -1}, "warmup must be 0 or more"),
        ({"patience": -1}, "patience must be 0 or more"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"ema_decay": 1.0}, "ema_decay must be 0 or more and less than 1"),
    ],
)
def test_an_impossible_config_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**given)


def test_the_files_of_a_failed_training_load(tmp_path: Path) -> None:
    """An EAGLE head whose loss became NaN."""
    task, batches, held_out = tiny_eagle()
    lm_head = task.head.lm_head.weight

    def spoilt(number: int) -> Iterator[Any]:
        for at, batch in enumerate(batches.from_step(number), start=number):
            if at == 4:
                lm_head.data.fill_(torch.nan)
            yield batch

    with pytest.raises(TrainingError):
        TrainLoop(task, CONFIG, tmp_path, spoilt, held_out).run()
    head = io.load(tmp_path, zoo.tiny("llama", dtype=torch.float32))
    assert all(value.isfinite().all() for value in head.parameters())
