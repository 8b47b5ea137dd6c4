"""One LLM in many threads: each text is the one that its request has alone."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zoo
from draftahead import LLM, DraftaheadError, SamplingParams
from draftahead.errors import ConfigError
from drafted import GarbageTree, other

TIMEOUT = 120  # seconds; only against hanging
PROMPTS = zoo.ragged_prompts(6)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=9),
    SamplingParams(temperature=1, repetition_penalty=1.3, seed=6, max_tokens=14, logprobs=1),
]


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.tiny("llama")


@pytest.fixture(scope="module")
def expected(target: Any) -> list[list[list[int]]]:
    """Of each prompt with each of PARAMS, alone in an LLM without drafter."""
    llm = LLM(target, "none", max_batch=1)
    return [[llm.generate(p, params)[0].token_ids for params in PARAMS] for p in PROMPTS]


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Raises what one of the threads raised; none may hang."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, number) for number in range(count)]:
            future.result(TIMEOUT)


class Requests:
    """Requests of one thread, of every kind, in an order of its own."""

    def __init__(self, llm: LLM, expected: list[list[list[int]]], seed: int) -> None:
        self.llm, self.expected, self.random = llm, expected, random.Random(seed)

    def one(self) -> None:
        kind = self.random.choice([self.generate, self.generate_many, self.stream, self.cancel])
        kind(self.random.randrange(len(PROMPTS)), self.random.randrange(len(PARAMS)))

    def generate(self, prompt: int, params: int) -> None:
        out = self.llm.generate(PROMPTS[prompt], PARAMS[params])[0]
        assert out.token_ids == self.expected[prompt][params]

    def generate_many(self, prompt: int, params: int) -> None:
        """With a request among them that is refused."""
        several = [PROMPTS[prompt], [], PROMPTS[0], PROMPTS[-1]]
        outs = self.llm.generate(several, PARAMS[params], errors="return")
        assert [out.error is None for out in outs] == [True, False, True, True]
        found = [out.token_ids for out in outs if out.error is None]
        assert found == [self.expected[p][params] for p in (prompt, 0, len(PROMPTS) - 1)]

    def stream(self, prompt: int, params: int) -> None:
        reuse = self.random.random() < 0.5
        chunks = list(self.llm.stream(PROMPTS[prompt], PARAMS[params], reuse=reuse))
        assert [i for chunk in chunks for i in chunk.token_ids] == self.expected[prompt][params]

    def cancel(self, prompt: int, params: int) -> None:
        stream = self.llm.stream(PROMPTS[prompt], PARAMS[params])
        found = [token for _ in range(2) for token in next(stream).token_ids]
        assert found == self.expected[prompt][params][: len(found)]
        if self.random.random() < 0.5:
            stream.close()
        else:
            del stream
            gc.collect()


DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda target: "none",
    "suffix": lambda target: "suffix",
    "draft_model": lambda target: {"method": "draft_model", "model": other(target)},
    "garbage": lambda target: GarbageTree(),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("each", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_texts_are_those_of_requests_alone(
    target: Any, expected: list[list[list[int]]], drafter: str, each: int
) -> None:
    llm = LLM(target, DRAFTERS[drafter](target), max_batch=3)

    def work(number: int) -> None:
        requests = Requests(llm, expected, seed=number)
        for _ in range(each):
            requests.one()

    in_threads(work, 8)
    scheduler = llm.engine.scheduler
    llm.explain()  # does what dropped streams left to do
    assert not scheduler.running
    assert not scheduler.waiting


def test_engines_over_one_model(target: Any, expected: list[list[list[int]]]) -> None:
    """One is built while others run. The model is given back as it was."""
    before = target.config._attn_implementation
    running = LLM(target, "none", max_batch=2)

    def work(number: int) -> None:
        for _ in range(3):
            llm = LLM(target, "lookup", max_batch=2) if number % 2 else running
            Requests(llm, expected, seed=number).generate_many(number % len(PROMPTS), 0)

    in_threads(work, 4)
    assert target.config._attn_implementation == before
    assert not any("forward" in vars(module) for module in target.modules())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_that_its_owner_runs_meanwhile(implementation: str) -> None:
    """In a thread of the owner's, it is the model it was: neither attention nor layers of ours."""
    target = zoo.tiny("llama")
    target.set_attn_implementation(implementation)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        alone = target(ids).logits
    stop = threading.Event()

    def ours() -> None:
        llm = LLM(target, {"method": "early_exit", "layers": 1, "num_speculative_tokens": 2})
        while not stop.is_set():
            llm.generate(PROMPTS[:2], GREEDY)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ours)
        try:
            for _ in range(150):
                with torch.inference_mode():
                    assert torch.equal(target(ids).logits, alone)
        finally:
            stop.set()
        running.result(TIMEOUT)


@pytest.fixture
def stalled(target: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, Any, Any]]:
    """An LLM whose next step begins, says so, and waits for permission."""
    llm = LLM(target, "none", max_batch=2)
    begun, go_on = threading.Event(), threading.Event()
    step = llm.engine.step

    def slow() -> Any:
        begun.set()
        assert go_on.wait(TIMEOUT)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow)
    yield llm, begun, go_on
    go_on.set()


