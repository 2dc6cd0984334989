"""The syntax tree of a function, and what stands around an expression in it."""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Mapping
from itertools import chain
from types import CodeType, FunctionType
from typing import cast


def syntax_tree(function: FunctionType) -> ast.Module:
    """Raises: OSError, TypeError, SyntaxError without source."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    source = "".join(lines[code.co_firstlineno - 1 : last_line(code)])
    try:
        # `inspect.getsource` reads tokens up to the end of the function, in ten times as long.
        tree = ast.parse(textwrap.dedent(source))
        if len(tree.body) == 1 and isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
            return tree
    except SyntaxError:  # the last statement goes on behind the last instruction
        pass
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def parents_in(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    """The parent of each node but the root, in the order of `ast.walk`."""
    parents: dict[ast.AST, ast.AST] = {}
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        for child in ast.iter_child_nodes(node):
            parents[child] = node
            nodes.append(child)
    return parents


def last_line(code: CodeType) -> int:
    """The last line of a function that has instructions."""
    inner = (last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max(chain((end or 0 for _, end, _, _ in code.co_positions()), inner), default=0)


def name_in_loop(sequence: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> str:
    """The name that a loop over some written values, or over a `zip` of them, has for each."""
    owner, index = parents.get(sequence), None
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "zip":
        index = owner.args.index(cast(ast.expr, sequence)) if sequence in owner.args else None
        sequence, owner = owner, parents.get(owner)
    if not isinstance(owner, ast.For | ast.comprehension) or owner.iter is not sequence:
        return ""
    target = owner.target
    if index is not None:
        target = target.elts[index] if isinstance(target, ast.Tuple) and index < len(target.elts) else None
    return target.id if isinstance(target, ast.Name) else ""


def is_called(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether an expression is called."""
    parent = parents.get(node)
    return isinstance(parent, ast.Call) and parent.func is node
