"""Prints a graph as the Python function it is, close to the model's own source."""

from __future__ import annotations

import inspect
import operator
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from peftc.dataflow.nodes import is_edit
from peftc.dataflow.operations import is_size
from peftc.diagnostics import PeftcError
from peftc.rewriting.boundary import base_call
from peftc.rewriting.edits import EQUATIONS
from peftc.rewriting.states import REPLACES
from peftc.runtime import untraced
from peftc.specialization.expressions import INFIX, PREFIX, Expressions, indented, is_form, wrapped
from peftc.specialization.names import GlobalNames, LocalNames, unpacked_count, variable_of
from peftc.tracing.in_place import AUGMENTED
from peftc.tracing.operations import branch, collect, end_loop, enter_context, exit_context, new_version, segment

TORCH = Path(torch.__file__).parent
NESTED = 88  # characters of an expression that others are nested into
COPY = "a copy for an edit: later code changes the value in place"
MARKERS = (new_version, branch, enter_context, exit_context, end_loop, collect, segment)
# Their operands get lines of their own: they are no expressions, or run in another order.
SEPARATE = (*AUGMENTED, setattr, operator.setitem, operator.contains, base_call, *MARKERS)

OtherPath: TypeAlias = "tuple[fx.Graph, Mapping[int, OtherPath | Exception]]"
"""The graph of a branch's other outcome, with the other paths at its branches."""


def function_body(
    graph: fx.Graph,
    names: GlobalNames,
    signature: inspect.Signature,
    others: Mapping[int, OtherPath | Exception] | None = None,
) -> list[str]:
    """The lines of a function. Local names must differ from all globals in use, which are known at
    the end: where they do not, it is printed again.
    """
    remove_dead(graph, others or {})
    first = GraphPrinter(graph, names, signature, others)
    lines = first.lines()
    if not others and first.locals.nodes.keys().isdisjoint(names.values):
        return lines
    return GraphPrinter(graph, names, signature, others).lines()


