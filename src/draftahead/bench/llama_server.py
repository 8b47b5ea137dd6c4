"""A llama-server (llama.cpp's, or one with its options) as a child process: started, asked, always
killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftahead.bench.configurations import Outcome
from draftahead.core.sampling_params import SamplingParams
from draftahead.core.stats import Stats
from draftahead.errors import OtherEngineError

HOST = "127.0.0.1"
# A server that is silent for longer is given up. Less would give up large models on slow disks,
# more would make a server that hangs cost that much more of the user's time.
START_SECONDS = 300.0
ANSWER_SECONDS = 1800.0  # the same for one completion
POLL_SECONDS = 0.02  # between two looks at a server that starts
WARM_UP_TOKENS = 8  # read, and half as many generated, before a repetition
SHOWN_OF_LOG = 300  # characters of a server's last words in an error
CHILD = Path(__file__).with_name("child.py")


class LlamaServer:
    """A configuration that is a command of a server, without host and port.

    Every repetition gets a new server. Drafting from n-grams, suffixes and even with a draft model
    remembers earlier texts in some servers: a repetition would draft the text of the one before. It
    is also the simplest way to have nothing else in memory, and no other threads that spin.
    """

    batch = 1

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        engine: str,
        reference: str | None,
        start_seconds: float = START_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.name, self.command, self.engine, self.reference = name, command, engine, reference
        self._start_seconds, self._answer_seconds = start_seconds, answer_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._port = 0

    @contextmanager
    def running(self) -> Iterator[list[int]]:
        """The server, ready; killed at the end, however that comes."""
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
            self._log, self._port = Path(log.name), _free_port()
            command = [*self.command, "--host", HOST, "--port", str(self._port)]
            try:
                # In a session of its own Ctrl-C does not reach it: it is killed below.
                self._process = subprocess.Popen(
                    _dies_with_us(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise OtherEngineError(
                    f"{self.name}: cannot run {self.command[0]}: {error.strerror}"
                ) from None
            try:
                self._wait_until_ready()
                yield [self._process.pid]
            finally:
                _kill(self._process)
                self._process = self._log = None

    def warm_up(self, prompt: Sequence[int]) -> None:
        """A first request: buffers are allocated. Its tokens are turned round, so that what it
        leaves behind says nothing about the prompt."""
        self._complete(prompt[:WARM_UP_TOKENS][::-1], SamplingParams(max_tokens=4, temperature=0))

    def run(self, prompts: Sequence[list[int]], params: SamplingParams) -> Outcome:
        total, texts, start = Stats(), [], time.perf_counter()
        for prompt in prompts:
            answer = self._complete(prompt, params)
            stats, text = self._read(answer, prompt)
            total.add(stats)
            texts.append(text)
        seconds = time.perf_counter() - start
        return Outcome(seconds, total.tokens, texts, total, prefill_tokens=len(texts))

    # ------------------------------------------------------------------------------- requests

    def _complete(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        request = {
            "prompt": list(prompt),
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed or 0,
            "cache_prompt": False,
            "return_tokens": True,
            "top_k": 0,  # this and the next two: its own defaults cut the distribution
            "top_p": 1.0,
            "min_p": 0.0,
        }
        try:
            status, content = self._ask("POST", "/completion", request, self._answer_seconds)
        except TimeoutError:
            message = f"{self.name} gave no answer in {self._answer_seconds:g} s"
            raise OtherEngineError(message + self._last_words()) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._ended(f"answering ({type(error).__name__})") from None
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != http.client.OK or not isinstance(answer, dict):
            shown = content.decode("utf-8", "replace")[:SHOWN_OF_LOG]
            raise OtherEngineError(f"{self.name} refused a prompt, status {status}: {shown!r}")
        return answer

    def _read(self, answer: dict[str, Any], prompt: list[int]) -> tuple[Stats, list[int] | str]:
        """Counts and seconds of an answer, and its text: token ids if the server gives them."""
        try:
            timings, text = answer["timings"], answer.get("tokens") or str(answer["content"])
            read, generated = int(answer["tokens_evaluated"]), int(timings["predicted_n"])
            fresh = int(timings["prompt_n"])
            accepted = int(timings.get("draft_n_accepted") or 0)
            prefill, decoding = (float(timings[f"{part}_ms"]) for part in ("prompt", "predicted"))
        except (KeyError, TypeError, ValueError) as error:
            raise OtherEngineError(
                f"{self.name} answered what is no completion of a llama-server: "
                f"{type(error).__name__} {error}"
            ) from None
        if not len(prompt) == read == fresh:
            raise OtherEngineError(
                f"{self.name} read {fresh} of {read} tokens where the prompt has {len(prompt)}: it "
                "cannot be compared"
            )
        stats = Stats(
            prompt_tokens=read,
            tokens=generated,
            steps=max(generated - accepted, 1),  # each step gives a token of the target's own
            drafted=int(timings.get("draft_n") or 0),
            accepted=accepted,
            prefill_seconds=prefill / 1e3,
            verify_seconds=decoding / 1e3,
        )
        return stats, text

    def _ask(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=seconds)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    # -------------------------------------------------------------------------------- process

    def _wait_until_ready(self) -> None:
        process, deadline = self._process, time.monotonic() + self._start_seconds
        assert process is not None
        while time.monotonic() < deadline:
            with suppress(OSError, http.client.HTTPException):
                status = self._ask("GET", "/health", None, 5.0)[0]
                if status == http.client.OK and process.poll() is None:
                    return
            if process.poll() is not None:
                raise self._ended("loading")
            time.sleep(POLL_SECONDS)
        message = f"{self.name} was not ready in {self._start_seconds:g} s"
        raise OtherEngineError(message + self._last_words())

    def _ended(self, doing: str) -> OtherEngineError:
        """The error of a server that is gone, or does not speak."""
        assert self._process is not None
        how = "stopped speaking"
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=2.0)
            how = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
        return OtherEngineError(f"{self.name} {how} while {doing}{self._last_words()}")

    def _last_words(self) -> str:
        """The line of its output that tells most: the last that speaks of an error, or the last."""
        assert self._log is not None
        lines = [line.strip() for line in self._log.read_text("utf-8", "replace").splitlines()]
        lines = [line for line in lines if line]
        telling = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
        shown = (telling or lines or ["it printed nothing"])[-1]
        return f": {shown[:SHOWN_OF_LOG]}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _dies_with_us(command: Sequence[str]) -> list[str]:
    """The command; on Linux killed by the kernel if this process is killed."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), *command]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started, if it has."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()
