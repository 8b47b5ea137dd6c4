"""Damaged models, thousands of them: each works, or is refused by an error of ours within 2 seconds
of the CPU, while memory may grow by 2 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from draftahead import errors

WORKER = Path(__file__).parents[1] / "load_worker.py"
MOST_SECONDS = 2.0
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}


class Result(NamedTuple):
    number: int  # of the case: `damaged_models.Cases.write` makes it again
    seconds: float
    outcome: str

    @property
    def kind(self) -> str:
        return self.outcome.split(":")[0]


def results(numbers: range, folder: Path) -> list[Result]:
    """One process loads them all."""
    done = subprocess.run(
        [sys.executable, WORKER, folder],
        input="".join(f"{number}\n" for number in numbers),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    ready, *lines = done.stdout.splitlines() or [""]
    assert ready == "ready", done.stderr[-2000:]
    found = [Result(*json.loads(line)) for line in lines]
    died_at = numbers[len(found)] if len(found) < len(numbers) else None
    assert died_at is None, (
        f"case {died_at} ended the process: {done.returncode} {done.stderr[-2000:]}"
    )
    return found


def check(found: list[Result]) -> None:
    assert not [r for r in found if r.kind != "works" and r.kind not in OURS]
    assert not [r for r in found if r.seconds > MOST_SECONDS]
    kinds = Counter(r.kind for r in found)
    assert min(kinds["works"], kinds["DamagedModelError"], kinds["UnsupportedModelError"]) > 10


def test_damaged_models_work_or_are_refused(tmp_path: Path) -> None:
    check(results(range(240), tmp_path))


@pytest.mark.slow
def test_ten_thousand_damaged_models_work_or_are_refused(tmp_path: Path) -> None:
    check(results(range(10_000), tmp_path))
