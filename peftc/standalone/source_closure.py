"""The source of functions of peftc, with all that they use."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from types import ModuleType
from typing import Any

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.runtime import respecialize
from peftc.runtime.fused_low_rank import fused_low_rank_linear

# What functions of peftc call to refuse something, or to run a kernel, without the package.
_OTHERS: dict[Any, str] = {
    PeftcError: "class PeftcError(RuntimeError):\n    pass",
    Diagnostic: 'def Diagnostic(code, message, *_, **__):\n    return f"{code}: {message}"',
    respecialize: (
        "def respecialize(module, *args, **kwargs):\n"
        '    message = f"this file has no code for such a call of {type(module).__name__}"\n'
        '    raise RuntimeError(f"{message}: it was made for ordinary calls of the model")'
    ),
    fused_low_rank_linear: "def fused_low_rank_linear(*_):\n    return None",
}


class SourceClosure:
    """Collects definitions and imports, each under one name.

    Attributes:
        definitions: the source of what peftc defines, by name, each after what it uses.
        imports: the statements that import all else, by name.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, str] = {}
        self.imports: dict[str, str] = {}
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Adds a value that code uses under a name. Raises: P570 if it has no source to copy."""
        if name in self.values:
            if self.values[name] is not value:
                raise refusal(f"its code uses two things by the name `{name}`")
            return
        self.values[name] = value
        if value in _OTHERS if callable(value) else False:
            self.definitions[name] = _OTHERS[value]
        elif isinstance(value, ModuleType):
            self.imports[name] = f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        elif hasattr(value, "__module__") and hasattr(value, "__qualname__"):
            self._add_definition(name, value)
        else:
            self.definitions[name] = f"{name} = {_literal(name, value)}"

    def _add_definition(self, name: str, value: Any) -> None:
        if not value.__module__.startswith("peftc."):
            self.imports[name] = import_of(name, value)
            return
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(value)))
        except (OSError, TypeError):
            raise refusal(f"`{value.__qualname__}` has no source") from None
        tree = ast.parse(source)
        own = vars(sys.modules[value.__module__])
        for used in _global_names(tree):
            if used != name and used in own:
                self.add(used, own[used])
        self.definitions[name] = ast.unparse(_without_annotations(tree))


def import_of(name: str, value: Any) -> str:
    """The statement that imports a function or a class under a name.

    Raises: P570 for one that is defined in a function, or not by torch, transformers or Python.
    """
    module, path = value.__module__, value.__qualname__
    if getattr(sys.modules.get(module), value.__name__, None) is value:  # a function of C++ has any qualified name
        path = value.__name__
    root = module.partition(".")[0]
    if root not in ("torch", "transformers", *sys.stdlib_module_names) or module == "__main__":
        raise refusal(f"its code is of `{module}`, not of torch or transformers")
    if module == "builtins" or "." in path or getattr(sys.modules[module], path, None) is not value:
        raise refusal(f"`{path}` of `{module}` cannot be imported by its name")
    return f"from {module} import {path}" + ("" if path == name else f" as {name}")


def refusal(reason: str) -> PeftcError:
    return PeftcError(Diagnostic("P570", f"the model cannot be saved to run without peftc: {reason}"))


def _literal(name: str, value: Any) -> str:
    text = f"frozenset({sorted(value)!r})" if isinstance(value, frozenset) else repr(value)  # pyright: ignore
    try:
        is_literal = eval(text, {"__builtins__": {"frozenset": frozenset}}) == value  # of peftc's own constants
    except Exception:
        is_literal = False
    if not is_literal:
        raise refusal(f"the constant `{name}` has no source")
    return text


def _global_names(tree: ast.AST) -> dict[str, None]:
    """The names that code reads and does not bind, but those of Python and of annotations."""
    nodes = list(ast.walk(_without_annotations(tree)))
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    read = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return dict.fromkeys(name for name in read if name not in bound and not hasattr(builtins, name))


class _Annotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _without_annotations(tree: ast.AST) -> ast.AST:
    copy = ast.parse(ast.unparse(tree))
    return ast.fix_missing_locations(_Annotations().visit(copy))
