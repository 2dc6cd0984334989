"""Code around an edit that may bypass it: it runs one kernel, or reads a child's parameters.

In evaluation, `nn.TransformerEncoderLayer`, `nn.MultiheadAttention` and `nn.TransformerEncoder`
read the weights of their children and call none of them. Their code asks torch whether its fast
path is enabled; while a module is traced, the answer is no, so its generated forward has none.
Source: torch.backends.mha; `why_not_fast_path` in torch/nn/modules/activation.py, transformer.py.

Other code calls a child in one call and computes with its weight in another, as in
`F.linear(x, self.fc.weight)` without gradients, in evaluation, for a long input; one trace shows
one of the two. Then the region of the edit is the module that reads. The analysis is static: of the
`forward` of the class and of its parent classes, and of functions that it names, of its class and
file. Code that passes the child itself on (`kernel(self.fc, x)`) may read its parameters there.
Reads of metadata (`self.fc.weight.dtype`) do not count.
"""

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn

from peftc.diagnostics.model_line import ModelLine
from peftc.modules.instance_forward import instance_forward
from peftc.modules.walk import submodule
from peftc.rewriting.edits import Region
from peftc.rewriting.legality.syntax_trees import is_called, name_in_loop, parents_in, syntax_tree

QUERY = "get_fastpath_enabled"
ENTERED = frozenset({""})
ANY = "*"  # stands for an index, or for a name that the code computes
ALL_PARAMETERS = frozenset({"parameters", "named_parameters", "_parameters", "state_dict", "get_parameter"})
MODE_QUERIES = frozenset({"is_grad_enabled", "requires_grad", "is_inference_mode_enabled", "training"})
METADATA = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda"})
INSPECTING = frozenset({"isinstance", "hasattr", "id", "type"})


@cache
def has_fast_path(cls: type[nn.Module]) -> bool:
    """Whether the forward of a class or of a parent class uses torch's fast path."""
    forwards = (inspect.unwrap(vars(c)["forward"]) for c in cls.__mro__ if "forward" in vars(c))
    return any(QUERY in getattr(getattr(f, "__code__", None), "co_names", ()) for f in forwards)


