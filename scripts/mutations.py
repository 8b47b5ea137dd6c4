"""The small changes that scripts/mutate.py tries: of one node of a module's syntax tree each."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
# A function or an attribute becomes another.
OTHERS = {
    "ACCEPT": "TARGET",
    "TARGET": "DRAFT",
    "DRAFT": "ACCEPT",
    "append": "pop",
    "isfinite": "isnan",
}
for _pair in ("min max", "amin amax", "argmin argmax", "minimum maximum", "any all"):
    _one, _other = _pair.split()
    OTHERS |= {_one: _other, _other: _one}
# x.name(...) becomes x.
SKIPPED_METHODS = {
    *("clamp", "nan_to_num", "clone", "where", "log", "exp", "softmax", "cumsum", "amin", "amax"),
    *("minimum", "maximum", "masked_fill", "copy", "abs"),
}
# name(x) becomes x.
SKIPPED_FUNCTIONS = {"sorted", "set", "list", "tuple", "abs", "min", "max", "reversed"}

Change = Callable[[Any], ast.AST]  # a node of a fresh copy -> what stands in its place


class Mutation(NamedTuple):
    """One change, named so that the name outlives shifts of lines."""

    function: str  # qualified name in its module
    before: str  # the statement, or its head
    after: str
    source: str  # the whole changed module


def mutations(source: str) -> Iterator[Mutation]:
    """Every change of a module, in the order of its lines."""
    module = ast.parse(source)
    nodes = list(ast.walk(module))
    same: Counter[tuple[str, str, str]] = Counter()
    for place in sorted(_places(module), key=lambda p: getattr(nodes[p.index], "lineno", 0)):
        for number, _ in enumerate(_changes(nodes[place.index], place.drops)):
            fresh = copy.deepcopy(module)
            walked = list(ast.walk(fresh))
            node, statement = walked[place.index], walked[place.statement]
            before = _head(statement)
            new = list(_changes(node, place.drops))[number](node)
            if new is not node:
                _replace(fresh, node, new)
            ast.fix_missing_locations(fresh)
            after = _head(new if node is statement else statement)
            same[place.function, before, after] += 1
            if (count := same[place.function, before, after]) > 1:
                after += f"  # {count}"
            yield Mutation(place.function, before, after, ast.unparse(fresh) + "\n")


# ------------------------------------------------------------------------- the changes of a node


def _changes(node: Any, drops: bool) -> Iterator[Change]:
    """`drops`: a statement that may be left out."""
    match node:
        case ast.Constant(value=bool(value)):
            yield _set(value=not value)
        case ast.Constant(value=int(value)):
            yield _set(value=value + 1)
            if value:
                yield _set(value=value - 1)
        case ast.Constant(value=float(value)):
            yield _set(value=1.0 if value == 0 else 0.0 if value == 1 else 2 * value)
        case ast.Compare():
            for at, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    yield _item("ops", at, other())
        case ast.BinOp() | ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield _set(op=ARITHMETIC[type(node.op)]())
            if isinstance(node, ast.BinOp):
                yield lambda found: found.left
                yield lambda found: found.right
        case ast.BoolOp():
            yield _set(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
            yield from (_item("values", at) for at in range(len(node.values)))
        case ast.UnaryOp(operand=ast.Constant(value=value)):
            yield _set(operand=ast.Constant(value + 1))  # the others: the same dimension, mostly
        case ast.UnaryOp():
            yield lambda found: found.operand
        case ast.IfExp():
            yield lambda found: found.body
            yield lambda found: found.orelse
        case ast.If():
            yield _set(test=ast.Constant(True))
            yield _set(test=ast.Constant(False))
        case ast.While():
            yield _set(test=ast.Constant(False))
        case ast.Slice():
            yield from _sliced(node)
        case ast.comprehension():
            yield from (_item("ifs", at) for at in range(len(node.ifs)))
        case ast.Call():
            yield from _called(node)
        case ast.Name(id=name) if name in OTHERS:
            yield _set(id=OTHERS[name])
        case ast.Attribute(attr=name) if name in OTHERS:
            yield _set(attr=OTHERS[name])
        case ast.Break():
            yield lambda found: ast.Continue()
    if drops:
        yield lambda found: ast.Pass()


def _sliced(node: ast.Slice) -> Iterator[Change]:
    for side in ("lower", "upper"):
        bound = getattr(node, side)
        if bound is None:
            continue
        yield _set(**{side: None})
        if not isinstance(bound, ast.Constant):
            for op in (ast.Add, ast.Sub):
                moved = ast.BinOp(copy.deepcopy(bound), op(), ast.Constant(1))
                yield _set(**{side: moved})


def _called(node: ast.Call) -> Iterator[Change]:
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    is_method = isinstance(function, ast.Attribute)
    of_torch = is_method and ast.unparse(function.value) == "torch"
    if name == "where" and of_torch and len(node.args) == 3:  # torch.where(condition, one, other)
        condition, one, other = node.args
        yield _set(args=[condition, other, one])
        yield lambda call: call.args[1]
        yield lambda call: call.args[2]
    elif name == "where" and is_method and len(node.args) == 2:  # one.where(condition, other)
        yield lambda call: call.args[1]
    if is_method and not of_torch and name in SKIPPED_METHODS:
        yield lambda call: call.func.value
    if not is_method and name in SKIPPED_FUNCTIONS and len(node.args) == 1:
        yield lambda call: call.args[0]
    if name == "clamp":
        yield from (_item("keywords", at) for at in range(len(node.keywords)))


def _set(**fields: Any) -> Change:
    def change(node: Any) -> ast.AST:
        for name, value in fields.items():
            setattr(node, name, value)
        return node

    return change


def _item(field: str, at: int, *new: ast.AST) -> Change:
    """Replaces one item of a list, or leaves it out."""

    def change(node: Any) -> ast.AST:
        getattr(node, field)[at : at + 1] = new
        return node

    return change


# ------------------------------------------------------------------- which nodes may be changed


class _Place(NamedTuple):
    index: int  # of the node, in the order of ast.walk
    function: str
    statement: int  # index of the statement that holds it
    drops: bool  # whether it is a statement that may be left out


def _places(module: ast.Module) -> list[_Place]:
    index = {id(node): at for at, node in enumerate(ast.walk(module))}
    found: list[_Place] = []

    def visit(node: ast.AST, function: str, statement: int, bound: set[str]) -> None:
        if _is_skipped(node):
            return
        dropped = ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete
        drops = isinstance(node, dropped)
        if isinstance(node, ast.stmt):
            statement = index[id(node)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.FunctionDef):
            bound = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
        if isinstance(node, ast.Assign):  # of what has a value already
            stored = [n for target in node.targets for n in ast.walk(target)]
            names = {
                n.id for n in stored if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            # Without an attribute that __init__ sets every test fails.
            drops = names <= bound and bool(function) and not function.endswith("__init__")
            bound |= names
        found.append(_Place(index[id(node)], function, statement, drops))
        if isinstance(node, ast.Raise):  # what is below it only words an error
            return
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            return  # -1 is one constant
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function, statement, bound)

    visit(module, "", -1, set())
    return [place for place in found if place.statement >= 0]


def _is_skipped(node: ast.AST) -> bool:
    """Types, docstrings, assertions, and what only words an error."""
    match node:
        case (
            ast.Assert()
            | ast.Import()
            | ast.ImportFrom()
            | ast.JoinedStr()
            | ast.AnnAssign(value=None)
        ):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If():
            return ast.unparse(node.test) == "TYPE_CHECKING"
        case ast.keyword(arg="strict"):  # of zip: an assertion as well
            return True
        case ast.ClassDef():
            return any(ast.unparse(base) == "Protocol" for base in node.bases)
    return False


def _head(statement: Any) -> str:
    """A statement's source on one line, without the block below it."""
    bare = copy.copy(statement)
    for block in ("body", "orelse", "finalbody", "handlers"):
        if isinstance(getattr(bare, block, None), list):
            setattr(bare, block, [ast.Pass()] if block == "body" else [])
    ast.fix_missing_locations(bare)
    return ast.unparse(bare).removesuffix("\n    pass")


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
                return
            if isinstance(value, list) and any(item is old for item in value):
                setattr(node, name, [new if item is old else item for item in value])
                return
