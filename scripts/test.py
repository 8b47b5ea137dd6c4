"""Sets everything up and runs all checks: lint, format, types, tests.

    python3 scripts/test.py [--all] [arguments of pytest]

Without --all: what CI runs on every push, under 10 minutes on 2 cores. With --all, as CI runs every
night: the tests marked `slow` as well, coverage against its floor (pyproject.toml), and NIGHTLY.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from setup_venv import DEVELOPMENT, ROOT, python

# Arguments of the interpreter, one command each.
CHECKS = [
    ["-m", "ruff", "check", "--quiet"],
    ["-m", "ruff", "format", "--check", "--quiet"],
    ["-m", "mypy", "--no-error-summary"],
]
# After the tests, with --all only: commands that take long and are no tests of pytest.
NIGHTLY: list[list[str]] = [["scripts/mutate.py", "--jobs", "2", "--minutes", "120"]]


def commands(arguments: Sequence[str]) -> list[list[str]]:
    everything = "--all" in arguments
    for_pytest = [argument for argument in arguments if argument != "--all"]
    # A process per core, one thread each: tiny models gain nothing from more threads. Each process
    # takes up to 3 GB; more than 4 wait for the slowest tests.
    pytest = ["-m", "pytest", "--quiet", "-n", "auto", "--maxprocesses=4", "--dist=worksteal"]
    if everything:
        pytest += ["-m", "", "--durations=20"]  # overrides the "not slow" of pyproject.toml
        if not for_pytest:  # a selection of tests is no measure of coverage
            pytest += ["--cov", "--cov-report=term:skip-covered"]
    return [*CHECKS, [*pytest, *for_pytest], *(NIGHTLY if everything else [])]


if __name__ == "__main__":
    interpreter = python(DEVELOPMENT)
    for command in commands(sys.argv[1:]):
        print(" ".join(command).removeprefix("-m "), flush=True)
        if code := subprocess.run([interpreter, *command], cwd=ROOT, check=False).returncode:
            sys.exit(code)