def parents(module: str) -> Iterator[str]:
    """The dotted names of all modules that contain a module, innermost first; the root is ""."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def innermost_called(module: str, calls: Collection[str], model: nn.Module) -> str:
    """The module itself if called, or the innermost called module around it."""
    if module not in calls and is_called_in_siblings(module, calls, model):
        return module
    return next((n for n in (module, *parents(module)) if n in calls), module)


def is_called_in_siblings(module: str, calls: Collection[str], model: nn.Module) -> bool:
    """Whether a sibling of the module, or of one around it, has this part called."""
    names = module.split(".")
    for i, name in enumerate(names):
        parent = submodule(model, ".".join(names[:i]))
        cls = type(submodule(parent, name))
        siblings = [n for n, m in parent.named_children() if type(m) is cls and n != name]
        if any(".".join([*names[:i], sibling, *names[i + 1 :]]) in calls for sibling in siblings):
            return True
    return False


def disable_fast_paths(regions: list[Region], model: nn.Module, shared: Iterable[Collection[str]] = ()) -> list[Region]:
    """Adds a region without edits for each module around a region that has a fast path."""
    names = {name: group for group in shared for name in group}
    by_module = {region.module: region for region in regions}
    entered = {f"{r.module}.{name}".strip(".") for r in regions for name in r.inline}
    outer: dict[str, Region] = {}
    around = dict[str, None]()
    for module in (module for r in regions for module in names.get(r.module, (r.module,))):
        for name in parents(module):
            if name in around:
                break  # and so are its parents
            around[name] = None
    for name in around:
        if name in entered or not has_fast_path(type(submodule(model, name))):
            continue
        if name in by_module:
            by_module[name].inline |= ENTERED
        else:
            outer[name] = Region(name, ENTERED, [])
    return [*outer.values(), *regions]


@dataclass(frozen=True)
class ParameterRead:
    """A read of a parameter by attributes, `names`."""

    names: tuple[str, ...]
    from_self: bool  # the first attribute is one of the module itself; else the object is unknown
    mode_dependent: bool  # the function also queries gradients or the mode
    whole_module: bool = False  # `names` lead to a module all of whose parameters may be read
    line: ModelLine | None = field(default=None, compare=False)

    @property
    def names_owner(self) -> bool:
        """Whether the code names the module that owns the parameter."""
        return bool(self.names) if self.from_self or self.whole_module else len(self.names) > 1

    def may_read(self, parameter: str) -> bool:
        path = parameter.split(".")
        size = len(self.names)
        starts = range(len(path) - size + 1) if self.whole_module else [len(path) - size]
        if self.from_self:
            starts = [0] if self.whole_module or len(path) == size else []
        return any(start >= 0 and matches(self.names, path[start : start + size]) for start in starts)


def matches(names: Sequence[str], path: list[str]) -> bool:
    return len(names) == len(path) and all(name in (ANY, own) for name, own in zip(names, path, strict=True))


def parameter_reads(module: nn.Module, parameters: Collection[str]) -> Iterator[ParameterRead]:
    """How the code of a module may read some parameters of its children (dotted names in it)."""
    words = frozenset(word for name in parameters for word in name.split(".")[-2:])
    for forward in forwards(module) if words else ():
        yield from (read for read in reads_in(forward, type(module), words) if any(map(read.may_read, parameters)))


def may_run_children(module: nn.Module, region: str) -> bool:
    """Whether the code of a module may use all children of its part `region`."""
    children = [n for n, c in submodule(module, region).named_children() if next(c.parameters(), None) is not None]
    if len(children) < 2:
        return False
    functions = list(forwards(module))
    if not names_of(functions, type(module)).issuperset(children):  # to parse source takes longer
        return False
    attributes = {name for forward in functions for name in attributes_of(forward, type(module), region)}
    return attributes.issuperset(children)


def names_of(functions: Iterable[FunctionType], cls: type[nn.Module]) -> set[str]:
    """The names in functions and in those that they name."""
    reachable = (function for forward in functions for function, _ in reachable_functions(forward, cls))
    return {name for function in reachable for name in names_in(function.__code__)}


@cache
def attributes_of(forward: FunctionType, cls: type[nn.Module], region: str) -> frozenset[str]:
    """The attributes that a forward, and functions it names, read of a part of the module."""
    path = region.split(".")
    return frozenset(
        name
        for function, first in reachable_functions(forward, cls)
        for use in attribute_uses(function, first, cls)
        if not use.is_text
        for i, name in enumerate(use.names)
        if matches(use.names[:i], path if use.from_self else path[len(path) - i :])
    )


def own_parameters(module: nn.Module, prefix: str, recurse: bool = False) -> list[str]:
    """The names of a module's parameters under a prefix, all of tied ones."""
    return [name for name, _ in module.named_parameters(prefix, recurse, remove_duplicate=False)]


def forwards(module: nn.Module) -> Iterator[FunctionType]:
    """The unwrapped forwards that a call of a module may run."""
    own = instance_forward(module)
    functions = [own.function] if own is not None else []
    functions += [vars(c)["forward"] for c in type(module).__mro__ if c is not nn.Module and "forward" in vars(c)]
    for value in functions:
        function = unwrap(value)
        if function is not None:
            yield function
            if not {"super", "forward"}.intersection(names_in(function.__code__)):
                return


def unwrap(value: Any) -> FunctionType | None:
    """The function behind a method, a property or a wrapper."""
    value = value.fget if isinstance(value, property) else value
    value = inspect.unwrap(getattr(value, "__func__", value))
    return value if isinstance(value, FunctionType) else None


