"""The words of the package: operations of PyTorch are named in one file, and results are named for
what they are.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
CODE = [
    path for folder in ("tests", "benchmarks", "examples", "tools") for path in sorted((ROOT / folder).rglob("*.py"))
]
FILES = [path for path in sorted((ROOT / "peftc").rglob("*.py")) if "forms" not in path.relative_to(ROOT).parts]

OPERATIONS = frozenset(
    name
    for owner in (torch.Tensor, torch, nn.functional, operator)
    for name in dir(owner)
    if not name.startswith("_") and callable(getattr(owner, name))
) - {"int", "float", "bool"}  # types, too
MODULES = frozenset({"torch", "operator", "nn", "functional", "F"})
# Where the names of operations stand, and why.
VOCABULARY = {
    "peftc/dataflow/operations.py": "the vocabulary",
    "peftc/equations/primitives.py": "the primitives of the language",
    "peftc/tracing/in_place.py": "how in-place operators are printed",
    "peftc/tracing/patches.py": "functions and context managers that a trace patches",
    "peftc/specialization/expressions.py": "how operators are printed",
    "peftc/verification/forward_modes.py": "functions that draw numbers; verification shares no code with the rewriter",
}
LEAST = 3  # operations side by side are a table

BANNED = frozenset({"found", "made", "given", "told", "said", "kept", "handed", "placed"})


def collections_in(tree: ast.AST) -> Iterator[tuple[int, list[ast.expr]]]:
    """The elements of each literal collection, and the keys of each dictionary."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            yield node.lineno, node.elts
        elif isinstance(node, ast.Dict):
            yield node.lineno, [key for key in node.keys if key is not None]


def is_operation(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str(name)):
            return name.removesuffix("_") in OPERATIONS
        case ast.Attribute(value=owner, attr=name):
            owner = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            return owner in MODULES and name in OPERATIONS
        case _:
            return False


def tables(text: str) -> list[int]:
    """The lines on which collections of operations begin."""
    return [
        line
        for line, elements in collections_in(ast.parse(text))
        if len(elements) >= LEAST and all(map(is_operation, elements))
    ]


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a file binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_operations_are_named_in_the_vocabulary(path: Path) -> None:
    if name_of(path) not in VOCABULARY:
        assert not tables(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [*FILES, *CODE], ids=name_of)
def test_results_are_named_for_what_they_are(path: Path) -> None:
    names = definitions(ast.parse(path.read_text(encoding="utf-8")))
    assert not [(line, name) for line, name in names if name.strip("_") in BANNED]


@pytest.mark.parametrize(
    "text",
    [
        '{"view", "reshape", "flatten"}',
        "frozenset({'add', 'add_', 'mul'})",
        "(torch.matmul, torch.bmm, operator.matmul)",
        "[nn.functional.softmax, torch.softmax, 'softmax']",
        "{operator.add: 1, operator.sub: 2, operator.mul: 3}",
    ],
)
def test_tables_are_recognised(text: str) -> None:
    assert tables(f"T = {text}") == [1]


@pytest.mark.parametrize(
    "text", ["('q', 'k', 'v')", "{'view', 'reshape'}", "(torch.float16, torch.bfloat16, torch.half)"]
)
def test_others_are_none(text: str) -> None:
    assert tables(f"T = {text}") == []


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "def given(): ...",
        "class C:\n    told: int",
        "for made in x: ...",
        "f = lambda said: 1",
        "x.kept = 1",
    ],
)
def test_banned_names_are_recognised(text: str) -> None:
    assert {name for _, name in definitions(ast.parse(text))} & BANNED


def test_every_exception_is_needed() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in VOCABULARY}
    assert {name for name, text in texts.items() if tables(text) or "_NAMES = {" in text} == set(VOCABULARY)
