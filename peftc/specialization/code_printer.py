"""Prints a graph as the Python function it is: readable, and free of anything from the text of a spec."""

from __future__ import annotations

import inspect
import keyword
import math
import operator
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx

from peftc.dataflow.operations import is_size
from peftc.diagnostics import PeftcError
from peftc.rewriting.base_call import base_call
from peftc.runtime.guards import untraced
from peftc.specialization.code_layout import wrapped
from peftc.specialization.loop_blocks import Loop, late, loops_of
from peftc.tracing.in_place import AUGMENTED
from peftc.tracing.operations import branch, end_loop, enter_context, exit_context, new_version

INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
}
PREFIX = {operator.neg: "-", operator.invert: "~", operator.not_: "not "}
TORCH = Path(torch.__file__).parent
REST = "rest"  # in the meta of a call: the `**` parameter that is handed on to it


class Names:
    """The globals that emitted functions use: qualified names, and the objects to run them with."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"torch": torch}
        self.imports: dict[str, str] = {"torch": "import torch"}
        self.constants: dict[str, frozenset[str]] = {}

    def constant(self, base: str, value: frozenset[str]) -> str:
        """The name of a set of words, the same for the same set."""
        for name, known in self.constants.items():
            if known == value:
                return name
        name = base if base not in self.values else f"{base}_{len(self.constants) + 1}"
        self.constants[name] = self.values[name] = value
        return name

    def constant_lines(self) -> list[str]:
        """The definitions of all constants."""
        lines: list[str] = []
        for name, value in self.constants.items():
            lines += [f"{name} = frozenset({{", *(f"    {word!r}," for word in sorted(value)), "})"]
        return lines

    def of(self, value: Any) -> str:
        """The text by which emitted code refers to a function or class."""
        public = public_torch_name(value)
        if public is not None:
            return public
        module, name = value.__module__, value.__qualname__
        if module == "builtins":
            return name
        base = short = name.replace("<", "").replace(">", "").replace(".", "_")
        n = 1
        while short in self.values and self.values[short] is not value:
            n += 1
            short = f"{base}_{n}"
        self.values[short] = value
        self.imports[short] = f"from {module} import {name}" + (f" as {short}" if short != name else "")
        return short


def public_torch_name(value: Any) -> str | None:
    name = getattr(value, "__name__", "")
    for prefix, owner in (
        ("torch", torch),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.Tensor", torch.Tensor),
    ):
        if getattr(owner, name, None) is value:
            return f"{prefix}.{name}"
    return None


Others: TypeAlias = "tuple[fx.Graph, Mapping[int, Others | Exception]]"  # a way from a branch on, and the other ways at its own branches


class Emitter:
    """Prints one graph. Reads of attributes and sizes are written where they are used, everything else on its own line."""

    def __init__(
        self,
        graph: fx.Graph,
        names: Names,
        signature: inspect.Signature,
        others: Mapping[int, Others | Exception] | None = None,
    ) -> None:
        self.graph, self.names, self.signature = graph, names, signature
        self.others = others or {}
        self.texts: dict[fx.Node, str] = {}
        self.skip = 0  # branches that have been printed already, by the path this one leaves
        self.known: dict[object, str] = {}  # what that path has computed so far, by origin

    def body(self) -> list[str]:
        """The lines of the function. Made twice: local names must differ from all the globals in use."""
        remove_dead(self.graph)
        self.lines()
        self.texts.clear()
        return self.lines()

    def local(self, node: fx.Node) -> str:
        name = node.name
        taken = set(self.known.values())
        if not name.isidentifier():  # of a module whose name ends in a new line
            name = re.sub(r"\W", "_", name)
            taken |= {other.name for other in self.graph.nodes}
        while name in self.names.values or name in self.signature.parameters or name in taken:
            name += "_"
        return name

    def lines(self) -> list[str]:
        lines: list[str] = []
        around: list[tuple[str, list[str]]] = []  # the head of each open block, and the lines before it
        passed = 0
        loops, end = loops_of(self.graph), None
        for node in self.graph.nodes:
            if end is not None:  # of a loop that has been printed already
                end = None if node is end else end
            elif node in loops and passed < self.skip:
                end = loops[node].end
            elif node.target is end_loop:
                (head, before), inside = around.pop(), [*lines, *self.ended(loops[node])]
                lines = [*before, head, *(f"    {line}" for line in inside)]
            elif node in loops:
                around.append((self.turn(loops[node]), [*lines, *(f"{self.arg(n)} = []" for n in loops[node].made)]))
                lines = []
            elif node in self.texts:  # printed with its loop
                continue
            elif node.target is branch:
                lines += self.fork(node, passed) if passed >= self.skip else []
                passed += 1
            elif node.target is enter_context:
                around.append((f"with {self.names.of(node.args[0])}({self.given(node, node.args[1:])}):", lines))
                lines = []
            elif node.target is exit_context:
                (head, before), inside = around.pop(), lines
                lines = [*before, head, *(f"    {line}" for line in inside)] if inside else before
            elif passed < self.skip and node.meta.get("origin") in self.known:
                self.texts[node] = self.known[node.meta["origin"]]
            else:
                lines += self.statement(node)
        return lines

    def turn(self, loop: Loop) -> str:
        """The head of a loop."""
        self.texts |= {node: self.local(node) for node in (*loop.pieces, *loop.made)}
        variables = ", ".join(self.texts[p] for p in loop.pieces)
        sources = [self.arg(p.args[0]) for p in loop.pieces]
        together = f"zip({', '.join(sources)})"
        return f"for {variables} in {sources[0] if len(sources) == 1 else together}:"

    def ended(self, loop: Loop) -> list[str]:
        """The last lines of a loop, behind which only its lists are known."""
        lines = [f"{self.texts[n]}.append({self.arg(n.args[0])})" for n in loop.made]
        for node in loop.nodes:
            self.texts.pop(node, None)
        return lines

    def statement(self, node: fx.Node) -> list[str]:
        """The lines of one node; none where it is written where it is used."""
        if node.op == "placeholder":
            self.texts[node] = str(node.target).lstrip("*")
            return []
        if node.op == "output":
            return [f"return {self.arg(node.args[0])}"]
        if node.target is operator.setitem:
            target, key, value = node.args
            self.texts[node] = self.arg(target)
            return [f"{self.arg(target)}[{self.index(key)}] = {self.arg(value)}"]
        if node.target is new_version:
            self.texts[node] = self.arg(node.args[0])
            return []
        target: Any = node.target
        if target in AUGMENTED and (name := self.operand(node.args[0])).isidentifier():
            self.texts[node] = name
            return [f"{name} {AUGMENTED[target]} {self.arg(node.args[1])}"]
        text = self.expression(node)
        if node.op == "get_attr" or (is_size(node) and self.stable(node)):
            self.texts[node] = text
            return []
        self.texts[node] = self.local(node)
        return wrapped(f"{self.texts[node]} = {text}" if node.users else text)

    def fork(self, marker: fx.Node, index: int) -> list[str]:
        """The other way at a branch, which ends by returning, or in an error; this way goes on behind it."""
        other = self.others[index]
        condition, outcome = marker.args
        test = f"not {self.operand(condition)}" if outcome else self.arg(condition)
        lines = [raised(other, self.names)] if isinstance(other, Exception) else self.way(other, index)
        return [f"if {test}:", *(f"    {line}" for line in lines)]

    def way(self, other: Others, index: int) -> list[str]:
        graph, others = other
        emitter = Emitter(graph, self.names, self.signature, others)
        emitter.skip = index + 1
        emitter.known = {n.meta["origin"]: t for n, t in self.texts.items() if "origin" in n.meta}
        remove_dead(graph)
        return emitter.lines()

    def stable(self, node: fx.Node) -> bool:
        """Sizes are read where they are used, unless many use them."""
        return len(node.users) <= 2

    def expression(self, node: fx.Node) -> str:
        """The Python expression of one node."""
        if node.op == "get_attr":
            return attribute_path(str(node.target))
        if node.op == "call_module":
            return f"{attribute_path(str(node.target))}({self.given(node, node.args)})"
        if node.op == "call_method":
            return f"{self.operand(node.args[0])}.{node.target}({self.given(node, node.args[1:])})"
        return self.call(node)

    def call(self, node: fx.Node) -> str:
        target: Any = node.target
        args = node.args
        if target is getattr:
            return f"{self.operand(args[0])}.{args[1]}"
        if target is operator.getitem:
            return f"{self.operand(args[0])}[{self.index(args[1])}]"
        if target in INFIX and len(args) == 2:
            return f"{self.operand(args[0])} {INFIX[target]} {self.operand(args[1])}"
        if target in PREFIX:
            return f"{PREFIX[target]}{self.operand(args[0])}"
        if target is operator.contains:
            return f"{self.operand(args[1])} in {self.operand(args[0])}"
        if target is base_call:
            own = self.arg(node.kwargs["own"]) if node.kwargs else "self"
            return f"{self.names.of(args[0])}.forward({passed_on(self.signature, [own, *map(self.arg, args[1:])])})"
        return f"{self.names.of(target)}({self.given(node, args)})"

    def guard(self, node: fx.Node) -> str:
        """A node as one nested expression of the placeholders."""
        if node.op == "placeholder":
            return str(node.target).lstrip("*")
        inner = Emitter(self.graph, self.names, self.signature)
        for source in node.all_input_nodes:
            inner.texts[source] = self.guard(source)
        text = inner.expression(node)
        return (
            f"({text})" if node.target in INFIX or node.target in PREFIX or node.target is operator.contains else text
        )

    # Arguments ---------------------------------------------------------------------------------------------------

    def given(self, node: fx.Node, args: Iterable[Any]) -> str:
        """The arguments of a call, the rest of the keywords last."""
        rest = [f"**{node.meta[REST]}"] if REST in node.meta else []
        return ", ".join([*filter(None, [self.arguments(args, node.kwargs)]), *rest])

    def arguments(self, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self.arg, args), *(f"{k}={self.arg(v)}" for k, v in kwargs.items())])

    def operand(self, value: Any) -> str:
        text = self.arg(value)
        simple = isinstance(value, (fx.Node, str, bool)) or (isinstance(value, (int, float)) and value >= 0)
        return text if simple else f"({text})"

    def index(self, key: Any) -> str:
        if isinstance(key, tuple) and key:
            return ", ".join(map(self.index, key))
        if isinstance(key, slice):
            parts = ["" if v is None else self.arg(v) for v in (key.start, key.stop)]
            return ":".join(parts) + (f":{self.arg(key.step)}" if key.step is not None else "")
        return self.arg(key)

    def arg(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value not in self.texts:
                raise late(value)
            return self.texts[value]
        if isinstance(value, tuple):
            return f"({', '.join(map(self.arg, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.arg, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.arg(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.arg(v) for v in (value.start, value.stop, value.step))})"
        if value is ...:
            return "..."
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.{value!r}"
        return self.names.of(value)


def raised(error: Exception, names: Names) -> str:
    """The statement that ends a way: with what the model's own code raises there, or by saying that it was not traced."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = (last.line or "").startswith(("raise", "assert")) and not Path(last.filename).is_relative_to(TORCH)
    if not own or isinstance(error, PeftcError):  # an operation did not take the values of this call: others may do
        return f"raise {names.of(untraced)}({str(error)!r})"
    kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
    return f"raise {kind.__name__}({str(error)!r})"


