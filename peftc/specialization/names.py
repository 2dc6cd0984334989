"""The names in generated code: globals with their imports, and locals as in the model's code."""

import builtins
import dis
import inspect
import keyword
import operator
import re
import types
from bisect import bisect_right
from collections.abc import Container, Sized
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any, cast

import torch
from torch import fx, nn

from peftc import runtime
from peftc.dataflow.nodes import example, is_edit
from peftc.equation_code.code import VARIABLE
from peftc.rewriting.boundary import base_call
from peftc.rewriting.states import REPLACES
from peftc.tracing.bytecode import instructions_of

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_ATTR", "STORE_GLOBAL")
_ENDS = (*_STORES, "RETURN_", "UNPACK_", "POP_TOP", "POP_JUMP", "STORE_SUBSCR")  # of the expression of a statement
_NO_NAME = re.compile(r"^(?=\W|\d|$)")  # begins what is no name


def variable_of(node: fx.Node) -> str | None:
    """The variable that the model's code assigns a value to; None inside an expression."""
    names, _ = _assignment(node)
    index = 0 if len(names) < 2 else node.args[1] if len(node.args) > 1 else None  # of a tuple, or of a shape
    return names[index] if names and isinstance(index, int) and 0 <= index < len(names) else None


def _assignment(node: fx.Node) -> tuple[list[str], str | None]:
    """The targets of a value, and the first target of the statement around it."""
    whole = True  # the value is all that its function returns, not a part of an expression
    for code, offset in instructions_of(node.meta.get("stack", ())):
        instructions = _instructions(code)
        at = _index(instructions, offset)
        shape = node.target == "size" and [i.opname for i in instructions[at + 1 : at + 2]] == ["UNPACK_SEQUENCE"]
        names = _targets(instructions, at + shape)
        if names and whole:
            return names, None
        end = next((i for i in instructions[at + 1 :] if i.opname.startswith(_ENDS)), None)
        if end is None or not end.opname.startswith("RETURN_"):
            return [], (_stored(end) or [None])[0] if end is not None else None
        whole = whole and instructions[at + 1] is end
    return [], None


def _targets(instructions: tuple[dis.Instruction, ...], at: int) -> list[str]:
    """The targets of an instruction's result: one name, or one for each part of a tuple."""
    if instructions[at].opname == "UNPACK_SEQUENCE":
        count = int(instructions[at].argval)
        stores = [name for i in instructions[at + 1 : at + 1 + count] for name in _stored(i) or [""]]
        return stores[:count] if count > 1 else []
    following = at + 1
    while following < len(instructions) and instructions[following].opname in ("COPY", "JUMP_FORWARD"):
        jump = instructions[following]
        following = following + 1 if jump.opname == "COPY" else _index(instructions, jump.argval)
    return _stored(instructions[following])[:1] if following < len(instructions) else []


def _index(instructions: tuple[dis.Instruction, ...], offset: int) -> int:
    return bisect_right([i.offset for i in instructions], offset) - 1


def _stored(instruction: dis.Instruction) -> list[str]:
    """The names that an instruction stores values in; of Python 3.13's pairs, in their order."""
    if not instruction.opname.startswith(_STORES):
        return []
    names = instruction.argval
    return list(names) if isinstance(names, tuple) else [str(names)]


@cache
def _aliases(code: CodeType) -> tuple[tuple[str, str], ...]:
    pairs = [(a, b) for a, b in pairwise(_instructions(code)) if (a.opname, b.opname) == ("LOAD_FAST", "STORE_FAST")]
    return tuple((str(a.argval), str(b.argval)) for a, b in pairs)


@cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP", "EXTENDED_ARG"))


# Generated code uses these names as they are.
FIXED_NAMES = frozenset(
    ["self", "torch", "nn", "respecialize", "len", "isinstance", "type", "getattr", "hasattr", "slice", "float", "zip"]
)


def _home(value: Any) -> tuple[str, str]:
    """The module from which a function or class is imported, and its name there."""
    if value.__module__ == "builtins" and not hasattr(builtins, value.__qualname__):  # of functions, methods
        return "types", next(name for name, one in vars(types).items() if one is value)
    return value.__module__, value.__qualname__


