"""The training loop: what it keeps, where it stops, and that going on is as if it never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
from draftahead.train.blocks import Blocks
from draftahead.train.eagle import EagleTask
from draftahead.train.loop import CHECKPOINT, HISTORY, SETTLED, Acceptance, Loop, Plan
from draftahead.train.texts import Texts

FILE = "weights.safetensors"


class Line:
    """A line through points; what its evaluations find is told beforehand."""

    def __init__(self, lengths: list[float] | None = None, width: int = 4) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Linear(width, 1)
        self._lengths = iter(lengths or [])
        self.seen: list[Tensor] = []  # the weights at evaluations
        self._count = 0.0

    def loss(self, block: Any) -> Tensor:
        points, values = block
        return (self.module(points)[:, 0] - values).square().mean()

    def evaluate(self) -> Acceptance:
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
    number: int, wrong: Callable[[int, Any], Any] = lambda n, block: block
) -> Iterator[Any]:
    while True:
        yield wrong(number, points(number))
        number += 1


PLAN = Plan(steps=12, rate=1e-2, warmup=3, average=0.9, every=3)


def tiny_eagle() -> tuple[EagleTask, Blocks]:
    torch.manual_seed(1)
    model = zoo.tiny("llama", dtype=torch.float32)
    texts = Texts.of([(p, zoo.reference(model, p, 12)) for p in zoo.ragged_prompts(10)])
    held_out = Blocks(texts, model, (1, 2), tokens=200)
    head = new_head(model, torch.arange(zoo.VOCABULARY), depths=(1, 2))
    return EagleTask(head, model, held_out, depth=2), Blocks(texts, model, (1, 2), tokens=80)


def test_going_on_is_as_if_it_never_stopped(tmp_path: Path) -> None:
    """Weights, averages and history to the bit; the blocks go on within an epoch, and the last
    steps before the interruption are done again."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    task, blocks = tiny_eagle()
    assert len(blocks) not in (1, 2, 3, 6)
    expected = Loop(task, PLAN, whole, blocks.from_step)
    expected.run()

    def interrupted(number: int) -> Iterator[Any]:
        for block, _ in zip(blocks.from_step(number), range(7), strict=False):
            yield block
        raise KeyboardInterrupt

    task, blocks = tiny_eagle()
    with pytest.raises(KeyboardInterrupt):
        Loop(task, PLAN, part, interrupted).run()
    task, blocks = tiny_eagle()
    lines: list[str] = []
    found = Loop(task, PLAN, part, blocks.from_step, told=lines.append)
    found.run(resume=True)
    assert lines[0] == "going on from step 6"
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        assert torch.equal(ours, theirs)
    for name in ("steps", "losses", "lengths", "by_depth"):
        assert getattr(found.history, name) == getattr(expected.history, name)
    assert found.history.seconds == sorted(found.history.seconds)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (part, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # And once more: it is done, so nothing happens.
    again = Loop(tiny_eagle()[0], PLAN, part, blocks.from_step)
    assert again.run(resume=True).steps == [3, 6, 9, 12]


def test_two_half_blocks_are_as_one(tmp_path: Path) -> None:
    def halves(number: int) -> Iterator[Any]:
        for x, y in from_number(number // 2):
            yield x[:4], y[:4]
            yield x[4:], y[4:]

    one, two = Line(), Line()
    Loop(one, PLAN, tmp_path / "one", from_number).run()
    plan = Plan(**{**PLAN.__dict__, "accumulate": 2})
    Loop(two, plan, tmp_path / "two", halves).run()
    assert torch.allclose(one.module.weight, two.module.weight, atol=1e-6)
    histories = [json.loads((tmp_path / n / HISTORY).read_text()) for n in ("one", "two")]
    assert histories[0]["losses"] == pytest.approx(histories[1]["losses"], rel=1e-5)


def no_number(number: int, block: Any) -> Any:
    return (block[0], block[1] * torch.nan) if number == 8 else block


class Steep(Line):
    """A finite loss whose gradient is not."""

    def loss(self, block: Any) -> Tensor:
        found = super().loss(block)
        is_wrong = torch.equal(block[0], points(8)[0])  # of the last step before an evaluation
        return found + (self.module.weight * 0).sum().sqrt() if is_wrong else found


@pytest.mark.parametrize(("kind", "wrong"), [(Line, no_number), (Steep, lambda n, block: block)])
def test_no_number_stops_with_the_last_good_files_kept(
    kind: type[Line], wrong: Any, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"nan by step 9.*lower the rate.*last good ones"):
        Loop(kind(), PLAN, tmp_path, lambda n: from_number(n, wrong)).run()
    kept = load_file(tmp_path / FILE)
    assert all(value.isfinite().all() for value in kept.values())
    # What is there can be gone on with, from before it went wrong.
    task, lines = Line(), list[str]()
    Loop(task, PLAN, tmp_path, from_number, told=lines.append).run(resume=True)
    assert lines[0] == "going on from step 6"
    assert task.module.weight.isfinite().all()


def test_nothing_good_is_not_called_kept(tmp_path: Path) -> None:
    wrong = lambda n: from_number(n + 8, no_number)  # noqa: E731
    with pytest.raises(TrainingError) as caught:
        Loop(Line(), PLAN, tmp_path, wrong).run()
    assert "good ones" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_exploding_loss_stops_likewise(tmp_path: Path) -> None:
    def far(number: int, block: Any) -> Any:
        return (block[0], block[1] + 1e3) if number >= 2 * SETTLED else block

    plan = Plan(steps=4 * SETTLED, rate=1e-2, warmup=3, average=0.9, every=50)
    loop = Loop(Line(), plan, tmp_path, lambda n: from_number(n, far))
    with pytest.raises(TrainingError, match=r"became .*e\+0[56] by step 220 .*it was about"):
        loop.run()
    assert load_file(tmp_path / FILE)["weight"].abs().max() < 10
    assert loop.history.steps[-1] == 2 * SETTLED


def test_it_ends_when_acceptance_has_stopped_rising(tmp_path: Path) -> None:
    plan = Plan(steps=100, every=2, patience=2)
    task, lines = Line([1.0, 3.0, 2.0, 3.5, 3.5, 3.4, 9.0]), list[str]()
    history = Loop(task, plan, tmp_path, from_number, told=lines.append).run()
    assert history.lengths == [1.0, 3.0, 2.0, 3.5, 3.5, 3.4]
    assert "not risen 2 times" in lines[-1]
    # The files are those of the best, not of the last.
    assert torch.equal(load_file(tmp_path / FILE)["weight"], task.seen[3])


def test_evaluations_see_averages_and_training_goes_on_without_them(tmp_path: Path) -> None:
    plan = Plan(steps=2, rate=1e-2, warmup=0, average=0.1, every=2)
    task = Line()
    start = task.module.weight.detach().clone()
    live: list[Tensor] = []

    def noting(number: int) -> Iterator[Any]:
        for block in from_number(number):
            live.append(task.module.weight.detach().clone())
            yield block

    Loop(task, plan, tmp_path, noting).run()
    after_one, after_two = live[1], task.module.weight.detach()
    expected = 0.1 * (0.1 * start + 0.9 * after_one) + 0.9 * after_two
    assert torch.allclose(task.seen[0], expected, atol=1e-7)
    assert not torch.allclose(task.seen[0], after_two, atol=1e-5)
    unaveraged = Line()
    Loop(unaveraged, Plan(**{**plan.__dict__, "average": 0.0}), tmp_path / "2", from_number).run()
    assert torch.equal(unaveraged.seen[0], unaveraged.module.weight)
    assert torch.equal(unaveraged.module.weight, after_two)


def test_a_folder_with_a_training_is_not_written_over(tmp_path: Path) -> None:
    Loop(Line(), PLAN, tmp_path, from_number).run()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"training that was begun: go on with --resume"):
        Loop(Line(), PLAN, tmp_path, from_number).run()
    with pytest.raises(ConfigError, match="no checkpoint of such a training"):
        Loop(Line(width=5), PLAN, tmp_path, from_number).run(resume=True)
    with pytest.raises(ConfigError, match="a training on other texts"):
        Loop(Line(), PLAN, tmp_path, from_number, about="others").run(resume=True)
    (tmp_path / CHECKPOINT).write_bytes(b"no checkpoint at all")
    with pytest.raises(ConfigError, match="no checkpoint of such a training"):
        Loop(Line(), PLAN, tmp_path, from_number).run(resume=True)
    torch.save({"module": Line().module.state_dict()}, tmp_path / CHECKPOINT)
    with pytest.raises(ConfigError, match="no checkpoint of such a training"):
        Loop(Line(), PLAN, tmp_path, from_number).run(resume=True)
    assert (tmp_path / FILE).read_bytes() == before


def test_the_rate_warms_up_and_falls_to_its_floor() -> None:
    plan = Plan(steps=110, rate=1.0, warmup=10, floor=0.1)
    assert plan.rate_at(0) == pytest.approx(0.1)
    assert plan.rate_at(9) == plan.rate_at(10) == pytest.approx(1.0)
    assert plan.rate_at(60) == pytest.approx(0.55)
    assert plan.rate_at(110) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more"),
        ({"accumulate": 0}, "accumulate must be 1 or more"),
        ({"every": -1}, "every must be 1 or more"),
        ({"warmup": -1}, "warmup must be 0 or more"),
        ({"patience": -1}, "patience must be 0 or more"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"rate": float("nan")}, "rate must be above 0"),
        ({"average": 1.0}, "average must be 0 up to less than 1"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**given)


def test_a_head_whose_training_failed_drafts(tmp_path: Path) -> None:
    """The files of a real head, after its loss went wrong."""
    task, blocks = tiny_eagle()
    rows = task.head.lm_head.weight

    def spoilt(number: int) -> Iterator[Any]:
        for at, block in enumerate(blocks.from_step(number), start=number):
            if at == 4:
                rows.data.fill_(torch.nan)
            yield block

    with pytest.raises(TrainingError):
        Loop(task, PLAN, tmp_path, spoilt).run()
    head = io.load(tmp_path, zoo.tiny("llama", dtype=torch.float32))
    assert all(value.isfinite().all() for value in head.parameters())
