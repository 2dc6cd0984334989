"""Faults: a place in a source file, its text, and the replacement."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
NAMES = {"all": "any", "any": "all", "min": "max", "max": "min"}


@dataclass(frozen=True)
class Fault:
    """Characters `start` to `end` of a file, the text `before`, become `after`."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str
    function: str
    number: int = 0  # among the faults of the function with the same text

    @property
    def key(self) -> str:
        """Stable as long as the function does not change around it."""
        number = f" ({self.number + 1})" if self.number else ""
        return f"{self.path}::{self.function}: {self.before} -> {self.after}{number}"

    def applied(self, text: str) -> str:
        assert text[self.start : self.end] == self.before, self.key
        return text[: self.start] + self.after + text[self.end :]


class Finder(ast.NodeVisitor):
    """All faults of one file. Annotations, texts and docstrings are left alone: only a type checker
    or a reader would notice.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.faults = path, text, list[Fault]()
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.bytes = [line.encode() for line in text.splitlines()]
        self.names: list[str] = []

    def at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + len(self.bytes[line - 1][:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def add(self, start: int, end: int, after: str, line: int) -> None:
        where = ".".join(self.names) or "module"
        fault = Fault(self.path, line, start, end, self.text[start:end], after, where)
        same = sum(replace(f, line=line, start=start, end=end, number=0) == fault for f in self.faults)
        self.faults.append(replace(fault, number=same))

    def between(self, left: ast.AST, right: ast.AST, before: str, after: str) -> None:
        """Replaces an operator between two operands."""
        start, stop = self.span(left)[1], self.span(right)[0]
        at = self.text.find(before, start, stop)
        if at >= 0 and "#" not in self.text[start:stop]:
            self.add(at, at + len(before), after, self.text.count("\n", 0, at) + 1)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and self.names:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        start, end = self.span(node.test)
        self.add(start, end, f"not ({self.text[start:end]})", node.lineno)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            self.between(left, right, *COMPARISONS[type(op)])
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, *words)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(n, ast.JoinedStr | ast.Constant) and not is_number(n) for n in (node.left, node.right))
        if type(node.op) in ARITHMETIC and not texts:
            self.between(node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = self.span(node)
            self.add(start, end, self.text[start + len("not ") : end], node.lineno)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self.span(node)
        if isinstance(node.value, bool):
            self.add(start, end, str(not node.value), node.lineno)
        elif is_number(node) and self.names:
            self.add(start, end, f"({self.text[start:end]} + 1)", node.lineno)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        """A pattern is no expression."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in NAMES:
            self.add(*self.span(node), NAMES[node.id], node.lineno)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self.names:
            self.add(*self.span(node), "pass", node.lineno)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self.add(*self.span(node), "pass", node.lineno)
        if node.exc is not None and not isinstance(node.exc, ast.Call):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """The texts of a diagnostic are for readers."""
        if not (isinstance(node.func, ast.Name) and node.func.id in ("Diagnostic", "replace", "register", "Param")):
            self.generic_visit(node)


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def faults_of(root: Path) -> Iterator[Fault]:
    """Every fault of the package, in the order of files."""
    for path in sorted((root / "peftc").rglob("*.py")):
        finder = Finder(str(path.relative_to(root)), text := path.read_text(encoding="utf-8"))
        finder.visit(ast.parse(text))
        yield from finder.faults


def sampled_faults(root: Path, count: int, seed: int, before: Collection[str] = ()) -> list[Fault]:
    """A sample: each package in proportion to its faults, none without some, at most one fault a
    function.

    `before`: the keys of an earlier sample. Those that still exist stay, so that a change of the
    sources draws few new ones.
    """
    rooms: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults_of(root):
        rooms[room(fault)].append(fault)
    total, sample = sum(map(len, rooms.values())), list[Fault]()
    for name, faults in sorted(rooms.items()):
        random.Random(f"{seed}/{name}").shuffle(faults)
        faults.sort(key=lambda fault: fault.key not in before)
        by_function = {(fault.path, fault.function): fault for fault in reversed(faults)}
        quota = max(5, round(count * len(faults) / total), sum(fault.key in before for fault in faults))
        sample += [fault for fault in faults if by_function[fault.path, fault.function] is fault][:quota]
    return sorted(sample, key=lambda fault: (fault.path, fault.start))


def room(fault: Fault) -> str:
    """The package of a fault."""
    parts = fault.path.split("/")
    return parts[1] if len(parts) > 2 else "peftc"