class GlobalNames:
    """The names that generated functions use. `parameters`: theirs, which hide globals. `reads`:
    expressions by which they read tensors of modules.
    """

    def __init__(self, parameters: Container[str]) -> None:
        self.parameters = parameters
        self.values: dict[str, Any] = {"torch": torch, "nn": nn, "PASSTHROUGH": runtime.PASSTHROUGH}
        self.imports: dict[str, str] = {"torch": "import torch", "nn": "from torch import nn"}
        self.definitions: dict[str, str] = {}
        self.reads: set[str] = set()

    def read(self, text: str) -> str:
        """The same text, which reads a tensor of a module."""
        self.reads.add(text)
        return text

    def of(self, value: Any) -> str:
        """The text by which generated code refers to a function or class."""
        name = getattr(value, "__name__", "")
        for prefix, owner in (("torch", torch), ("nn.functional", nn.functional), ("torch.Tensor", torch.Tensor)):
            if getattr(owner, name, None) is value:
                return f"{prefix}.{name}"
        module, path = _home(value)
        if module == "builtins":
            return path
        base = path.replace("<", "").replace(">", "").replace(".", "_")
        base = short = f"{base}_" if keyword.iskeyword(base) else base  # of a lambda
        n = 1
        while short in self.parameters or self.values.get(short, value) is not value:
            n += 1
            short = f"{base}_{n}"
        if short in self.values:
            return short
        self.values[short] = value
        first, *inner = path.split(".")
        if "<" in path:
            self.definitions[short] = f"# {short} is `{value.__qualname__}` in {module}"
            return short
        module = "peftc.runtime" if getattr(runtime, first, None) is value else module
        self.imports[short] = f"from {module} import {first}" + (f" as {short}" if short != first else "")
        if inner:
            self.definitions[short] = f"{short} = {short}.{'.'.join(inner)}"
        return short

    def passthrough(self, keywords: frozenset[str]) -> str:
        """The name of a set of keywords that a forward passes through."""
        common = runtime.PASSTHROUGH
        self.imports["PASSTHROUGH"] = "from peftc.runtime import PASSTHROUGH"
        removed = f" - {{{', '.join(map(repr, sorted(common - keywords)))}}}" if common - keywords else ""
        added = f" | {{{', '.join(map(repr, sorted(keywords - common)))}}}" if keywords - common else ""
        name = next((n for n, value in self.values.items() if n.startswith("PASSTHROUGH") and value == keywords), "")
        if not name:
            name = f"PASSTHROUGH_{1 + sum(n.startswith('PASSTHROUGH') for n in self.values)}"
            self.values[name] = keywords
            self.definitions[name] = f"{name} = PASSTHROUGH{removed}{added}"
        return name

    def lines(self) -> list[str]:
        """The imports, and what is defined from them."""
        modules: dict[str, set[str]] = {}
        for line in self.imports.values():
            module, _, name = line.partition(" import ")
            modules.setdefault(module, set()).add(name)
        lines = [f"{m} import {', '.join(sorted(names))}" if any(names) else m for m, names in modules.items()]
        lines.sort(key=lambda line: (line.startswith("from"), line))
        return [*lines, *([""] if self.definitions else []), *self.definitions.values()]


def base_name(node: fx.Node) -> str:
    """The variable that the model's source assigns in this line, or an operation's name."""
    # What an edit makes of a state has the name of the state.
    state = node.meta.get(REPLACES)
    name = base_name(state) if state is not None else node.meta.get(VARIABLE)
    if name is None and node.op != "get_attr":  # which is read where it is used
        name = variable_of(node) or (_assignment(node)[1] if node.target != "size" else None)
    name = re.sub(r"\W", "_", name if name and name.strip("_") else _operation(node))
    reserved = keyword.iskeyword(name) or hasattr(builtins, name) or name in ("self", "torch", "nn")
    return f"{name}_" if reserved or not name.isidentifier() else name


