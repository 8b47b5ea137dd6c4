"""Mutation testing: changes one small thing in a source file and sees whether a test notices.

    python scripts/mutate.py                     all targets; what is known and still holds is kept
    python scripts/mutate.py accept scheduler    these targets
    python scripts/mutate.py --list scheduler    what would be tried
    python scripts/mutate.py --score             the figures, and what survives

The tree itself is never edited: mutants are put into a copy. Each one runs the tests of its target
in a forked child of a process that has torch loaded, under a time limit. Results are lines of JSON
in build/mutants.jsonl, each valid as long as its source file and its tests are unchanged. The exit
status is 1 if a mutant survives that mutants_equivalent.toml does not explain, or if that list
names a mutant that does not exist. docs/adr/0033-mutation-gate.md has the reasons.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mutations import mutations

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/draftahead")
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
WRITTEN = [  # by hand: search and replace
    Path(__file__).with_name(f"mutants_{name}.toml") for name in ("written", "stored")
]
RESULTS = ROOT / "build" / "mutants.jsonl"
MARKERS = "not slow and not model and not gpu"


def _files(folder: str, names: str) -> list[str]:
    return [f"tests/{folder}/test_{name}.py" for name in names.split()]


# Each target: its file, and its tests: those that catch most in a moment, then others.
Gate = tuple[list[str], list[str]]
ACCEPTANCE: Gate = (
    _files("sampling", "token_rejection deterministic_acceptance block_verification")
    + _files("sampling", "acceptance_noise acceptance_not_finite"),
    _files("sampling", "typical_acceptance acceptance_enumerated truncation processors"),
)
SAMPLING: Gate = (
    _files(
        "sampling",
        "processors logprobs deterministic_acceptance draft_sampler noise_coupled_drafting",
    ),
    _files("sampling", "token_rejection block_verification truncation typical_acceptance")
    + _files("sampling", "acceptance_enumerated")
    + _files("engine", "drafter_isolation"),
)
CORE: Gate = (["tests/core"], [*SAMPLING[0], *ACCEPTANCE[0], *_files("engine", "drafter_faults")])
SCHEDULER: Gate = (
    _files("engine", "scheduler"),
    _files("engine", "interrupts drafter_isolation target_faults slots")
    + _files("llm", "prompt_logprobs"),
)
ENGINE: Gate = (
    _files("engine", "step"),
    _files("engine", "interrupts drafter_isolation launch_ahead slots"),
)
SHARED: Gate = (_files("engine", "threads"), _files("llm", "streaming"))
KV: Gate = (
    ["tests/kv"],
    _files("models", "runner support hidden_states changed_models")
    + _files("engine", "target_faults"),
)
AHEAD = "tests/engine/test_launch_ahead.py::test_"
VERIFIER: Gate = (
    _files("models", "verifier"),
    [
        f"{AHEAD}only_trees_on_the_roots_of_the_batch_are_verified_unseen",
        f"{AHEAD}device_drafts_do_not_change_the_output",
        *_files("engine", "replay slots interrupts"),
        *_files("models", "long_rope changed_models row_probe"),
    ],
)
GRAPHED = "tests/backends/cuda/test_graphed_forward.py::test_"
RUNNER: Gate = (
    _files("models", "forward prompts backend_choice"),
    _files("models", "hidden_states runner long_rope support layer_subset changed_models")
    + _files("llm", "prompt_logprobs")
    + _files("engine", "slots target_faults")
    + _files("backends", "select")
    + _files("backends/cuda", "prefill hidden_states padding")
    + ["tests/models/test_parity.py::test_the_context_can_be_filled_to_its_last_position"]
    + [
        f"tests/models/test_parity.py::test_greedy_output_equals_generate[{one}-float64]"
        for one in ("gptj", "falcon")
    ]
    + [f"{GRAPHED}output_with_drafts_is_that_of_plain_decoding[emulated-eagle_tree-sampled]"],
)
FAULTS = _files("engine", "drafter_faults drafter_isolation")
TARGETS: dict[str, tuple[str, Gate]] = {
    "accept": ("sampling/accept.py", ACCEPTANCE),
    "processors": (
        "sampling/processors.py",
        (_files("sampling", "processors truncation"), ACCEPTANCE[0]),
    ),
    "sample": ("sampling/sample.py", SAMPLING),
    "draft_sampler": ("sampling/draft_sampler.py", SAMPLING),
    "noise": ("sampling/noise.py", (ACCEPTANCE[0], _files("sampling", "noise"))),
    "tree": ("core/tree.py", CORE),
    "draft": ("core/draft.py", CORE),
    "detokenizer": ("core/detokenizer.py", (["tests/core"], ["tests/engine/test_scheduler.py"])),
    "scheduler": ("engine/scheduler.py", SCHEDULER),
    "engine": ("engine/engine.py", ENGINE),
    "shared": ("engine/shared.py", SHARED),
    "guard": ("drafters/guard.py", (_files("drafters", "guard"), FAULTS)),
    "base": ("drafters/base.py", (_files("drafters", "validation"), FAULTS)),
    "cache": ("kv/cache.py", KV),
    "attention": ("kv/attention.py", KV),
    "formats": ("kv/formats.py", KV),
    "memory": ("kv/memory.py", KV),
    "verifier": ("models/verifier.py", VERIFIER),
    "runner": ("models/runner.py", RUNNER),
}
SECONDS, TIMES = 15, 3  # a mutant may take so much more, and so many times what the tests take
COMPILING = 60  # more seconds for a mutant of the C++ kernels
MEMORY = 8 << 30  # bytes that a mutant may allocate
# The kernels compute the same bits and are compiled in half the time, for this CPU alone.
KERNEL_FLAGS = "-O1"


class Mutant(NamedTuple):
    target: str
    file: str  # in the package
    function: str
    before: str
    after: str
    source: str  # of the whole file
    gate: Gate

    @property
    def tests(self) -> list[str]:
        return [*self.gate[0], *self.gate[1]]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.before, self.after

    @property
    def name(self) -> str:
        return hashlib.sha256("\0".join(self.key).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.file}: {self.function}\n    - {self.before}\n    + {self.after}"


def mutants(target: str) -> Iterator[Mutant]:
    if target == "written":
        yield from _written()
        return
    file, gate = TARGETS[target]
    for mutation in mutations((ROOT / PACKAGE / file).read_text("utf-8")):
        yield Mutant(target, file, *mutation, gate)


def _written() -> Iterator[Mutant]:
    entries = [e for path in WRITTEN for e in tomllib.loads(path.read_text("utf-8"))["mutant"]]
    for entry in entries:
        file, name = entry["file"], entry["name"]
        text = (ROOT / PACKAGE / file).read_text("utf-8")
        find, put = entry["find"].strip("\n"), entry["replace"].strip("\n")
        if text.count(find) != 1:
            raise SystemExit(f"mutant {name!r} occurs {text.count(find)} times in {file}")
        source = text.replace(find, put)
        yield Mutant("written", file, name, find, put, source, (entry["tests"], []))


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Why no test can tell a mutant from the original."""
    return {
        (entry["file"], entry["function"], before, after): entry["why"]
        for entry in tomllib.loads(EQUIVALENT.read_text("utf-8"))["equivalent"]
        for before, after in entry["changes"]
    }