def test_a_thread_whose_request_is_done_does_not_wait_for_others(
    stalled: Any, expected: list[list[list[int]]]
) -> None:
    """The other thread leads, and has much more to generate."""
    llm, begun, go_on = stalled
    long = SamplingParams(temperature=0, max_tokens=40)
    with ThreadPoolExecutor(2) as pool:
        leads = pool.submit(llm.generate, PROMPTS[1], long)
        assert begun.wait(TIMEOUT)
        follows = pool.submit(llm.generate, PROMPTS[0], GREEDY)
        go_on.set()
        assert follows.result(TIMEOUT)[0].token_ids == expected[0][0]
        assert len(leads.result(TIMEOUT)[0].token_ids) == 40


def test_the_lead_is_handed_on_if_a_step_fails(
    target: Any, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that led gets the error; the other one's request goes on."""
    llm = LLM(target, "none", max_batch=2)
    begun, go_on = threading.Event(), threading.Event()
    step, failures = llm.engine.step, iter([True])

    def fails() -> Any:
        if next(failures, False):
            begun.set()
            assert go_on.wait(TIMEOUT)
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(llm.engine, "step", fails)
    with ThreadPoolExecutor(2) as pool:
        leads = pool.submit(llm.generate, PROMPTS[1], GREEDY)
        assert begun.wait(TIMEOUT)
        follows = pool.submit(llm.generate, PROMPTS[0], GREEDY)
        while len(llm._shared._waiters) < 2:
            time.sleep(0.001)
        go_on.set()
        with pytest.raises(RuntimeError, match="out of memory"):
            leads.result(TIMEOUT)
        assert follows.result(TIMEOUT)[0].token_ids == expected[0][0]
    assert not llm.engine.scheduler.running


def test_an_error_of_a_waiting_thread_is_its_own(
    stalled: Any, expected: list[list[list[int]]]
) -> None:
    """What it waits for is looked up by the thread that leads: text of a tokenizer, for example."""
    llm, begun, go_on = stalled

    def fails() -> bool:
        raise ZeroDivisionError

    with ThreadPoolExecutor(2) as pool:
        leads = pool.submit(llm.generate, PROMPTS[0], GREEDY)
        assert begun.wait(TIMEOUT)
        follows = pool.submit(llm._shared.run_until, fails)
        while len(llm._shared._waiters) < 2:
            time.sleep(0.001)
        go_on.set()
        with pytest.raises(ZeroDivisionError):
            follows.result(TIMEOUT)
        assert leads.result(TIMEOUT)[0].token_ids == expected[0][0]


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupted_task_is_done_again(
    target: Any, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Interrupted before or after it was done: no request of another thread is lost, or twice."""
    llm = LLM(target, "none", max_batch=1)
    add, interrupts = llm.engine.scheduler.add, iter([True])

    def interrupted(sequences: Any) -> None:
        is_first = next(interrupts, False)
        if not (is_first and before):
            add(sequences)
        if is_first:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.scheduler, "add", interrupted)
    ((theirs,),) = llm._shared.add([llm._inputs.request(PROMPTS[1], GREEDY)])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], GREEDY)
    while theirs.finish_reason is None:
        assert llm.engine.step()
    assert theirs.output == expected[1][0]
    assert not llm.engine.scheduler.waiting
    assert not llm.engine.scheduler.running


def test_close_ends_waits(stalled: Any) -> None:
    llm, begun, go_on = stalled
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(llm.generate, PROMPTS[0], GREEDY)]
        assert begun.wait(TIMEOUT)
        waits.append(pool.submit(llm.generate, PROMPTS[1], GREEDY))
        closing = pool.submit(llm.close)
        while len(llm._shared._waiters) < 3:
            time.sleep(0.001)
        go_on.set()
        closing.result(TIMEOUT)
        for wait in waits:
            with pytest.raises(ConfigError, match="was closed"):
                wait.result(TIMEOUT)


def test_a_closed_llm(target: Any) -> None:
    with LLM(target, "none") as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
    llm.close()
    stream.close()
    assert repr(llm) == "LLM(closed)"
    calls: list[Callable[[], object]] = [
        lambda: llm.generate(PROMPTS[0]),
        lambda: list(llm.stream(PROMPTS[0])),
        lambda: llm.encode(PROMPTS[0]),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.with_drafter("none"),
        llm.describe,
        llm.explain,
    ]
    for call in calls:
        with pytest.raises(DraftaheadError, match="was closed"):
            call()


def test_a_call_from_within_a_step(target: Any) -> None:
    """It would wait for itself."""

    class Calls(GarbageTree):
        def propose(self, batch: Any) -> Any:
            with pytest.raises(ConfigError, match="in the middle of its own step"):
                llm.generate(PROMPTS[0])
            calls.append(batch)
            return super().propose(batch)

    calls: list[Any] = []
    llm = LLM(target, Calls())
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == 12
    assert calls


def test_a_stream_that_is_closed_within_a_step(
    target: Any, expected: list[list[list[int]]]
) -> None:
    """As the garbage collector may do: its slot is freed behind the step, and nothing is raised."""

    class Closes(GarbageTree):
        def propose(self, batch: Any) -> Any:
            if len(batch.sequences) == 2:
                dropped.close()
            return super().propose(batch)

    llm = LLM(target, Closes(), max_batch=2)
    dropped = llm.stream(PROMPTS[1], GREEDY)
    next(dropped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what a drafter raises becomes a warning
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected[0][0]
    assert not llm.engine.scheduler.running


def test_an_llm_that_is_dropped_is_freed(target: Any) -> None:
    """At once, without the garbage collector: its KV cache may be large."""
    llm = LLM(target, "suffix")
    llm.generate(PROMPTS[0], GREEDY)
    engine = weakref.ref(llm.engine)
    gc.disable()
    try:
        del llm
        assert engine() is None
    finally:
        gc.enable()
