"""Small edits of the functions of a file: one comparison flipped, one call dropped, and so on.

An edit replaces one piece of the source text, so that its diff is one that a person would read.
Annotations, decorators, docstrings, messages of errors and f-strings are left alone.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
MOVED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
UNSEEN = frozenset({"annotation", "returns", "decorator_list", "type_comment", "msg", "bases"})
"""Fields of nodes in which nothing is edited."""


@dataclass(frozen=True, slots=True)
class SmallEdit:
    """`start`, `end`: bytes of the file. `function`: as `Proposer.decide`."""

    file: str
    function: str
    kind: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def diff(self, source: str) -> str:
        before, after = source.splitlines(), self.applied(source).splitlines()
        lines = difflib.unified_diff(before, after, self.file, self.file, n=1, lineterm="")
        return "\n".join(lines)

    @property
    def rank(self) -> str:
        """Orders the edits of a function by what they are, wherever it stands in the file."""
        what = f"{self.file}|{self.function}|{self.kind}|{self.old}|{self.new}"
        return hashlib.sha256(what.encode()).hexdigest()


def edits_of(source: str, file: str, lines: Iterable[int] | None = None) -> list[SmallEdit]:
    """All edits of the functions that have one of `lines`; None: of all functions."""
    wanted = None if lines is None else set(lines)
    starts, total = [0], 0
    for line in source.splitlines(keepends=True):
        total += len(line.encode())
        starts.append(total)
    found = list[SmallEdit]()
    data = source.encode()
    for name, function in _functions(ast.parse(source), ""):
        own = range(function.lineno, (function.end_lineno or function.lineno) + 1)
        if wanted is not None and wanted.isdisjoint(own):
            continue
        for kind, node, new in _of_function(function):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            old = data[begin:end].decode()
            found.append(SmallEdit(file, name, kind, node.lineno, begin, end, old, new))
    return found


def choose(
    edits: Sequence[SmallEdit], most: int, source_of: Callable[[str], str]
) -> list[SmallEdit]:
    """At most `most`, the same ones every time: of each function in turn, in an order that depends
    on their content alone. In the order of the files then."""
    by_function = defaultdict[tuple[str, str], list[SmallEdit]](list)
    for edit in edits:
        by_function[(edit.file, edit.function)].append(edit)
    ordered = [sorted(each, key=lambda edit: edit.rank) for each in by_function.values()]
    ordered.sort(key=lambda each: each[0].rank)
    turns = (edit for turn in zip_longest(*ordered) for edit in turn if edit is not None)
    programs = (edit for edit in turns if is_another_program(edit, source_of(edit.file)))
    chosen = list(islice(programs, most))
    return sorted(chosen, key=lambda edit: (edit.file, edit.start, edit.rank))


def _functions(tree: ast.AST, above: str) -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        name = above
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{above}.{node.name}" if above else node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        yield from _functions(node, name)


def _of_function(function: Function) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """The kind of each edit, the node whose text is replaced, and the new text."""
    for statement in _body(function):
        for node in _seen(statement):
            if isinstance(node, ast.stmt):
                yield from _of_statement(node, function)
            elif isinstance(node, ast.expr):
                yield from _of_expression(node)


def _body(function: Function) -> list[ast.stmt]:
    first = function.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.body[1:] if text else function.body


def _seen(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in which edits make sense, without those of inner functions and classes."""
    if isinstance(node, (*SCOPES[:3], ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    yield node
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field not in UNSEEN:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _seen(each)


def _of_statement(
    node: ast.stmt, function: Function
) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    if kind := _dropped(node):
        yield kind, node, "pass"
    match node:
        case ast.AugAssign(target, operator, value) if other := OPERATORS.get(type(operator)):
            yield "operator changed", node, ast.unparse(ast.AugAssign(target, other(), value))
        case ast.If(test=test) | ast.While(test=test):
            yield "condition negated", test, f"(not ({ast.unparse(test)}))"
    if node in _body(function)[1:] and not isinstance(node, ast.Return | ast.Raise):
        value = function.returns
        if isinstance(value, ast.Constant) and value.value is None:
            yield "early return", node, "return"


def _dropped(node: ast.stmt) -> str:
    """What it is to leave this statement out; empty: that is no edit."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            return "call dropped"
        case ast.Raise(exc=exc) if exc is not None:
            return "raise dropped"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            return "assignment dropped"
        case ast.Break() | ast.Continue() | ast.Return(value=None):
            return f"{type(node).__name__.lower()} dropped"
    return ""


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left, operators, others):
            yield from _of_comparison(node, left, operators, others)
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "and/or swapped", node, f"({ast.unparse(ast.BoolOp(other, values))})"
            for index in range(len(values)):
                left = [value for at, value in enumerate(values) if at != index]
                rest = left[0] if len(left) == 1 else ast.BoolOp(operator, left)
                yield "condition dropped", node, f"({ast.unparse(rest)})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "not dropped", node, f"({ast.unparse(operand)})"
        case ast.IfExp(test, body, orelse):
            yield "branches swapped", node, f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.BinOp(left, operator, right) if other := OPERATORS.get(type(operator)):
            yield "operator changed", node, f"({ast.unparse(ast.BinOp(left, other(), right))})"
        case ast.Call(func=ast.Name(name)) if name in SWAPPED:
            yield "function swapped", node.func, SWAPPED[name]
        case ast.Constant(value=bool() | int() | float()):
            yield "constant changed", node, _another(node.value)


def _another(value: float) -> str:
    if isinstance(value, bool):
        return str(not value)
    return repr(value + 1 if isinstance(value, int) else value * 2 + 1)


def _of_comparison(
    node: ast.Compare, left: ast.expr, operators: list[ast.cmpop], others: list[ast.expr]
) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    for index, operator in enumerate(operators):
        for kind, table in (("comparison flipped", FLIPPED), ("boundary moved", MOVED)):
            if other := table.get(type(operator)):
                changed = [*operators[:index], other(), *operators[index + 1 :]]
                yield kind, node, ast.unparse(ast.Compare(left, changed, others))


def is_another_program(edit: SmallEdit, source: str) -> bool:
    """And one that compiles: `return` is a fault where the function yields a value, for example."""
    try:
        changed = ast.parse(edit.applied(source))
        compile(changed, edit.file, "exec")
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))
