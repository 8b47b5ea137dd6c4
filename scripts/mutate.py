"""Mutation testing: changes one small thing in a source file and sees whether a test notices.

    python scripts/mutate.py                        every target of the table, resumed if stopped
    python scripts/mutate.py verify sampling        some targets only
    python scripts/mutate.py --list scheduler       what would be tried
    python scripts/mutate.py --score                the figures and the survivors found so far

Works in a temporary copy: the tree itself is never edited. Each mutant runs its related tests in a
forked child of a process that has torch loaded already, under a time limit. Results are lines of
JSON in build/mutants.jsonl; what was caught is not tried again, and what survived only once a test
of its target has changed. The exit status is 1 if a mutant survived that
`mutants_equivalent.toml` does not explain.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/draftahead/"
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
WRITTEN = Path(__file__).with_name("mutants_written.toml")  # by hand: search and replace
RESULTS = ROOT / "build" / "mutants.jsonl"

# Each target: its file below src/draftahead, and the test files that are its gate, quickest first.
TARGETS: dict[str, tuple[str, list[str]]] = {
    "verify": (
        "verify.py",
        ["test_acceptance_edges", "test_typical", "test_faults", "test_rules"],
    ),
    "sampling": (
        "sampling.py",
        [
            "test_sampling_edges",
            "test_acceptance_edges",
            "test_contract",
            "test_faults",
            "test_sampling",
            "test_rules",
        ],
    ),
    "scheduler": (
        "scheduler.py",
        ["test_scheduler", "test_contract", "test_faults"],
    ),
    "text": ("text.py", ["test_detokenizer", "test_contract"]),
    "tree": ("tree.py", ["test_tree", "test_rules", "test_lossless"]),
    "drafts": ("drafts.py", ["test_tree", "test_rules", "test_faults", "test_lossless"]),
    "kvcache": ("kvcache.py", ["test_cache", "test_contract", "test_faults", "test_lossless"]),
    "target": ("target.py", ["test_cache", "test_contract", "test_replay", "test_lossless"]),
    "passes": ("passes.py", ["test_cache", "test_contract", "test_replay", "test_lossless"]),
    "attention": ("attention.py", ["test_lossless", "test_parity"]),
}
LONGEST = 3.0  # times what the tests take without a mutant, and 20 s on top
COMPILING = 60  # seconds more for a mutant of the kernels


# ------------------------------------------------------------------------------- the operators

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# A name, as a function or an attribute, becomes its opposite.
OPPOSITES = {
    "min": "max",
    "amin": "amax",
    "argmin": "argmax",
    "minimum": "maximum",
    "any": "all",
    "COIN": "TARGET",
    "TARGET": "DRAFT",
    "DRAFT": "COIN",
    "append": "pop",
    "isfinite": "isnan",
}
OPPOSITES |= {b: a for a, b in list(OPPOSITES.items()) if a.islower()}
# x.name(...) becomes x.
SKIPPED_CALLS = {
    *("clamp", "nan_to_num", "clone", "where", "log", "exp", "softmax", "cumsum", "amin", "amax"),
    *("minimum", "maximum", "masked_fill", "copy", "abs"),
}
# name(x, ...) becomes x.
SKIPPED_FUNCTIONS = {"sorted", "set", "list", "tuple", "abs", "min", "max", "reversed"}

Change = Callable[[Any], ast.AST | None]  # a node of a fresh copy -> what stands in its place


def _set(**fields: Any) -> Change:
    def change(node: Any) -> ast.AST:
        for name, value in fields.items():
            setattr(node, name, value)
        return node

    return change


def _constants(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield _set(value=not value)
    elif isinstance(value, int):
        yield _set(value=value + 1)
        if value:
            yield _set(value=value - 1)
    elif isinstance(value, float):
        yield _set(value=1.0 if value == 0 else 0.0 if value == 1 else 2 * value)


def _compared(node: ast.Compare) -> Iterator[Change]:
    for at, op in enumerate(node.ops):
        for other in COMPARISONS[type(op)]:

            def change(found: Any, at: int = at, other: type = other) -> ast.AST:
                found.ops[at] = other()
                return found

            yield change


def _called(node: ast.Call) -> Iterator[Change]:
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    arms = 1 if isinstance(function, ast.Attribute) and _is_torch(function) else 0
    if name == "where" and len(node.args) == 2 + arms:
        if arms:  # torch.where(condition, one, other)
            yield lambda call: _set(args=[call.args[0], call.args[2], call.args[1]])(call)
            yield lambda call: call.args[1]
            yield lambda call: call.args[2]
        else:  # one.where(condition, other)
            yield lambda call: call.args[1]
    if isinstance(function, ast.Attribute) and not arms and name in SKIPPED_CALLS:
        yield lambda call: call.func.value
    if isinstance(function, ast.Name) and name in SKIPPED_FUNCTIONS and len(node.args) == 1:
        yield lambda call: call.args[0]
    if name == "clamp":
        for keyword in node.keywords:
            yield lambda call, name=keyword.arg: _set(
                keywords=[k for k in call.keywords if k.arg != name]
            )(call)


def _is_torch(function: ast.Attribute) -> bool:
    return isinstance(function.value, ast.Name) and function.value.id == "torch"


def _sliced(node: ast.Slice) -> Iterator[Change]:
    for side in ("lower", "upper"):
        bound = getattr(node, side)
        if bound is None:
            continue
        yield _set(**{side: None})
        if not isinstance(bound, ast.Constant):
            for op in (ast.Add, ast.Sub):

                def change(found: Any, side: str = side, op: type = op) -> ast.AST:
                    moved = ast.BinOp(getattr(found, side), op(), ast.Constant(1))
                    return _set(**{side: moved})(found)

                yield change


def version(node: ast.AST, *, rebinds: bool = False) -> Iterator[Change]:
    """Every way in which one node is changed."""
    if isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Compare):
        yield from _compared(node)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield _set(op=ARITHMETIC[type(node.op)]())
        if isinstance(node, ast.BinOp):
            yield lambda found: found.left
            yield lambda found: found.right
    elif isinstance(node, ast.BoolOp):
        yield _set(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for at in range(len(node.values)):
            yield lambda found, at=at: _set(values=found.values[:at] + found.values[at + 1 :])(
                found
            )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield lambda found: found.operand
    elif isinstance(node, ast.IfExp):
        yield lambda found: found.body
        yield lambda found: found.orelse
    elif isinstance(node, ast.If):
        yield _set(test=ast.Constant(True))
        yield _set(test=ast.Constant(False))
    elif isinstance(node, ast.While):
        yield _set(test=ast.Constant(False))
    elif isinstance(node, ast.Slice):
        yield from _sliced(node)
    elif isinstance(node, ast.comprehension):
        for at in range(len(node.ifs)):
            yield lambda found, at=at: _set(ifs=found.ifs[:at] + found.ifs[at + 1 :])(found)
    elif isinstance(node, ast.Call):
        yield from _called(node)
    if isinstance(node, ast.Name) and node.id in OPPOSITES:
        yield _set(id=OPPOSITES[node.id])
    if isinstance(node, ast.Attribute) and node.attr in OPPOSITES:
        yield _set(attr=OPPOSITES[node.attr])
    if isinstance(node, ast.Break):
        yield lambda found: ast.Continue()
    dropped = ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete
    if isinstance(node, dropped) or rebinds:
        yield lambda found: ast.Pass()


# --------------------------------------------------------------------------------- the mutants


class Mutant(NamedTuple):
    """What is changed. Its name are function, before and after: they outlive shifts of lines."""

    target: str
    file: str
    function: str  # qualified name in its module
    before: str  # the statement, or the head of it
    after: str
    source: str  # of the whole mutated file
    tests: tuple[str, ...] = ()  # instead of the target's

    @property
    def name(self) -> str:
        parts = (self.file.rpartition("/")[2], self.function, self.before, self.after)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _head(statement: ast.stmt) -> str:
    """A statement's source on one line, without the block below it."""
    bare = copy.copy(statement)
    for block in ("body", "orelse", "finalbody", "handlers"):
        if getattr(bare, block, None):
            setattr(bare, block, [ast.Pass()] if block == "body" else [])
    ast.fix_missing_locations(bare)
    return ast.unparse(bare).removesuffix("\n    pass")


