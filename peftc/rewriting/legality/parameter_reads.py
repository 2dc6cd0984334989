"""Parameters of a child that a module's own code reads: `F.linear(x, self.fc.weight)` beside `self.fc(x)`.

Such code may call the child today and compute with its weight tomorrow (without gradients, in evaluation, for a long input), and one trace
shows one of the two. An edit that stood in the child alone would be bypassed by the other, so it stands in the module that reads.

The code is looked at and not run: the `forward` of the class and of its parent classes, and what it names of its own class and of its
own file. Code that hands the child itself to something else (`kernel(self.fc, x)`) may read its parameters there. What asks for the kind of a
parameter (`self.fc.weight.dtype`) does not compute with it.
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

from peftc.modules.instance_forward import instance_forward

ANY = "*"  # in the place of an index, or of a name that the code computes
ALL = frozenset({"parameters", "named_parameters", "_parameters", "state_dict", "get_parameter"})
QUESTIONS = frozenset({"is_grad_enabled", "requires_grad", "is_inference_mode_enabled", "training"})
METADATA = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda"})
INSPECTING = frozenset({"isinstance", "hasattr", "id", "type"})


@dataclass(frozen=True)
class ParameterRead:
    """`names`: the attributes that lead to the parameter, or, with `below`, to a module all of whose parameters may be read. `rooted`: from
    the module itself, else from what nobody can tell. `asks`: its function asks for gradients or for the mode, too.
    """

    names: tuple[str, ...]
    rooted: bool
    asks: bool
    below: bool = False

    @property
    def told(self) -> bool:
        """Whether the code says which module owns the parameter."""
        return bool(self.names) if self.rooted or self.below else len(self.names) > 1

    def of(self, parameter: str) -> bool:
        """Whether this may be a parameter of that dotted name."""
        path = parameter.split(".")
        size = len(self.names)
        starts = range(len(path) - size + 1) if self.below else [len(path) - size]
        if self.rooted:
            starts = [0] if self.below or len(path) == size else []
        return any(start >= 0 and alike(self.names, path[start : start + size]) for start in starts)


def alike(names: tuple[str, ...], path: list[str]) -> bool:
    return len(names) == len(path) and all(name in (ANY, own) for name, own in zip(names, path, strict=True))


def parameter_reads(module: nn.Module, parameters: Collection[str]) -> Iterator[ParameterRead]:
    """How the code of a module may read some parameters of its children (dotted names in it)."""
    words = frozenset(word for name in parameters for word in name.split(".")[-2:])
    for forward in forwards(module) if words else ():
        yield from (read for read in reads_of(forward, type(module), words) if any(map(read.of, parameters)))


def runs_parts(module: nn.Module, region: str) -> bool:
    """Whether the code of a module may run its part `region` child by child: each of its children that has parameters is called or read."""
    children = [n for n, c in module.get_submodule(region).named_children() if next(c.parameters(), None) is not None]
    used = {name for forward in forwards(module) for name in named_parts(forward, type(module), region)}
    return len(children) > 1 and used.issuperset(children)


@cache
def named_parts(forward: FunctionType, cls: type[nn.Module], region: str) -> frozenset[str]:
    """The attributes of a part of the module, and of what may be that part, that a forward and what it names ask for."""
    path = region.split(".")
    return frozenset(
        name
        for function, first in reached(forward, cls)
        for use in uses(function, first)
        if not use.text
        for size in range(len(use.names))
        if (name := use.names[size])
        and (alike(use.names[:size], path) if use.rooted else alike(use.names[:size], path[len(path) - size :]))
    )


def own_parameters(module: nn.Module, prefix: str, recurse: bool = False) -> list[str]:
    """The names of a module's parameters, of its children's too if `recurse`, under a prefix; each tied one under all of its names."""
    named = module.named_parameters(prefix, recurse, remove_duplicate=False)
    return [name for name, _ in named]


def forwards(module: nn.Module) -> Iterator[FunctionType]:
    """The forwards that a call of a module may run, behind what wraps them: its own, that of its class, and those of parent classes as
    long as each may call the next one.
    """
    own = instance_forward(module)
    functions = [own.function] if own is not None else []
    functions += [vars(c)["forward"] for c in type(module).__mro__ if c is not nn.Module and "forward" in vars(c)]
    for function in functions:
        plain = plain_function(function)
        if plain is not None:
            yield plain
            if not {"super", "forward"}.intersection(words_of(plain.__code__)):
                return


def plain_function(value: Any) -> FunctionType | None:
    """The function behind a method, a property or what wraps it."""
    value = value.fget if isinstance(value, property) else value
    value = inspect.unwrap(getattr(value, "__func__", value))
    return value if isinstance(value, FunctionType) else None


@cache
def reads_of(forward: FunctionType, cls: type[nn.Module], words: frozenset[str]) -> tuple[ParameterRead, ...]:
    """The reads of parameters or modules with one of these names, in a forward and in what it names."""
    reads = dict[ParameterRead, None]()
    for function, first in reached(forward, cls):
        named = set(words_of(function.__code__))
        if named & (words | ALL):
            asks = bool(named & QUESTIONS)
            reads |= dict.fromkeys(read for use in uses(function, first) for read in use.reads(words, asks))
    return tuple(reads)


@cache
def reached(forward: FunctionType, cls: type[nn.Module]) -> tuple[tuple[FunctionType, str], ...]:
    """A forward and the functions that it names, of its class and its file, with the name that each has for the module ("" for none)."""
    todo, seen, functions = [(forward, True)], {forward}, list[tuple[FunctionType, str]]()
    while todo:
        function, method = todo.pop()
        code = function.__code__
        functions.append((function, code.co_varnames[0] if method and code.co_argcount else ""))
        for word in sorted(set(words_of(code))):
            other, inside = named_by(word, function, cls)
            if other is not None and other not in seen:
                seen.add(other)
                todo.append((other, inside))
    return tuple(functions)


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


@dataclass(frozen=True)
class Use:
    """One place where a function names an attribute. `next`: the attribute that it asks of it, "()" where it calls it, else "". `text`: a
    constant, which may be the name of one.
    """

    names: tuple[str, ...]
    rooted: bool
    next: str = ""
    text: bool = False

    def reads(self, words: frozenset[str], asks: bool) -> Iterator[ParameterRead]:
        """What is read here if `words` are the names of parameters and of the modules that own them."""
        last = self.names[-1]
        if last in ALL and not self.text:
            yield ParameterRead(self.names[:-1], self.rooted, asks, below=True)
        elif (last in words or last == ANY) and self.next != "()":
            own = self.rooted and len(self.names) == 1 and not self.text  # a parameter of the module itself, or a child
            if not own:
                yield ParameterRead(self.names, self.rooted, asks)
            if not self.next and not self.text:  # it goes somewhere else
                yield ParameterRead((*self.names, ANY), self.rooted, asks)


@cache
def uses(function: FunctionType, root: str) -> tuple[Use, ...]:
    """All attributes that a function names, in which `root` is the module. Where its source cannot be had, any may be there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return (Use(("parameters",), False),)
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    attributes: list[Use] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not only_asks(node, around):
            names, base = chain(node)
            if isinstance(node, ast.Subscript) and (not root or base != root):
                continue  # of tensors, mostly
            outer = around.get(node)
            following = outer.attr if isinstance(outer, ast.Attribute) else ""
            called = isinstance(outer, ast.Call) and outer.func is node
            attributes.append(Use(names, bool(root) and base == root, "()" if called else following))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(self.fc, "weight")
            attributes.append(Use((node.value,), False, text=True))
    return tuple(dict.fromkeys(attributes))


def only_asks(node: ast.AST, around: dict[ast.AST, ast.AST]) -> bool:
    """Whether a value is only asked for what kind of value it is, or written to."""
    outer = around.get(node)
    if isinstance(outer, ast.Attribute):
        return outer.attr in METADATA
    if isinstance(outer, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in outer.ops)
    if isinstance(outer, ast.Call) and node in outer.args:
        return isinstance(outer.func, ast.Name) and outer.func.id in INSPECTING
    return isinstance(getattr(node, "ctx", None), ast.Store)


def chain(node: ast.expr) -> tuple[tuple[str, ...], str]:
    """`self.layers[0].fc.weight` is (layers, *, fc, weight) of `self`; what a call returns has no name, ""."""
    names: list[str] = []
    base: Any = node
    while isinstance(base, ast.Attribute | ast.Subscript):
        names.insert(0, base.attr if isinstance(base, ast.Attribute) else ANY)
        base = base.value
    return tuple(names), base.id if isinstance(base, ast.Name) else ""
