"""One decoding step as a walk through the source: files in order, calls, crossings, returns.

    python scripts/walk.py [--model smollm2] [--drafter auto] [--batch 1] [--step 12] [--tree]

Records the Python calls of eight steps with sys.setprofile and shows the step with the most calls:
the files in the order they are first entered, with calls and the functions called most often, then
totals. A crossing is a call from one file into another; a return is a change back to a file that
the step had already left. `--tree` prints the calls first, indented by depth.

Use it to read the code in the order it runs, and to compare that order before and after a change.
Not shown: calls in worker threads, in C++ and in CUDA graphs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import draftahead
from draftahead import LLM, SamplingParams

PACKAGE = Path(draftahead.__file__).parent
RECORDED_STEPS = 8
PROMPT = "Write a Python function that reverses a list, then explain every line of it."


class Call(NamedTuple):
    depth: int
    caller: str  # file, relative to the package; "" for the outermost call
    file: str
    function: str


class Recorder:
    """Collects calls into the package while it is active."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._stack: list[tuple[str, bool]] = []  # active frames: file; whether it is a function
        self._depth = 0  # of them, those that are functions

    def __enter__(self) -> Recorder:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        file = package_path(frame.f_code.co_filename)
        if file is None:
            return
        if event == "return":
            if self._stack:  # empty for frames that were entered before the recording
                self._depth -= self._stack.pop()[1]
            return
        # Comprehensions and lambdas belong to the function they stand in.
        is_function = not frame.f_code.co_name.startswith("<")
        if is_function:
            caller = self._stack[-1][0] if self._stack else ""
            self.calls.append(Call(self._depth, caller, file, frame.f_code.co_qualname))
        self._stack.append((file, is_function))
        self._depth += is_function


@functools.cache
def package_path(filename: str) -> str | None:
    """Path inside the package; None for a file outside it."""
    path = Path(filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def record(model: str, drafter: str, batch: int, first_step: int) -> list[Call]:
    """Calls of the longest of RECORDED_STEPS steps, from `first_step` on."""
    llm = LLM(model, drafter=drafter, max_batch=batch)
    step: Callable[[], Any] = llm.engine.step
    numbers = itertools.count(1)
    longest: list[Call] = []

    def recorded_step() -> Any:
        nonlocal longest
        if not first_step <= next(numbers) < first_step + RECORDED_STEPS:
            return step()
        with Recorder() as recorder:
            found = step()
        longest = max(longest, recorder.calls, key=len)
        return found

    max_tokens = 8 * (first_step + RECORDED_STEPS)  # enough at up to 8 tokens a step
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with mock.patch.object(llm.engine, "step", recorded_step):
        llm.generate([PROMPT] * batch, params)
    return longest


def print_tree(calls: list[Call]) -> None:
    """The calls, indented; consecutive equal ones are folded."""
    for call, group in itertools.groupby(calls):
        count = sum(1 for _ in group)
        times = f" x{count}" if count > 1 else ""
        print(f"{'  ' * call.depth}{call.file}: {call.function}{times}")
    print()


def print_files(calls: list[Call]) -> None:
    """One line per file, in the order they are first entered."""
    files: dict[str, Counter[str]] = {}
    for call in calls:
        files.setdefault(call.file, Counter())[call.function] += 1
    for file, functions in files.items():
        often = ", ".join(name for name, _ in functions.most_common(4))
        print(f"{file:34} {functions.total():5} calls  {often}")


def totals(calls: list[Call]) -> str:
    order = [file for file, _ in itertools.groupby(call.file for call in calls)]
    returns = len(order) - len(set(order))
    functions = len({(call.file, call.function) for call in calls})
    crossings = sum(call.caller not in ("", call.file) for call in calls)
    return (
        f"{len(set(order))} files, {functions} functions, {len(calls)} calls, "
        f"{crossings} crossings, {returns} returns"
    )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--step", type=int, default=12, help="first recorded step (default 12)")
    parser.add_argument("--tree", action="store_true", help="print every call, indented")
    args = parser.parse_args()
    if args.batch < 1 or args.step < 1:
        parser.error("--batch and --step must be 1 or more")
    calls = record(args.model, args.drafter, args.batch, args.step)
    if not calls:
        sys.exit(f"the text ended before step {args.step}: choose a smaller --step")
    if args.tree:
        print_tree(calls)
    print_files(calls)
    print(f"\n{args.drafter}, batch {args.batch}: {totals(calls)}")


if __name__ == "__main__":
    main()