@cache
def reads_in(forward: FunctionType, cls: type[nn.Module], words: frozenset[str]) -> tuple[ParameterRead, ...]:
    """The reads of these attribute names in a forward and in the functions that it names."""
    reads = dict[ParameterRead, None]()
    for function, first in reachable_functions(forward, cls):
        names = set(names_in(function.__code__))
        if names & (words | ALL_PARAMETERS):
            mode_dependent = bool(names & MODE_QUERIES)
            uses = attribute_uses(function, first, cls)
            reads |= dict.fromkeys(read for use in uses for read in use.reads(words, mode_dependent))
    return tuple(reads)


@cache
def reachable_functions(forward: FunctionType, cls: type[nn.Module]) -> tuple[tuple[FunctionType, str], ...]:
    """A forward and the functions that it names, each with its name for the module."""
    todo, seen, functions = [(forward, True)], {forward}, list[tuple[FunctionType, str]]()
    while todo:
        function, is_method = todo.pop()
        code = function.__code__
        functions.append((function, code.co_varnames[0] if is_method and code.co_argcount else ""))
        for name in sorted(set(names_in(code))):
            other, in_class = resolve(name, function, cls)
            if other is not None and other not in seen:
                seen.add(other)
                todo.append((other, in_class))
    return tuple(functions)