def _operation(node: fx.Node) -> str:
    source = node.args[0] if node.args else None
    if node.op in ("call_module", "get_attr"):
        return _NO_NAME.sub("module_", str(node.target).rpartition(".")[2])
    if node.target is base_call:
        return "result"
    if node.target is getattr:
        return str(node.args[1])
    if node.target is operator.getitem and isinstance(source, fx.Node):
        if unpacked_count(node):
            return f"{base_name(source)}_{('key', 'value')[int(str(node.args[1]))]}"
        return f"{base_name(source)}_{node.args[1] if isinstance(node.args[1], int | str) else 'slice'}"
    if is_edit(node) and node.op != "call_module" and node.all_input_nodes:
        states = [n for n in node.all_input_nodes if not is_edit(n)]
        return base_name((states or node.all_input_nodes)[0])
    if node.target == "size":
        return f"size_{node.args[1]}" if len(node.args) > 1 else "size"
    target: Any = node.target
    return str(target if isinstance(target, str) else getattr(target, "__name__", node.name)).strip("_") or "value"


def unpacked_count(node: fx.Node) -> int:
    """The number of parts that a tuple is unpacked into, where `node` is one of them; else 0."""
    # A form of keys and values gives a pair.
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and is_edit(node) and is_edit(source) and source.op == "call_module":
        return 2 if all(user.target is operator.getitem and user.args[1] in (0, 1) for user in source.users) else 0
    names = _assignment(node)[0] if isinstance(source, fx.Node) and isinstance(node.args[1], int) else []
    return len(names) if len(names) > 1 and _length(example(source)) == len(names) else 0


def _length(value: object) -> int | None:
    """The number of parts of a value that code may unpack."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else None
    return len(cast(Sized, value)) if isinstance(value, (tuple, list)) else None


class LocalNames:
    """Gives names to nodes; a dead value's name again, as in the model's own source.

    `reuse` is off for branches and loops: a value may be read on another path, or in the next turn.
    """

    def __init__(
        self, graph: fx.Graph, signature: inspect.Signature, reserved: set[str], texts: dict[fx.Node, str], reuse: bool
    ) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.reserved, self.texts, self.reuse = reserved, texts, reuse
        self.nodes: dict[str, set[fx.Node]] = {name: set() for name in signature.parameters}
        self.roots: dict[fx.Node, str] = {}  # the name whose value a text reads
        self.fixed = {p.name for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        self.fixed |= {"self"}

    def read(self, node: fx.Node, source: object) -> None:
        """`node` is printed as an expression of `source`, or as the parameter of that name."""
        root = self.roots.get(source) if isinstance(source, fx.Node) else str(source)
        if root is not None:
            self.roots[node] = root
            self.nodes.setdefault(root, set()).add(node)

    def bind(self, node: fx.Node, at: fx.Node, statement: str | None = None) -> tuple[str, list[str]]:
        """The name for a value assigned at `at` by `statement`, and lines that rename another."""
        base = base_name(node)
        before: list[str] = []
        if statement is not None and self.reuse and base in self.nodes and not self._free(base, at):
            before = self._alias(base, node, at, set(re.findall(r"\w+", statement)))
        name, n = base, 0
        while not self._free(name, at):
            n += 1
            name = f"{base}_{n}"
        for old in self.nodes.get(name, ()):
            self.roots.pop(old, None)
        self.nodes[name] = {node}
        self.roots[node] = name
        return name, before

    def _free(self, name: str, at: fx.Node) -> bool:
        if name in self.reserved or name in self.fixed:
            return False
        if name not in self.nodes:
            return True
        readers = (user for node in self.nodes[name] for user in node.users)
        return self.reuse and all(self.order[user] <= self.order[at] for user in readers)

    def _alias(self, name: str, node: fx.Node, at: fx.Node, in_use: set[str]) -> list[str]:
        """Renames a value that is read later, as the model does: `residual = hidden_states`."""
        codes = {code for code, _ in instructions_of(node.meta.get("stack", ()))}
        aliases = (new for c in codes for old, new in _aliases(c) if old == name and new not in (name, *in_use))
        other = next((a for a in aliases if self._free(a, at)), None)
        held = self.nodes[name]
        if other is None or name in self.fixed or not held or any(self.texts.get(n) != name for n in held):
            return []
        self.nodes[other] = held
        for old in held:
            self.texts[old] = self.roots[old] = other
        self.nodes[name] = set()
        return [f"{other} = {name}"]
