"""What is recorded on a GPU beside passes, without one: prompts, a head's pairs, and its times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from draftahead.backends.cuda.hf_graph import GraphedPrefill
from draftahead.backends.cuda.timing import NOW_AND_THEN, TimerCache
from draftahead.core.stats import CompileTime
from draftahead.drafters.eagle.head import new_head
from draftahead.drafters.eagle.runner import EagleRunner
from draftahead.models.runner import ModelRunner
from test_eagle import wide


class AtOnce:
    """Recordings that are none: every pass is done as it comes."""

    works = True

    def __init__(self, *_: Any) -> None:
        self.runs: list[Any] = []

    def forget(self) -> None:
        self.runs.clear()

    def run(self, key: Any, body: Any, make: Any, write: Any) -> Any:
        self.runs.append(key)
        inputs = make()
        write(inputs)
        inputs.fetch()
        return body(inputs)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.GraphPool", AtOnce)
    monkeypatch.setattr("draftahead.backends.cuda.hf_graph.FEWEST", 4)


@pytest.mark.usefixtures("at_once")
def test_a_prompt_filled_by_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second of about its length on; behind what the row holds, with its states."""
    monkeypatch.setattr("draftahead.models.runner.PREFILL_CHUNK", 16)
    target, both = zoo.tiny("llama"), []
    for recorded in (False, True):
        passes = ModelRunner(target, max_batch=3, max_context=90, scratch_entries=64)
        passes._decoder = None  # its kernels would do it by themselves
        passes._fill = GraphedPrefill("it", passes._forward, passes.cache) if recorded else None
        passes.capture_hidden((1, 2))
        runs = []
        for row, length in ((0, 5), (1, 37), (2, 39), (0, 60), (1, 88)):
            passes.prefill(row, [(7 * row + 3 * i) % zoo.VOCABULARY for i in range(length)])
            runs.append(len(passes._fill.graphs.runs) if passes._fill else 0)  # type: ignore[attr-defined]
        assert not recorded or 0 == runs[0] < runs[2] < runs[4]
        both.append(passes.cache)
    for row, held in enumerate(both[0].tokens_in):
        assert held == both[1].tokens_in[row]
        tensors = zip(both[0].stored(), both[1].stored(), strict=True)
        for eager, filled in tensors:
            part = (slice(None), row, slice(None), slice(len(held)))
            assert torch.allclose(eager[part], filled[part], atol=1e-6)
            assert eager[part].abs().sum() > 0


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.usefixtures("at_once")
@torch.inference_mode()
def test_pairs_filled_by_a_recording(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a head that reads a prompt's pairs; also when the states move elsewhere."""
    monkeypatch.setattr("draftahead.drafters.eagle.runner.PREFILL_CHUNK", 16)
    monkeypatch.setattr("draftahead.backends.cpu.build.library", lambda: None)
    model = wide()
    head = new_head(model, torch.arange(zoo.VOCABULARY), depths=(1, 3), layers=layers)
    both = []
    for recorded in (False, True):
        target = ModelRunner(model, max_batch=2, max_context=90, scratch_entries=64)
        target.capture_hidden((1, 3))
        passes = EagleRunner(head, target, 2, 8)
        fill = GraphedPrefill("it", passes._fill_pass, passes.cache) if recorded else None
        passes._fill = fill
        for turn, (row, length) in enumerate(((0, 21), (1, 40), (0, 77))):
            tokens = [(7 * row + 3 * i) % zoo.VOCABULARY for i in range(length)]
            target.prefill(row, tokens)
            passes._read(row, tokens)
            assert len(passes.cache.tokens_in[row]) == length - 2
            if fill is not None:
                runs: Any = fill.graphs
                assert len(runs.runs) == (0, 2, 6)[turn]  # a size is run as it is at first
        both.append(passes.cache)
        target.capture_hidden((1, 2, 3))
        target.prefill(0, tokens)
        passes.cache.tokens_in[0].clear()
        passes._read(0, tokens)
        assert not recorded or len(runs.runs) == 5  # of those before, none is good any more
    for row, held in enumerate(both[0].tokens_in):
        assert held == both[1].tokens_in[row]
        for eager, filled in zip(both[0].stored(), both[1].stored(), strict=True):
            part = (slice(None), row, slice(None), slice(len(held)))
            assert torch.allclose(eager[part], filled[part], atol=1e-5)


@pytest.mark.usefixtures("at_once")
@torch.inference_mode()
def test_padding_of_pairs_may_reach_beyond_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's cache may be the longer one."""
    monkeypatch.setattr("draftahead.drafters.eagle.runner.PREFILL_CHUNK", 64)
    monkeypatch.setattr("draftahead.backends.cpu.build.library", lambda: None)
    model, keys = wide(), []
    head = new_head(model, torch.arange(zoo.VOCABULARY), depths=(1, 3))
    tokens = [(3 * i) % zoo.VOCABULARY for i in range(88)]
    for _ in range(2):
        target = ModelRunner(model, max_batch=1, max_context=90, scratch_entries=4)
        target.capture_hidden((1, 3))
        target.prefill(0, tokens)
        passes = EagleRunner(head, target, 1, 60)
        passes._fill = GraphedPrefill("it", passes._fill_pass, passes.cache)
        for _ in range(1 + len(keys)):  # the second time as it would be recorded
            passes.cache.tokens_in[0].clear()
            passes._read(0, tokens)
        assert len(passes._fill.graphs.runs) == 2 * len(keys)  # type: ignore[attr-defined]
        keys.append(passes.cache.keys[0][0, :, :86].clone())
    assert torch.allclose(*keys, atol=1e-5)


class Event:
    """A device's clock, that the test turns on."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        made.append(self)

    def record(self, stream: Any) -> None:
        assert stream == "the stream of cuda:7"
        self.at = Event.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


made: list[Event] = []


def test_what_always_takes_as_long_is_timed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks take the host some time: at first, every so often, and never with events made anew."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    times, found = TimerCache(torch.device("cuda:7")), []
    for use in range(1, 34):
        clock = times.clock("a kind")
        for spent in (0.0, use, 10.0):
            Event.now += spent
            clock.mark()
        found.append([round(1e3 * lap) for lap in clock.laps()])
        assert clock.laps() == clock.laps()
    firsts = [lap for lap, after in found]
    assert firsts == [1, 2, 3, 4, *[4] * 11, *[16] * 16, *[32] * 2]
    assert all(after == 10 for _, after in found)
    assert len(made) == 3
    for spent, known in (((5.0, 1.0), 3), ((2.0,), 3), ((5.0, 1.0), 5)):
        for _ in range(NOW_AND_THEN):
            clock = times.clock("a kind")
            clock.mark()
            for more in spent:
                Event.now += more
                if known == 3 and len(spent) == 2:  # recorded meanwhile: it tells nothing
                    monkeypatch.setattr(CompileTime, "seconds", CompileTime.seconds + 1.0)
                clock.mark()
            clock.laps()
        assert (round(1e3 * times.clock("a kind").laps()[0]) == 5) == (known == 5)
    assert times.clock("another").laps() == []  # not known yet, and not measured
