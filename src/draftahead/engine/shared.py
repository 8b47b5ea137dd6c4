"""One engine for many threads.

Only one thread at a time touches the engine: the leader, which is one of the threads that wait for
requests. It runs steps, and they advance the requests of all threads. When its own are done, the
thread that has waited longest leads. So with a single thread nothing changes threads, and an
interrupt (Ctrl-C) stops the step that it meets.

What other threads want done to the engine is queued, and the leader does it between two steps. The
lock protects `_waiters` and `_leader` alone; it is not held during a step. It may be taken twice by
one thread: the garbage collector may close a stream anywhere.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from draftahead.backends.cpu.threads import torch_single_threaded
from draftahead.core.types import Request, SequenceState
from draftahead.engine.engine import Engine
from draftahead.errors import ConfigError

Result = TypeVar("Result")


class _Waiter:
    """A thread that waits until something holds."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self.thread = threading.get_ident()
        self.done = False
        self.error: BaseException | None = None
        self._is_done = is_done
        # A plain lock, taken while it sleeps: a threading.Event has Python code inside, in which
        # the garbage collector may run, and wake this very thread.
        self._asleep = _thread.allocate_lock()
        self._asleep.acquire()

    def check(self) -> bool:
        """By the leader, between two steps."""
        try:
            self.done = self._is_done()
        except Exception as error:  # of this thread's request: not for the leader
            self.error, self.done = error, True
        return self.done

    def sleep(self) -> None:
        self._asleep.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._asleep.release()


class SharedEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._tasks: deque[Callable[[], object]] = deque()  # for the leader, in order
        self._lock = threading.RLock()
        self._waiters: list[_Waiter] = []  # by age
        self._leader: _Waiter | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("this LLM was closed: make another one")
        return self._engine

    @property
    def closed(self) -> bool:
        return self._engine is None

    def check_open(self) -> None:
        assert self.engine

    def add(self, requests: Iterable[Request]) -> list[list[SequenceState]]:
        """Queues requests, to be admitted together; the sequences of each."""
        engine = self.engine
        groups = [engine.new_sequences(request) for request in requests]
        added = [sequence for group in groups for sequence in group]
        self._tasks.append(partial(engine.scheduler.add, added))
        return groups

    def release(self, sequences: Iterable[SequenceState]) -> None:
        """Frees what sequences hold, before the next step. Never waits for a step to end: it may
        run in the middle of one, by the garbage collector."""
        if (engine := self._engine) is None:
            return
        self._tasks.extend([partial(engine.release, sequence) for sequence in sequences])
        if self._leader is None:
            self.run_until(lambda: True)

    def between_steps(self, function: Callable[[], Result]) -> Result:
        """Calls a function while no step runs."""
        found: list[Result] = []

        def call() -> bool:
            found.append(function())
            return True

        self.run_until(call)
        return found[0]

    def close(self) -> None:
        """Drops the engine. Threads that wait get an error, each when it is its turn to lead."""

        def drop() -> None:
            self._engine = None

        self.between_steps(drop)

    # --------------------------------------------------------------------------------- the lead

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Returns once `is_done` holds, which the leader calls between steps."""
        waiter, leader = _Waiter(is_done), self._leader
        if leader is not None and leader.thread == waiter.thread:
            raise ConfigError(
                "this LLM was called in the middle of its own step, by a logits processor or a "
                "drafter: use another LLM there (with_drafter gives one with the same weights)"
            )
        try:
            with self._lock:
                self._waiters.append(waiter)
            while not waiter.done:
                with self._lock:
                    if self._leader is None:
                        self._leader = waiter
                    is_leader = self._leader is waiter
                if is_leader:
                    self._lead(waiter)
                else:
                    waiter.sleep()
        finally:
            self._leave(waiter)
        if waiter.error is not None:
            raise waiter.error

    def _lead(self, leader: _Waiter) -> None:
        """Runs steps until the leader's own wait is over."""
        self._do_tasks()
        while not leader.check():
            with torch_single_threaded():
                self.engine.step()
            self._do_tasks()
            for waiter in list(self._waiters):
                if waiter is not leader and not waiter.done and waiter.check():
                    waiter.wake()

    def _do_tasks(self) -> None:
        """A task that is interrupted stays in the queue, so each can be done twice."""
        while self._tasks:
            try:
                self._tasks[0]()
            except Exception:
                self._tasks.popleft()
                raise
            self._tasks.popleft()

    def _leave(self, waiter: _Waiter) -> None:
        """Ends a wait, also an interrupted one, and hands the lead on."""
        with self._lock:
            with suppress(ValueError):
                self._waiters.remove(waiter)
            if self._leader is waiter:
                self._leader = None
            if self._leader is None and self._waiters:
                self._waiters[0].wake()