# ------------------------------------------------------------------------------------ running


class Copy:
    """A copy of the sources and tests, where mutants are put in and tested. What is compiled from
    mutated kernels stays there as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._limits: dict[str, tuple[int, int]] = {}  # of gates, in seconds

    def test(self, mutant: Mutant) -> str:
        """'caught', 'too long' or 'survived'."""
        gate = str(mutant.gate)
        if gate not in self._limits:
            self._limits[gate] = self._measure(*mutant.gate)
        more = 0 if mutant.file.endswith(".py") else COMPILING
        path = self.folder / PACKAGE / mutant.file
        original = path.read_text("utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        path.write_text(mutant.source, "utf-8")
        try:
            return self._run(mutant.gate, [limit + more for limit in self._limits[gate]])
        finally:
            path.write_text(original, "utf-8")

    def _measure(self, quick: list[str], others: list[str]) -> tuple[int, int]:
        """Limits of tests, by what they take without a mutant; all sources are compiled then."""
        seconds, log = [0.0], self.folder / "log"
        for tests in (quick, [*quick, *others]):
            start = time.perf_counter()
            if self._run((tests, []), [3600, 3600], log) != "survived":
                raise SystemExit(f"the tests fail without a mutant:\n{log.read_text('utf-8')}")
            seconds.append(time.perf_counter() - start)
        first, second = (SECONDS + int(TIMES * found) for found in seconds[1:])
        return first, second

    def _run(self, gate: Gate, limits: Sequence[int], log: Path | None = None) -> str:
        child = os.fork()
        if not child:
            code = 99
            try:
                os.setsid()
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
                sys.dont_write_bytecode = log is None
                code = self._pytest(gate, limits, log)
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        _end_group(child)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            return "too long"
        return "caught" if status else "survived"

    def _pytest(self, gate: Gate, limits: Sequence[int], log: Path | None) -> int:
        import pytest

        out = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.folder)
        os.environ["DRAFTAHEAD_CACHE"] = str(self.folder / "cache")
        os.environ["DRAFTAHEAD_KERNEL_FLAGS"] = KERNEL_FLAGS
        sys.path.insert(0, str(self.folder / "src"))
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", MARKERS]
        options += ["--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options += [f"--basetemp={self.folder / 'tmp'}"]
        for tests, limit in zip(gate, limits, strict=True):
            signal.alarm(limit)
            if tests and (code := int(pytest.main([*options, *tests]))):
                return code
            options += [f"--ignore={test}" for test in tests]
        return 0


def _end_group(child: int) -> None:
    """What a test has started and left running."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _preload() -> None:
    """What tests need and no mutant changes: a child then starts at once."""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    import hypothesis.strategies
    import pytest
    import scipy.stats
    import torch

    torch.set_num_threads(1)  # threads would not outlive the fork
    import transformers
    from transformers.models.llama import modeling_llama

    _ = hypothesis.strategies, pytest, scipy.stats, transformers, modeling_llama
    _ = transformers.AutoModelForCausalLM, transformers.PreTrainedTokenizerFast
    gc.freeze()  # pytest collects garbage when it ends: half of a child's time without this