def attribute_path(target: str) -> str:
    """`layer.0.dropout` as code: `getattr(self.layer, "0").dropout`, which holds for lists, dictionaries and modules."""
    text = "self"
    for part in () if target == "_self" else target.split("."):
        plain = part.isidentifier() and not keyword.iskeyword(part)
        text = f"{text}.{part}" if plain else f"getattr({text}, {part!r})"
    return text


def remove_dead(graph: fx.Graph) -> None:
    """Removes unused nodes that only look: everything that may act stays."""
    looks = (getattr, operator.getitem, operator.contains, new_version, *INFIX, *PREFIX)
    for node in reversed(list(graph.nodes)):
        looking = node.op == "get_attr" or is_size(node) or node.target in (*looks, "get")
        if looking and not node.users:
            graph.erase_node(node)


def parameters(signature: inspect.Signature) -> str:
    """A forward's parameters as code; defaults that are not plain constants become None."""
    texts: list[str] = []
    starred = False
    for p in signature.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            texts.append(f"*{p.name}")
            starred = True
        elif p.kind is p.VAR_KEYWORD:
            texts.append(f"**{p.name}")
        else:
            if p.kind is p.KEYWORD_ONLY and not starred:
                texts.append("*")
                starred = True
            plain = isinstance(p.default, (bool, int, float, str))
            texts.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}" if plain else f"{p.name}=None")
    return ", ".join(texts)


def passed_on(signature: inspect.Signature, values: Iterable[str] | None = None) -> str:
    """The arguments of a call that hands on all of a forward's own parameters, or these values in their places."""
    texts: list[str] = []
    for p, value in zip(signature.parameters.values(), values or signature.parameters, strict=True):
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        texts.append(f"{p.name}={value}" if p.kind is p.KEYWORD_ONLY else star + value)
    return ", ".join(texts)


def function(name: str, signature: inspect.Signature, lines: list[str], doc: str = "") -> str:
    """The source of a function of `signature` with these body lines."""
    documented = [f'"""{doc}"""'] if doc else []
    return "\n".join([f"def {name}({parameters(signature)}):", *(f"    {line}" for line in [*documented, *lines])])