class GraphPrinter:
    """Prints one graph.

    A value with a name in the model's source, or with several users, gets its own line; any other
    is nested into its user's expression, if that keeps the order of the graph. `computed`: texts of
    the path before this one, by origin; `skip`: how many branches it has passed.
    """

    def __init__(
        self,
        graph: fx.Graph,
        names: GlobalNames,
        signature: inspect.Signature,
        others: Mapping[int, OtherPath | Exception] | None = None,
        skip: int = 0,
        computed: Mapping[object, str] | None = None,
    ) -> None:
        self.graph, self.names, self.signature = graph, names, signature
        self.others, self.skip, self.computed = others or {}, skip, computed or {}
        self.shared = origins_in_use(self.others)
        self.expressions = Expressions(names, signature)
        self.texts = self.expressions.texts
        self.loops = loops_of(graph)
        self.assigned = assigned_attributes(graph)
        self.straight = 1 + max((i for i, n in enumerate(graph.nodes) if n.target is branch), default=-1)
        reserved = {*names.values, *self.computed.values()}
        self.locals = LocalNames(graph, signature, reserved, self.texts, not self.loops and not self.straight)
        self.pending: list[fx.Node] = []  # printed, to be nested into a later expression
        self.output: list[str] = []
        self.equations: tuple[str, ...] = ()  # of the last statement

    def lines(self) -> list[str]:
        open_blocks: list[tuple[str, list[str]]] = []  # the head of each block, and the lines before it
        passed = 0
        end = None  # of a loop that the path before this one has run
        for node in self.graph.nodes:
            if end is not None:
                end = None if node is end else end
            elif node in self.loops and passed < self.skip:
                end = self.loops[node].end
            elif node.target in (end_loop, exit_context):
                self.flush()
                if node.target is end_loop:
                    self.end_loop(self.loops[node])
                head, before = open_blocks.pop()
                self.output = [*before, head, *indented(self.output)] if self.output else before
            elif node in self.loops or node.target is enter_context:
                self.flush()
                open_blocks.append((self.block_head(node), self.output))
                self.output = []
            elif node in self.texts:  # printed with its loop, or with the tuple that it is unpacked from
                continue
            elif node.target is branch:
                if passed >= self.skip:
                    self.output += self.other_path(node, passed)
                passed += 1
            elif passed < self.skip and node.meta.get("origin") in self.computed:
                self.texts[node] = self.computed[node.meta["origin"]]
            else:
                self.node(node)
        return self.output

    def block_head(self, node: fx.Node) -> str:
        if node.target is enter_context:
            return f"with {self.names.of(node.args[0])}({self.expressions.arguments(node, node.args[1:])}):"
        loop = self.loops[node]
        for node in (*loop.pieces, *loop.results):
            self.texts[node] = self.locals.bind(node, node)[0]
        self.output += [f"{self.texts[n]} = []" for n in loop.results]
        variables = ", ".join(self.texts[p] for p in loop.pieces)
        sources = [self.expressions.value(p.args[0]) for p in loop.pieces]
        iterated = sources[0] if len(sources) == 1 else f"zip({', '.join(sources)})"
        return f"for {variables} in {iterated}:"

    def end_loop(self, loop: Loop) -> None:
        """Appends to the lists, which are all that is known behind the loop."""
        self.output += [f"{self.texts[n]}.append({self.expressions.value(n.args[0])})" for n in loop.results]
        for node in loop.nodes:
            self.texts.pop(node, None)

    # Statements -----------------------------------------------------------------------------------

    def node(self, node: fx.Node) -> None:
        target: Any = node.target
        value = self.expressions.value
        if node.op == "placeholder":
            self.texts[node] = str(target).lstrip("*")
            self.locals.read(node, self.texts[node])
        elif node.op == "output":
            text = self.nested(node, lambda: f"return {value(node.args[0])}")
            self.flush()
            self.write(node, [text])
        elif target is new_version:
            self.same(node)
        elif target is operator.setitem:
            self.same(node)
            self.write(node, [f"{self.texts[node]}[{self.expressions.index(node.args[1])}] = {value(node.args[2])}"])
        elif target is setattr:
            self.same(node)
            self.write(node, [f"{self.texts[node]}.{node.args[1]} = {value(node.args[2])}"])
        elif is_read_of_form(node) or (node.op == "get_attr" and not self.is_kept(node)):
            self.texts[node] = self.expressions.of(node)
        elif is_size(node) and len(node.users) <= 2:
            self.flush()
            self.texts[node] = self.expressions.of(node)
            self.locals.read(node, node.args[0])
        elif target in AUGMENTED and value(node.args[0]).isidentifier():
            self.same(node)
            self.write(node, [f"{self.texts[node]} {AUGMENTED[target]} {value(node.args[1])}"])
        elif target is operator.getitem and (parts := self.unpacked(node.args[0])):
            self.flush()
            self.unpack(parts, value(node.args[0]), node, True)
        elif self.nests(node):
            self.texts[node] = self.nested(node)
            self.pending.append(node)
        else:
            text = self.nested(node)
            self.flush()
            self.assign(node, text)

    def is_kept(self, node: fx.Node) -> bool:
        """Whether a variable keeps what is read here: for several users, or as code assigns
        another.
        """
        return (is_form(node) and len(node.users) > 1) or node.target in self.assigned

    def same(self, node: fx.Node) -> None:
        """`node` stands for its first operand, which has been changed in place."""
        self.flush()
        self.texts[node] = self.expressions.value(node.args[0])
        self.locals.read(node, node.args[0])

    def assign(self, node: fx.Node, text: str, last: bool = True) -> None:
        if not node.users and node.meta.get("origin") not in self.shared:
            self.write(node, wrapped(text))
        elif parts := self.unpacked(node):
            self.unpack(parts, text, node, last)
        else:
            self.texts[node], before = self.locals.bind(node, node, text if last else None)
            self.output += before
            self.write(node, wrapped(f"{self.texts[node]} = {text}"))

    def unpack(self, parts: list[fx.Node | None], text: str, at: fx.Node, last: bool) -> None:
        for part in filter(None, parts):
            self.texts[part], before = self.locals.bind(part, at, text if last else None)
            self.output += before
        names = ("_" if part is None else self.texts[part] for part in parts)
        self.write(at, wrapped(f"{', '.join(names)} = {text}"))

    def write(self, node: fx.Node, lines: list[str]) -> None:
        """Writes a statement, the first one of an equation under a comment."""
        equations: tuple[str, ...] = node.meta.get(EQUATIONS, (COPY,) if is_edit(node) else ())
        if equations != self.equations:
            self.output += [f"# {equation}" for equation in equations]
        self.equations = equations
        self.output += lines

    def other_path(self, marker: fx.Node, index: int) -> list[str]:
        """The other outcome of a branch, which returns or raises; this path goes on behind it."""
        other = self.others[index]
        condition, outcome = marker.args
        test = f"not {self.expressions.operand(condition)}" if outcome else self.expressions.value(condition)
        if isinstance(other, Exception):
            return [f"if {test}:", f"    {raised(other, self.names)}"]
        graph, others = other
        computed = {n.meta["origin"]: text for n, text in self.texts.items() if "origin" in n.meta}
        printer = GraphPrinter(graph, self.names, self.signature, others, index + 1, computed)
        return [f"if {test}:", *indented(printer.lines())]

    # Nesting --------------------------------------------------------------------------------------

    def nests(self, node: fx.Node) -> bool:
        """Whether a value is nested: it has one user, and no name in the model's source."""
        if len(node.users) != 1 or self.locals.order[node] < self.straight:
            return False
        (user,) = node.users
        if user.target in SEPARATE or is_size(user) or user.meta.get(EQUATIONS) != node.meta.get(EQUATIONS):
            return False
        operands: list[fx.Node] = []
        map_arg((user.args, user.kwargs), operands.append)
        one_statement = REPLACES not in node.meta and is_edit(user) == is_edit(node) and not variable_of(node)
        return one_statement and operands.count(node) == 1 and not self.unpacked(node)

    def nested(self, node: fx.Node, text: Callable[[], str] | None = None) -> str:
        """The text of a node, with its pending operands if they fit and stay in order."""
        text = text or (lambda: self.expressions.of(node))
        operands = [n for n in node.all_input_nodes if n in self.pending]
        line = text() if operands == self.pending[len(self.pending) - len(operands) :] else ""
        if operands and not 0 < len(line) <= NESTED:
            self.flush()
            return text()
        del self.pending[len(self.pending) - len(operands) :]
        return line or text()

    def flush(self) -> None:
        """Gives each pending value a line of its own."""
        while self.pending:
            node = self.pending.pop(0)
            self.assign(node, self.texts[node], last=False)

    def unpacked(self, node: object) -> list[fx.Node | None]:
        """The parts of a tuple that code only unpacks; None for an unused part."""
        assert isinstance(node, fx.Node)
        counts = {unpacked_count(user) for user in node.users}
        if len(counts) != 1 or 0 in counts or self.locals.order[node] < self.straight or "_" in self.locals.nodes:
            return []
        parts: list[fx.Node | None] = [None] * counts.pop()
        for user in node.users:
            index = user.args[1]
            if not isinstance(index, int) or not 0 <= index < len(parts) or parts[index] is not None:
                return []
            parts[index] = user
        return parts


