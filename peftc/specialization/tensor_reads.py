"""Reads of parameters in generated functions, through the tables of their modules.

Python looks for `module.weight` in the class, its bases and the instance, and then calls
`nn.Module.__getattr__`. A look-up in the table of parameters takes a fifth of that time. Generated
source reads like the model's own, `module.weight`; what is compiled from it has calls of `read`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from types import CodeType
from typing import Any

from torch import fx

from peftc.modules.base_values import BASE_VALUES
from peftc.modules.packed import is_stand_in, unpacked_weight

READ = "_peftc_read"  # no model's code has a variable of this name
_NONE: dict[str, Any] = {}
_PLACE = ("lineno", "col_offset", "end_lineno", "end_col_offset")


def read(module: Any, name: str) -> Any:
    """`module.name`. What replaces a parameter (a parametrization, a replica) removes its entry. A
    module with base values has properties, which know what acts.
    """
    parameters: dict[str, Any] = getattr(module, "_parameters", _NONE)
    if name in parameters and BASE_VALUES not in module.__dict__:
        return parameters[name]
    return getattr(module, name)


def compile_reads(source: str, filename: str, reads: Set[str]) -> CodeType:
    """The code of `source`, in which the expressions `reads` are calls of `read`. Lines stay."""
    return compile(_Reads(reads).visit(ast.parse(source)), filename, "exec")


def renamed_code(code: CodeType, attributes: Mapping[str, str], filename: str) -> CodeType:
    """Code with other names of attributes. The columns of its lines stay."""
    inner = [renamed_code(c, attributes, filename) if isinstance(c, CodeType) else c for c in code.co_consts]
    names = [attributes.get(name, name) for name in code.co_names]
    return code.replace(co_consts=tuple(inner), co_names=tuple(names), co_filename=filename)


class _Reads(ast.NodeTransformer):
    def __init__(self, reads: Set[str]) -> None:
        self.reads, self.names = reads, {text.rpartition(".")[2] for text in reads}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_read = isinstance(node.ctx, ast.Load) and node.attr in self.names and _text(node) in self.reads
        if not is_read:
            return self.generic_visit(node)
        place = {name: getattr(node, name) for name in _PLACE}
        function, name = ast.Name(READ, ast.Load(), **place), ast.Constant(node.attr, **place)
        return ast.Call(function, [node.value, name], [], **place)


def _text(node: ast.expr) -> str:
    """As `ast.unparse`, which takes longer for what is mostly a dotted name."""
    if isinstance(node, ast.Attribute):
        return f"{_text(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def unpack_weights(graph: fx.Graph) -> None:
    """Lets the code of packed Linears, and edits of their weights, read the matrix that the weight
    stands for. It is unpacked once for each call.
    """
    unpacked: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and is_stand_in(node.meta.get("example")):
            if node.target not in unpacked:
                with graph.inserting_before(node):
                    module = graph.get_attr(str(node.target).rpartition(".")[0] or "_self")
                    arguments = (module, node.meta["example"].dtype)
                    unpacked[node.target] = graph.call_function(unpacked_weight, arguments)
                unpacked[node.target].meta |= node.meta
            node.replace_all_uses_with(unpacked[node.target])
            graph.erase_node(node)
