"""Reads of parameters in generated functions, through the tables of their modules.

Python looks for `module.weight` in the class, its bases and the instance, and then calls
`nn.Module.__getattr__`. A look-up in the table of parameters takes a fifth of that time. Generated
source reads like the model's own, `module.weight`; what is compiled from it has calls of `read`.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from types import CodeType
from typing import Any

READ = "_peftc_read"  # no model's code has a variable of this name
_NONE: dict[str, Any] = {}


def read(module: Any, name: str) -> Any:
    """`module.name`. What replaces a parameter (a parametrization, a replica) removes its entry."""
    parameters: dict[str, Any] = getattr(module, "_parameters", _NONE)
    return parameters[name] if name in parameters else getattr(module, name)


def compile_reads(source: str, filename: str, reads: Set[str]) -> CodeType:
    """The code of `source`, in which the expressions `reads` are calls of `read`. Lines stay."""
    return compile(_Reads(reads).visit(ast.parse(source)), filename, "exec")


class _Reads(ast.NodeTransformer):
    def __init__(self, reads: Set[str]) -> None:
        self.reads, self.names = reads, {text.rpartition(".")[2] for text in reads}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_read = isinstance(node.ctx, ast.Load) and node.attr in self.names and ast.unparse(node) in self.reads
        if not is_read:
            return self.generic_visit(node)
        call = ast.Call(ast.Name(READ, ast.Load()), [node.value, ast.Constant(node.attr)], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))