def names_in(code: CodeType) -> Iterator[str]:
    """The names and texts in some code and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from names_in(constant)


def resolve(name: str, function: FunctionType, cls: type[nn.Module]) -> tuple[FunctionType | None, bool]:
    """The function of the class or file that a name refers to, and whether it is a method."""
    for c in cls.__mro__:
        if name in vars(c) and c not in (nn.Module, object):
            return unwrap(vars(c)[name]), not isinstance(vars(c)[name], staticmethod)
    other = unwrap(function.__globals__.get(name))
    return (other if other is not None and other.__module__ == function.__module__ else None), False


@dataclass(frozen=True)
class AttributeUse:
    """An expression that reads attributes: `self.layers[0].fc` has the names (layers, *, fc)."""

    names: tuple[str, ...]
    from_self: bool
    next: str = ""  # the attribute read from the result, "()" where it is called
    is_text: bool = False  # a constant that may be the name of an attribute
    line: ModelLine | None = field(default=None, compare=False)

    def reads(self, words: frozenset[str], mode_dependent: bool) -> Iterator[ParameterRead]:
        """The reads here, if `words` are names of parameters and of the modules that own them."""
        last = self.names[-1]
        if last in ALL_PARAMETERS and not self.is_text:
            yield ParameterRead(self.names[:-1], self.from_self, mode_dependent, whole_module=True, line=self.line)
        elif (last in words or last == ANY) and self.next != "()":
            # `self.weight` alone is the module's own parameter, or a child
            if not self.from_self or len(self.names) > 1 or self.is_text:
                yield ParameterRead(self.names, self.from_self, mode_dependent, line=self.line)
            if not self.next and not self.is_text:  # the value is passed on
                yield ParameterRead((*self.names, ANY), self.from_self, mode_dependent, line=self.line)


@cache
def attribute_uses(function: FunctionType, root: str, cls: type[nn.Module]) -> tuple[AttributeUse, ...]:
    """The attribute uses of a function; without source, it may read all parameters. `root`: its
    name for a module of class `cls`.
    """
    try:
        tree = syntax_tree(function)
    except (OSError, TypeError, SyntaxError):
        return (AttributeUse(("parameters",), False),)
    parents = parents_in(tree)
    uses: list[AttributeUse] = []
    for node in parents:
        if isinstance(node, ast.Attribute | ast.Subscript) and not is_metadata_read(node, parents, function, cls, root):
            names, base = list[str](), cast(Any, node)  # `self.layers[0].fc` has layers, *, fc
            while isinstance(base, ast.Attribute | ast.Subscript):
                names.insert(0, base.attr if isinstance(base, ast.Attribute) else ANY)
                base = base.value
            is_own = isinstance(base, ast.Name) and base.id == root != ""
            if isinstance(node, ast.Subscript) and not is_own:
                continue  # mostly of tensors
            parent = parents.get(node)
            following = parent.attr if isinstance(parent, ast.Attribute) else ""
            is_called = isinstance(parent, ast.Call) and parent.func is node
            line = ModelLine(function.__code__, function.__code__.co_firstlineno + node.lineno - 1)
            uses.append(AttributeUse(tuple(names), is_own, "()" if is_called else following, line=line))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(self.fc, "weight")
            line = ModelLine(function.__code__, function.__code__.co_firstlineno + node.lineno - 1)
            uses.append(AttributeUse((node.value,), False, is_text=True, line=line))
    return tuple(dict.fromkeys(uses))


def is_metadata_read(
    node: ast.AST,
    parents: Mapping[ast.AST, ast.AST],
    function: FunctionType,
    cls: type[nn.Module] | None = None,
    root: str = "",
) -> bool:
    """Whether an expression of a function is used for its metadata only, assigned to, or called
    under another name. `root`: its name for a module of `cls`; without, no calls are followed.
    """
    parent = parents.get(node)
    # `next(self.parameters()).dtype`
    if isinstance(parent, ast.Call) and parent.func is node and isinstance(call := parents.get(parent), ast.Call):
        is_first = isinstance(call.func, ast.Name) and call.func.id == "next" and call.args[:1] == [parent]
        return is_first and is_metadata_read(call, parents, function, cls, root)
    if isinstance(parent, ast.Attribute):
        return parent.attr in METADATA
    if isinstance(parent, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in parent.ops)
    if isinstance(parent, ast.Call) and node in parent.args:
        before = [type(argument) for argument in parent.args[: parent.args.index(cast(ast.expr, node))]]
        callee, first = (None, 0) if cls is None else function_of(parent.func, function, cls, root)
        is_harmless = ast.Starred not in before and calls_or_inspects(callee, first + len(before))
        return (isinstance(parent.func, ast.Name) and parent.func.id in INSPECTING) or is_harmless
    if isinstance(parent, ast.Tuple | ast.List) and isinstance(getattr(parent, "ctx", None), ast.Load):
        name = name_in_loop(parent, parents)
        uses = [n for n in parents if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        passed = [use for use in uses if not is_called(use, parents)]
        in_calls = all(isinstance(parents.get(use), ast.Call) for use in passed)
        return bool(uses) and in_calls and all(is_metadata_read(use, parents, function, cls, root) for use in passed)
    return isinstance(getattr(node, "ctx", None), ast.Store)


def function_of(
    callee: ast.expr, function: FunctionType, cls: type[nn.Module], root: str
) -> tuple[FunctionType | None, int]:
    """The function that an expression names, and how many arguments it has got already."""
    if isinstance(callee, ast.Name):
        value = function.__globals__.get(callee.id)
        return (value if isinstance(value, FunctionType) else None), 0
    if isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name) and callee.value.id == root != "":
        method, has_self = resolve(callee.attr, function, cls)
        return method, int(has_self)
    return None, 0


@cache
def calls_or_inspects(callee: object, position: int) -> bool:
    """Whether a function calls an argument or uses its metadata, and nothing else."""
    # Seen in: no transformers model, but x-transformers and other code by lucidrains
    if not isinstance(callee, FunctionType) or position >= callee.__code__.co_argcount:
        return False
    name = callee.__code__.co_varnames[position]
    try:
        tree = syntax_tree(callee)
    except (OSError, TypeError, SyntaxError):
        return False
    parents = parents_in(tree)
    uses = [node for node in parents if isinstance(node, ast.Name) and node.id == name]
    return all(is_called(use, parents) or is_metadata_read(use, parents, callee) for use in uses)
