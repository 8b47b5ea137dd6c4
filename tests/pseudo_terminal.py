"""A process in a terminal of its own, as a user drives it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

CTRL_C, CTRL_D, UP, LEFT = "\x03", "\x04", "\x1b[A", "\x1b[D"


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self.unread = process, master, ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """What is shown up to the next match, and the match."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.unread)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.unread!r}"
            self._read()
        shown, self.unread = self.unread[: found.end()], self.unread[found.end() :]
        return shown

    def interrupt_until(self, pattern: str) -> None:
        """Ctrl-C, again if it is lost: one that comes as a line editor begins to wait for a key
        is noticed with the next key only."""
        for _ in range(10):
            self.type(CTRL_C)
            try:
                self.wait_for(pattern, seconds=5)
            except AssertionError:
                continue
            return
        self.wait_for(pattern)

    def exit_code(self, seconds: float = 60) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self._read()  # a terminal that is full stops the process
        return self.process.wait(timeout=1)

    def _read(self) -> None:
        if select.select([self._master], [], [], 0.1)[0]:
            try:
                self.unread += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the process has ended
                assert self.process.wait(timeout=30) is not None
                time.sleep(0.05)


@contextmanager
def in_terminal(program: str, *arguments: str, **environment: str) -> Iterator[Terminal]:
    """Runs Python code with these arguments."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 80))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # its Ctrl-C is a signal
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
