"""An interrupt (Ctrl-C) of one request does not change the texts of the others."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest

import zoo
from draftahead import LLM, SamplingParams
from draftahead.core.detokenizer import Detokenizer
from draftahead.core.types import SequenceState
from draftahead.kv.cache import KVCache
from drafted import add_request

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = zoo.ragged_prompts(3)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


def interrupt_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, before: bool, calls: int = 0
) -> None:
    """One call of a method, after so many others, is interrupted before or after its work."""
    method: Callable[..., Any] = getattr(owner, name)
    left = iter(range(calls))

    def interrupted(*args: Any) -> Any:
        if next(left, None) is not None:
            return method(*args)
        monkeypatch.setattr(owner, name, method)
        if not before:
            method(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def finished(llm: LLM, sequence: SequenceState) -> SequenceState:
    while sequence.finish_reason is None:
        llm.engine.step()
    return sequence


@pytest.mark.parametrize("before", [True, False])
def test_a_slot_that_is_freed(target: Any, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sequence moves into it, with its KV entries or without."""
    llm = LLM(target, "none", max_batch=2)
    short, long = sorted(PROMPTS[:2], key=len)
    dropped, other = add_request(llm, long, GREEDY), add_request(llm, short, GREEDY)
    llm.engine.step()
    interrupt_once(monkeypatch, KVCache, "swap_slots", before=before)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.release(dropped)
    assert llm.engine.scheduler.running == [other]
    assert finished(llm, other).output == zoo.reference(target, short, 12)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("method", "calls"), [("push", 0), ("push", 1), ("push", 9), ("flush", 0)])
def test_tokens_that_are_appended(
    target: Any, method: str, calls: int, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is done again: no token is lost, and none comes twice."""
    llm = LLM(target, "lookup", max_batch=2)
    llm.engine.decode = lambda ids: "".join(chr(48 + token) for token in ids)
    pair = [add_request(llm, prompt, GREEDY) for prompt in PROMPTS[:2]]
    interrupt_once(monkeypatch, Detokenizer, method, before=before, calls=calls)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(12):
            llm.engine.step()
    for sequence, prompt in zip(pair, PROMPTS, strict=False):
        finished(llm, sequence)
        assert sequence.output == zoo.reference(target, prompt, 12)
        assert len(sequence.drafted) == 12
        assert sequence.detokenizer.text == llm.engine.decode(sequence.output)


def test_a_sequence_that_has_ended_is_not_continued(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt came after its last token, before its slot was freed."""
    llm = LLM(target, "none", max_batch=2)
    short = SamplingParams(temperature=0, max_tokens=2)
    ended, other = add_request(llm, PROMPTS[0], short), add_request(llm, PROMPTS[1], GREEDY)
    llm.engine.step()
    interrupt_once(monkeypatch, type(llm.engine), "release", before=True)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    assert finished(llm, other).output == zoo.reference(target, PROMPTS[1], 12)
    assert ended.output == zoo.reference(target, PROMPTS[0], 2)
    assert ended.finish_reason == "length"
    assert not llm.engine.scheduler.running


class Interrupting(collections.deque[SequenceState]):
    """An interrupt comes just before or just after a sequence is taken out."""

    before: bool

    def popleft(self) -> SequenceState:
        if not self.before:
            super().popleft()
        raise KeyboardInterrupt


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_sequence_that_is_admitted(target: Any, before: bool, given_up: bool) -> None:
    """It is neither lost nor admitted twice."""
    llm = LLM(target, "none", max_batch=2)
    scheduler = llm.engine.scheduler
    first, other = (add_request(llm, prompt, GREEDY) for prompt in PROMPTS[:2])
    scheduler.waiting = Interrupting(scheduler.waiting)
    scheduler.waiting.before = before
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    scheduler.waiting = collections.deque(scheduler.waiting)
    assert first in scheduler.running
    if given_up:
        llm.engine.release(first)
        assert first not in [*scheduler.running, *scheduler.waiting]
    else:
        assert finished(llm, first).output == zoo.reference(target, PROMPTS[0], 12)
    assert finished(llm, other).output == zoo.reference(target, PROMPTS[1], 12)
    assert not scheduler.running


def test_only_missing_entries_are_computed_again(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(target, "none")
    sequence = add_request(llm, PROMPTS[0], GREEDY)
    for _ in range(4):
        llm.engine.step()
    runner, computed = llm.engine.verifier.runner, []
    forward = runner.forward

    def counted(tokens: Any, **options: Any) -> Any:
        computed.append(tokens.shape[1])
        return forward(tokens, **options)

    monkeypatch.setattr(runner, "forward", counted)
    del runner.cache.tokens_in[0][-3:]
    llm.engine.step()
    assert computed == [3, 1]
    assert finished(llm, sequence).output == zoo.reference(target, PROMPTS[0], 12)
