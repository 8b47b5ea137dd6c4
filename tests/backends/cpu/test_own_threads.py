"""Threads of the kernels' own: bits do not depend on them; calls at the same time, forks, and ends
of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from draftahead.backends.cpu.linear import run_linear
from draftahead.backends.cpu.threads import num_threads
from llama_shaped import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("torch_threads")]


@pytest.fixture
def torch_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def linear(out: int, in_: int, threads: int, tokens: int = 3) -> torch.Tensor:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(in_, out), torch.randn(tokens, in_)
    torch.set_num_threads(threads)
    assert num_threads() == threads
    return run_linear(layer, x)


# One output; parts of unequal size; more threads than parts, than cores, and than a part has rows.
@pytest.mark.parametrize("out", [1, 24, 25, 100, 777, 3000])
def test_bits_do_not_depend_on_the_number_of_threads(out: int) -> None:
    expected = linear(out, 64, 1)
    for threads in (2, 3, 5, 16, 2, 40):
        assert torch.equal(linear(out, 64, threads), expected)


def test_teams_that_grow_and_shrink() -> None:
    expected = linear(333, 64, 1)
    for threads in (2, 7, 2, 9, 3, 9, 1, 9):
        for _ in range(20):
            assert torch.equal(linear(333, 64, threads), expected)


def test_python_threads_call_at_the_same_time() -> None:
    """Each has a team of its own: they do not wait for each other, and mix nothing up."""
    torch.set_num_threads(3)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 50 + 60 * i) for i in range(6)]
    x = torch.randn(2, 96)
    expected = [run_linear(layer, x) for layer in layers]
    wrong: list[int] = []

    def call(i: int) -> None:
        torch.set_num_threads(3)
        results = (run_linear(layers[i], x) for _ in range(150))
        wrong.extend(i for result in results if not torch.equal(result, expected[i]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_workers_sleep_between_calls() -> None:
    linear(500, 64, 4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2  # one that spins would take 0.4


PRELUDE = """
import ctypes, os, resource, signal, sys, threading, time, torch
from draftahead.backends.cpu.linear import run_linear
torch.set_num_threads(1)
layer, x = torch.nn.Linear(64, 500), torch.randn(3, 64)
layer.requires_grad_(False)
expected = run_linear(layer, x)
torch.set_num_threads({threads})
def is_right():
    return torch.equal(run_linear(layer, x), expected)
def tasks():
    return len(os.listdir("/proc/self/task"))
"""


def run(code: str, threads: int = 3) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE.format(threads=threads) + code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.strip()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_child_process_has_threads_of_its_own() -> None:
    """Also a child of a child, and while another thread of the parent computes."""
    code = """
assert is_right()
ends = threading.Event()
def compute():
    while not ends.is_set():
        assert is_right()
other = threading.Thread(target=compute)
other.start()
for _ in range(20):
    child = os.fork()
    if not child:
        signal.alarm(60)
        right = is_right() and is_right()
        grandchild = os.fork()
        if not grandchild:
            os._exit(0 if is_right() else 1)
        right &= os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
assert is_right()
ends.set()
other.join()
print("right")
"""
    assert run(code) == "right"


@needs_proc
def test_workers_are_kept_and_not_signalled() -> None:
    code = """
before = tasks()
assert all(is_right() for _ in range(50))
print(tasks() - before)
blocked = []
for task in os.listdir("/proc/self/task"):
    lines = open(f"/proc/self/task/{task}/status").read().splitlines()
    blocked += [int(line.split()[1], 16) for line in lines if "SigBlk" in line]
print(sum(bool(mask >> (signal.SIGINT - 1) & 1) for mask in blocked))
print(sum(bool(mask >> (signal.SIGSEGV - 1) & 1) for mask in blocked))
"""
    assert run(code).split() == ["2", "2", "0"]


@needs_proc
def test_without_more_threads_fewer_compute() -> None:
    """Here there is no memory for their stacks."""
    code = """
pages = int(open("/proc/self/statm").read().split()[0])
before = tasks()
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (3 << 20),) * 2)
assert is_right()
print(tasks() - before)
"""
    assert run(code) == "0"


def test_a_process_ends_while_a_thread_computes() -> None:
    # The kernels alone: a thread that is in one of torch's operations when Python ends is aborted.
    code = """
from draftahead.backends.cpu import build
from draftahead.backends.cpu.addresses import Addresses
from draftahead.backends.cpu.linear import weights_of
kept, y = Addresses(), torch.empty(3, 500)
weights, library = weights_of(layer, kept, "it"), build.library()
given = ctypes.byref(weights), x.data_ptr(), 3, y.data_ptr(), 3, None
def compute():
    while True:
        library.draftahead_linear(*given)
assert is_right()
threading.Thread(target=compute, daemon=True).start()
time.sleep(0.1)
print("ends")
"""
    for _ in range(3):
        assert run(code) == "ends"