def is_read_of_form(node: fx.Node) -> bool:
    """Whether a node is the one read of a parameter from the module of a form."""
    source = node.args[0] if node.target is getattr else None
    return isinstance(source, fx.Node) and is_form(source) and len(node.users) == 1


def raised(error: Exception, names: GlobalNames) -> str:
    """The statement that ends a path: the model's own error, or P417."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = (last.line or "").startswith(("raise", "assert")) and not Path(last.filename).is_relative_to(TORCH)
    if not own or isinstance(error, PeftcError):  # an operation refused the values of this call: others may pass
        return f"raise {names.of(untraced)}({str(error)!r})"
    kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
    return f"raise {kind.__name__}({str(error)!r})"


def assigned_attributes(graph: fx.Graph) -> set[str]:
    """The paths of attributes that code assigns: `mlp.loss`."""
    owners = ((node.args[0], node.args[1]) for node in graph.nodes if node.target is setattr)
    modules = ((str(owner.target), name) for owner, name in owners if isinstance(owner, fx.Node))
    return {f"{module.removeprefix('_self')}.{name}".lstrip(".") for module, name in modules}


def remove_dead(graph: fx.Graph, others: Mapping[int, OtherPath | Exception]) -> None:
    """Removes nodes without side effects that no path uses."""
    # What only another path uses stays here: code may change its operands before the paths part.
    for other in others.values():
        if not isinstance(other, Exception):
            remove_dead(*other)
    shared = origins_in_use(others)
    pure = (getattr, operator.getitem, operator.contains, new_version, *INFIX, *PREFIX, "get")
    for node in reversed(list(graph.nodes)):
        unused = not node.users and node.meta.get("origin") not in shared
        if unused and (node.op == "get_attr" or is_size(node) or node.target in pure):
            graph.erase_node(node)


def origins_in_use(others: Mapping[int, OtherPath | Exception]) -> set[object]:
    """The origins of the nodes that some of these paths use."""
    paths = [other for other in others.values() if not isinstance(other, Exception)]
    own = {n.meta["origin"] for graph, _ in paths for n in graph.nodes if n.users and "origin" in n.meta}
    return own.union(*(origins_in_use(inner) for _, inner in paths))


@dataclass(frozen=True)
class Loop:
    """`pieces`: its variables; `nodes`: its body; `results`: its lists; `end`: its last node."""

    pieces: list[fx.Node]
    nodes: list[fx.Node]
    results: list[fx.Node]
    end: fx.Node


def loops_of(graph: fx.Graph) -> dict[fx.Node, Loop]:
    """The loops of a graph by their first and last nodes."""
    loops: dict[fx.Node, Loop] = {}
    nodes: list[fx.Node] = []  # since the first variable of a loop
    for node in graph.nodes:
        if node.target is end_loop:
            pieces = [n for n in nodes if n.target is segment]
            results = [user for n in nodes for user in n.users if user.target is collect]
            loops[nodes[0]] = loops[node] = Loop(pieces, nodes, results, node)
            nodes = []
        elif nodes or node.target is segment:
            nodes.append(node)
    return loops
