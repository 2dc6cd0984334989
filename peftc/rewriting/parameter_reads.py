"""Parameters of a child that a module's own code reads: `F.linear(x, self.fc.weight)` beside `self.fc(x)`.

Such code may call the child today and compute with its weight tomorrow (without gradients, in evaluation, for a long input), and one trace
shows one of the two. An edit that stood in the child alone would be bypassed by the other, so it stands in the module that reads.

The code is looked at and not run: the `forward` of the class and of its parent classes, and what it names of its own class and of its
own file. What asks for the kind of a parameter (`self.fc.weight.dtype`) does not compute with it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from peftc.model.instance_forward import instance_forward
from peftc.tracing.calls import innermost

ANY = "*"  # in the place of an index, or of a name that the code computes
QUESTIONS = frozenset({"is_grad_enabled", "requires_grad", "is_inference_mode_enabled", "training"})
METADATA = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda"})
INSPECTING = frozenset({"isinstance", "hasattr", "id", "type"})


@dataclass(frozen=True)
class ParameterRead:
    """`names`: the attributes that lead to the parameter. `rooted`: from the module itself, else from what nobody can tell.

    `asks`: its function asks for gradients or for the mode, too.
    """

    names: tuple[str, ...]
    rooted: bool
    asks: bool

    def of(self, parameter: str) -> bool:
        """Whether this may be a parameter of that dotted name."""
        path = parameter.split(".")
        if len(path) < len(self.names) or (self.rooted and len(path) != len(self.names)):
            return False
        tail = path[len(path) - len(self.names) :]
        return all(name in (ANY, own) for name, own in zip(self.names, tail, strict=True))


def parameter_reads(module: nn.Module, parameters: Collection[str]) -> Iterator[ParameterRead]:
    """How the code of a module may read some parameters of its children (dotted names in it)."""
    last = frozenset(name.rpartition(".")[2] for name in parameters)
    for forward in forwards(module) if last else ():
        yield from (read for read in reads_of(forward, type(module), last) if any(map(read.of, parameters)))


def own_parameters(module: nn.Module, prefix: str, recurse: bool = False) -> list[str]:
    """The names of a module's parameters, of its children's too if `recurse`, under a prefix; each tied one under all of its names."""
    named = module.named_parameters(prefix, recurse, remove_duplicate=False)
    return [name for name, _ in named]


def forwards(module: nn.Module) -> Iterator[FunctionType]:
    """The forwards that a call of a module may run, behind what wraps them: its own, and those of its classes."""
    own = instance_forward(module)
    functions = [own.function] if own is not None else []
    functions += [vars(c)["forward"] for c in type(module).__mro__ if c is not nn.Module and "forward" in vars(c)]
    yield from (plain for function in functions if (plain := plain_function(function)) is not None)


def plain_function(value: Any) -> FunctionType | None:
    """The function behind a method, a property or what wraps it."""
    value = value.fget if isinstance(value, property) else value
    value = innermost(getattr(value, "__func__", value))
    return value if isinstance(value, FunctionType) else None


@cache
def reads_of(forward: FunctionType, cls: type[nn.Module], last: frozenset[str]) -> tuple[ParameterRead, ...]:
    """The reads of parameters with one of the `last` names, in a forward and in what it names."""
    todo, seen, reads = [(forward, True)], {forward}, dict[ParameterRead, None]()
    while todo:
        function, method = todo.pop()
        words = set(words_of(function.__code__))
        if words & last:
            first = function.__code__.co_varnames[0] if method and function.__code__.co_argcount else ""
            reads |= dict.fromkeys(reads_in(function, first, last, bool(words & QUESTIONS)))
        for word in sorted(words):
            other, inside = named_by(word, function, cls)
            if other is not None and other not in seen:
                seen.add(other)
                todo.append((other, inside))
    return tuple(reads)


def words_of(code: CodeType) -> Iterator[str]:
    """The names and texts in some code and in the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from words_of(constant)


def named_by(word: str, function: FunctionType, cls: type[nn.Module]) -> tuple[FunctionType | None, bool]:
    """The function that a name in a function's code stands for, and whether it is one of the module's class; else it is of the same file."""
    for c in cls.__mro__:
        if word in vars(c) and c not in (nn.Module, object):
            return plain_function(vars(c)[word]), not isinstance(vars(c)[word], staticmethod)
    other = plain_function(function.__globals__.get(word))
    return (other if other is not None and other.__module__ == function.__module__ else None), False


def reads_in(function: FunctionType, root: str, last: frozenset[str], asks: bool) -> Iterator[ParameterRead]:
    """The reads in one function, in which `root` is the module. Where its source cannot be had, any parameter may be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        yield ParameterRead((ANY,), False, asks)
        return
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in last and not only_asks(node, around):
            names, base = chain(node)
            rooted = bool(root) and base == root
            if not rooted or len(names) > 1:  # not a parameter of the module itself
                yield ParameterRead(names, rooted, asks)
        elif isinstance(node, ast.Constant) and node.value in last:  # getattr(self.fc, "weight")
            yield ParameterRead((str(node.value),), False, asks)


def only_asks(node: ast.AST, around: dict[ast.AST, ast.AST]) -> bool:
    """Whether a value is only asked for what kind of value it is."""
    outer = around.get(node)
    if isinstance(outer, ast.Attribute):
        return outer.attr in METADATA
    if isinstance(outer, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in outer.ops)
    return isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name) and outer.func.id in INSPECTING


def chain(node: ast.expr) -> tuple[tuple[str, ...], str]:
    """`self.layers[0].fc.weight` is (layers, *, fc, weight) of `self`; what a call returns has no name, ""."""
    names: list[str] = []
    base: Any = node
    while isinstance(base, ast.Attribute | ast.Subscript):
        names.insert(0, base.attr if isinstance(base, ast.Attribute) else ANY)
        base = base.value
    return tuple(names), base.id if isinstance(base, ast.Name) else ""