def _skipped(node: ast.AST) -> bool:
    """Types, docstrings, assertions, and what only words an error."""
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion as well
        return True
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(base) == "Protocol" for base in node.bases
    )


class _Place(NamedTuple):
    index: int  # of the node, in the order of ast.walk
    function: str
    statement: int  # index of the statement that holds it
    rebinds: bool


def _places(tree: ast.Module) -> list[_Place]:
    """The nodes that may be changed."""
    index = {id(node): at for at, node in enumerate(ast.walk(tree))}
    found: list[_Place] = []

    def visit(node: ast.AST, function: str, statement: int, bound: set[str]) -> None:
        if _skipped(node):
            return
        rebinds = False
        if isinstance(node, ast.stmt):
            statement = index[id(node)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                bound = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
        if isinstance(node, ast.Assign):
            names = [n for target in node.targets for n in ast.walk(target)]
            plain = {
                n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            rebinds = bool(function) and (not plain or plain <= bound)
            rebinds &= not function.endswith("__init__")  # every test would miss the attribute
            bound |= plain
        found.append(_Place(index[id(node)], function, statement, rebinds))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            if isinstance(node, ast.Raise):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function, statement, bound)

    visit(tree, "", -1, set())
    return [place for place in found if place.statement >= 0]


def _replaced(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
                return
            if isinstance(value, list) and any(item is old for item in value):
                setattr(node, name, [new if item is old else item for item in value])
                return


def mutants_of(target: str) -> Iterator[Mutant]:
    """Every mutant of a file that the operators make, in the order of the file."""
    file = SOURCE + TARGETS[target][0]
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    nodes = list(ast.walk(tree))
    same: Counter[tuple[str, str, str]] = Counter()
    for place in sorted(_places(tree), key=lambda p: getattr(nodes[p.index], "lineno", 0)):
        for at, _ in enumerate(version(nodes[place.index], rebinds=place.rebinds)):
            fresh = copy.deepcopy(tree)
            walked = list(ast.walk(fresh))
            node, statement = walked[place.index], walked[place.statement]
            before = _head(statement)
            change = list(version(node, rebinds=place.rebinds))[at]
            new = change(node)
            if new is None:
                continue
            whole = node is statement and new is not node
            if new is not node:
                _replaced(fresh, node, new)
            ast.fix_missing_locations(fresh)
            after = _head(new if whole else statement)
            same[place.function, before, after] += 1
            if (count := same[place.function, before, after]) > 1:
                after += f"  # {count}"
            yield Mutant(target, file, place.function, before, after, ast.unparse(fresh) + "\n")


def written_mutants() -> Iterator[Mutant]:
    """Those written by hand: text that is searched for, once, and replaced."""
    for number, entry in enumerate(tomllib.loads(WRITTEN.read_text("utf-8"))["mutant"], start=1):
        file = SOURCE + entry["file"]
        text = (ROOT / file).read_text("utf-8")
        find, put = entry["find"].strip("\n"), entry["replace"].strip("\n")
        if text.count(find) != 1:
            raise SystemExit(f"{WRITTEN.name}: mutant {number} is found {text.count(find)} times")
        source, tests = text.replace(find, put), tuple(entry["tests"])
        yield Mutant("written", file, entry["name"], find, put, source, tests)


def mutants(target: str) -> list[Mutant]:
    return list(written_mutants() if target == "written" else mutants_of(target))


# ------------------------------------------------------------------------------------ running


class Workplace:
    """A copy of the sources and tests, where mutants are put in and run. What is compiled from
    mutated kernels stays there as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        os.environ["DRAFTAHEAD_CACHE"] = str(folder / "cache")

    def tests(self, names: Iterator[str] | tuple[str, ...] | list[str]) -> list[str]:
        paths = [name.replace("test_", "tests/test_", 1) for name in names]
        files = [p if "::" in p else p + ".py" for p in paths]
        return [p for p in files if (self.folder / p.partition("::")[0]).exists()]

    def run(self, tests: list[str], limits: list[int], log: Path | None = None) -> str:
        """'passed', 'failed' or 'too long'. In a child: nothing of it stays here. The first of the
        tests have a limit of their own, in seconds, and the others another. With a log, it runs the
        sources as they are, and leaves them compiled."""
        child = os.fork()
        if not child:
            try:
                os.setsid()
                sys.dont_write_bytecode = log is None
                code = self._pytest(tests, limits, log)
            except BaseException:
                traceback.print_exc()
                code = 99
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            return "too long"
        return "failed" if status else "passed"

    def _pytest(self, tests: list[str], limits: list[int], log: Path | None) -> int:
        import pytest

        out = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(self.folder)
        sys.path[:0] = [str(self.folder / "src"), str(self.folder / "tests")]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not model"]
        options += ["--assert=plain"]  # rewritten assertions tell more, and take time
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        # Most are caught by the first file: no more is loaded for those.
        for group, limit in zip((tests[:1], tests[1:]), limits, strict=True):
            signal.alarm(limit)
            if group and (code := pytest.main([*options, *group])):
                return int(code)
        return 0

    def normal(self, tests: list[str], log: Path) -> list[int]:
        """Limits for these tests, by what they take without a mutant."""
        found = []
        for group in (tests[:1], tests[1:]):
            start = time.perf_counter()
            if self.run(group, [3600, 0], log) != "passed":
                raise SystemExit(f"the tests fail without a mutant, see {log}: {' '.join(group)}")
            found.append(20 + int(LONGEST * (time.perf_counter() - start)))
        return found


def _preload() -> None:
    """What every test needs and no mutant changes: a child then starts at once."""
    import hypothesis.strategies
    import pytest
    import scipy.stats
    import torch

    torch.set_num_threads(1)  # threads would not outlive the fork
    import transformers
    from transformers.models.llama import modeling_llama

    _ = hypothesis.strategies, pytest, scipy.stats, transformers, modeling_llama
    _ = transformers.AutoModelForCausalLM, transformers.PreTrainedTokenizerFast


def _stamp(target: str, tests: list[str], folder: Path) -> str:
    """Of the tests: a result holds only as long as they are the same."""
    digest = hashlib.sha256()
    for path in tests:
        digest.update((folder / path.partition("::")[0]).read_bytes())
    return digest.hexdigest()[:12]


def run(
    names: list[str], results: Path, *, retry: bool, only: str, gate: list[str], every: int
) -> None:
    _preload()
    known, excused = read(results), equivalents()
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, results.open("a") as out:
        place = Workplace(Path(folder))
        normal: dict[tuple[str, ...], list[int]] = {}
        for target in names:
            group = [m for m in mutants(target) if only in f"{m.function} {m.before}"][::every]
            for number, mutant in enumerate(group, start=1):
                tests = place.tests(gate or mutant.tests or TARGETS[mutant.target][1])
                stamp = _stamp(target, tests, place.folder)
                key = (mutant.function, mutant.before, mutant.after)
                if key in excused and not retry:
                    continue
                before = known.get(mutant.name)
                if before and (before["outcome"] != "passed" and not retry):
                    continue  # caught is caught
                if before and before["stamp"] == stamp and not retry:
                    continue
                if tuple(tests) not in normal:
                    normal[tuple(tests)] = place.normal(tests, results.parent / "log")
                path = place.folder / mutant.file
                for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                    compiled.unlink()
                original = path.read_text("utf-8")
                path.write_text(mutant.source, "utf-8")
                start = time.perf_counter()
                try:
                    more = 0 if mutant.file.endswith(".py") else COMPILING
                    outcome = place.run(tests, [limit + more for limit in normal[tuple(tests)]])
                finally:
                    path.write_text(original, "utf-8")
                spent = time.perf_counter() - start
                line = mutant._asdict() | {"name": mutant.name, "stamp": stamp}
                del line["source"], line["tests"]
                line |= {"outcome": outcome, "seconds": round(spent, 2)}
                out.write(json.dumps(line) + "\n")
                out.flush()
                if outcome == "passed":
                    print(f"{target} {number}/{len(group)} survives:", flush=True)
                    print(shown(line), flush=True)


# ------------------------------------------------------------------------------------- reports


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The last result of every mutant."""
    lines = results.read_text("utf-8").splitlines() if results.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def shown(line: dict[str, Any]) -> str:
    return "\n".join([f"  {line['function']}", f"    - {line['before']}", f"    + {line['after']}"])


def equivalents() -> dict[tuple[str, str, str], str]:
    """(function, before, after) -> why no test can tell the two apart."""
    if not EQUIVALENT.exists():
        return {}
    entries = tomllib.loads(EQUIVALENT.read_text("utf-8")).get("equivalent", [])
    found = {}
    for entry in entries:
        pairs = entry.get("changes") or [[entry["before"], entry["after"]]]
        for before, after in pairs:
            found[entry["function"], before.strip("\n"), after.strip("\n")] = entry["why"]
    return found


def score(names: list[str], results: Path) -> int:
    """Prints the figures and what survives unexplained; returns how many do."""
    known, excused = read(results), equivalents()
    unexplained, unused = 0, set(excused)
    print(f"{'target':<12}{'mutants':>9}{'caught':>9}{'equivalent':>12}{'survive':>9}{'score':>9}")
    rows = []
    for target in names:
        counts: Counter[str] = Counter()
        for mutant in mutants(target):
            key = (mutant.function, mutant.before, mutant.after)
            unused.discard(key)
            line = known.get(mutant.name)
            if key in excused:
                counts["equivalent"] += 1
            elif line is None:
                counts["untried"] += 1
            elif line["outcome"] != "passed":
                counts["caught"] += 1
            else:
                counts["survive"] += 1
                rows.append(f"{target}\n{shown(line)}")
        total = counts["caught"] + counts["survive"]
        part = f"{counts['caught'] / total:.1%}" if total else "-"
        print(
            f"{target:<12}{sum(counts.values()):>9}{counts['caught']:>9}"
            f"{counts['equivalent']:>12}{counts['survive']:>9}{part:>9}"
            + (f"  ({counts['untried']} not tried)" if counts["untried"] else "")
        )
        unexplained += counts["survive"]
    for row in rows:
        print(row)
    if len(names) > len(TARGETS):
        for function, before, after in sorted(unused):
            print(f"explained, but not there: {function}\n    - {before}\n    + {after}")
    return unexplained


def explained() -> str:
    """The equivalent mutants, as a list for docs/adr/mutation-gate.md."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for (function, before, after), why in equivalents().items():
        groups.setdefault((function, why), []).append((before, after))
    lines = []
    for (function, why), pairs in sorted(groups.items()):
        lines.append(f"- `{function}`: {why}")
        lines += [f"  - `{before}` -> `{after}`" for before, after in pairs]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = [*TARGETS, "written"]
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(known)}")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--score", action="store_true", help="show the figures, run nothing")
    parser.add_argument("--explained", action="store_true", help="list the equivalent ones")
    parser.add_argument("--retry", action="store_true", help="run those with a result again")
    parser.add_argument("--only", default="", help="with this text in function or statement")
    parser.add_argument("--tests", default="", help="these test files instead, by comma")
    parser.add_argument("--every", type=int, default=1, help="only each so many-th mutant")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if wrong := [name for name in given.targets if name not in known]:
        parser.error(f"no such target: {', '.join(wrong)}")
    names = given.targets or known
    if given.explained:
        print(explained())
        return 0
    if given.list:
        for mutant in (m for name in names for m in mutants(name)):
            print(shown(mutant._asdict()))
        return 0
    gate = [name for name in given.tests.split(",") if name]
    if not given.score:
        run(names, given.results, retry=given.retry, only=given.only, gate=gate, every=given.every)
    return int(score(names, given.results) > 0)


if __name__ == "__main__":
    sys.exit(main())