@functools.cache
def _digest(path: Path) -> bytes:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def _stamp(mutant: Mutant) -> str:
    """Of a source file and its tests: a result holds only as long as they are the same."""
    paths = [PACKAGE / mutant.file, *(test.partition("::")[0] for test in mutant.tests)]
    return hashlib.sha256(b"".join(_digest(ROOT / path) for path in paths)).hexdigest()[:12]


def known_results() -> dict[str, dict[str, Any]]:
    """The last result of every mutant."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def run(found: Sequence[Mutant], *, keep_caught: bool, jobs: int, deadline: float) -> int:
    """Tries what has no result that holds. `jobs` processes take every so many-th mutant each."""
    known = known_results()

    def holds(mutant: Mutant) -> bool:
        line = known.get(mutant.name)
        if line is None:
            return False
        if keep_caught and line["outcome"] != "survived":
            return True
        return bool(line["stamp"] == _stamp(mutant))

    untried = [mutant for mutant in found if not holds(mutant)]
    if not untried:
        return 0
    _preload()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    children = []
    for job in range(jobs):
        child = os.fork()
        if not child:
            code = 1
            try:
                _try(untried[job::jobs], deadline)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _try(found: Sequence[Mutant], deadline: float) -> None:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, RESULTS.open("a") as out:
        place = Copy(Path(folder))
        for mutant in found:
            if time.time() > deadline:
                return
            start, outcome = time.perf_counter(), place.test(mutant)
            line = mutant._asdict() | {"name": mutant.name, "outcome": outcome}
            del line["source"], line["gate"]
            line["stamp"] = _stamp(mutant)
            line["seconds"] = round(time.perf_counter() - start, 2)
            out.write(json.dumps(line) + "\n")
            out.flush()
            if outcome == "survived":
                print(f"survives: {mutant}", flush=True)


# --------------------------------------------------------------------------------- the figures


def score(by_target: dict[str, list[Mutant]]) -> int:
    """Prints the figures and what survives unexplained; returns how many do."""
    known, excused = known_results(), equivalents()
    survivors: list[Mutant] = []
    columns = ("mutants", "caught", "equivalent", "survived", "untried")
    print(f"{'target':<14}" + "".join(f"{column:>12}" for column in columns))
    total: Counter[str] = Counter()
    for target, found in by_target.items():
        counts = Counter({"mutants": len(found)})
        for mutant in found:
            line = known.get(mutant.name)
            outcome = line["outcome"] if line else "untried"
            if mutant.key in excused:
                outcome = "equivalent"
            elif outcome == "survived":
                survivors.append(mutant)
            counts["caught" if outcome == "too long" else outcome] += 1
        total += counts
        print(f"{target:<14}" + "".join(f"{counts[column]:>12}" for column in columns))
    print(f"{'all':<14}" + "".join(f"{total[column]:>12}" for column in columns))
    for mutant in survivors:
        print(f"survives: {mutant}")
    return len(survivors)


def stale(by_target: dict[str, list[Mutant]]) -> list[str]:
    """Entries of the list of equivalents that name no mutant of these targets' files."""
    keys = {mutant.key for found in by_target.values() for mutant in found}
    files = {TARGETS[target][0] for target in by_target if target in TARGETS}
    gone = [key for key in equivalents() if key[0] in files and key not in keys]
    return ["{}: {}\n    - {}\n    + {}".format(*key) for key in gone]


def missing_tests(found: Sequence[Mutant]) -> list[str]:
    tests = {test for mutant in found for test in mutant.tests}
    return sorted(test for test in tests if not (ROOT / test.partition("::")[0]).exists())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [*TARGETS, "written"]
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--score", action="store_true", help="show the figures, run nothing")
    parser.add_argument("--only", default="", help="with this text in function or statement")
    parser.add_argument("--every", type=int, default=1, help="each so many-th mutant only")
    parser.add_argument("--keep-caught", action="store_true", help="whatever has changed since")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, default=1e6, help="start none after so many")
    given = parser.parse_args()
    if wrong := set(given.targets) - set(names):
        parser.error(f"no such target: {', '.join(sorted(wrong))}")
    by_target = {target: list(mutants(target)) for target in given.targets or names}
    everything = [mutant for found in by_target.values() for mutant in found]
    if problems := missing_tests(everything) or stale(by_target):
        print("there is no such test, or no such equivalent mutant:", *problems, sep="\n")
        return 1
    chosen = [m for m in everything if given.only in f"{m.function} {m.before}"][:: given.every]
    if given.list:
        print(*chosen, sep="\n")
        return 0
    if not given.score:
        excused, deadline = equivalents(), time.time() + 60 * given.minutes
        untried = [mutant for mutant in chosen if mutant.key not in excused]
        if run(untried, keep_caught=given.keep_caught, jobs=given.jobs, deadline=deadline):
            return 1
    return int(score(by_target) > 0)


if __name__ == "__main__":
    sys.exit(main())
