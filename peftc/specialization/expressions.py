"""Nodes of a graph as Python expressions, and the layout of generated functions."""

import inspect
import itertools
import keyword
import math
import operator
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import fx

from peftc.dataflow.nodes import ancestors, is_edit, is_tensor
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.rewriting.boundary import base_call
from peftc.rewriting.edits import CONTAINER
from peftc.specialization.names import GlobalNames
from peftc.tracing.operations import DIRECT

WIDTH = 110  # of generated lines
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
TRAINING = "training"  # the attribute of modules
FORWARDED = "forwarded"  # in a call's meta: the `**` parameter that is passed on to it


class Expressions:
    """Prints nodes as expressions. `texts`: the name or expression of each node printed so far."""

    def __init__(self, names: GlobalNames, signature: inspect.Signature) -> None:
        self.names, self.signature = names, signature
        self.texts: dict[fx.Node, str] = {}

    def of(self, node: fx.Node) -> str:
        target: Any = node.target
        args = node.args
        if node.op == "get_attr":
            text = attribute_path(target)
            is_read = is_tensor(node) or (is_edit(node) and not is_form(node))
            return self.names.read(text) if is_read and target != "_self" else text
        if node.op == "call_module":
            method = ".forward" if DIRECT in node.meta else ""
            return f"{attribute_path(target)}{method}({self.arguments(node, args)})"
        if node.op == "call_method":
            return f"{self.operand(args[0])}.{target}({self.arguments(node, args[1:])})"
        if target is getattr:
            text = f"{self.operand(args[0])}.{args[1]}"
            return self.names.read(text) if is_parameter_of_form(node) else text
        if target is operator.getitem:
            return f"{self.operand(args[0])}[{self.index(args[1])}]"
        if target in INFIX and len(args) == 2:
            return f"{self.operand(args[0])} {INFIX[target]} {self.operand(args[1])}"
        if target in PREFIX:
            return f"{PREFIX[target]}{self.operand(args[0])}"
        if target is operator.contains:
            return f"{self.operand(args[1])} in {self.operand(args[0])}"
        if target is base_call:
            own = self.value(node.kwargs["own"]) if node.kwargs else "self"
            values = [own, *map(self.value, args[1:])]
            return f"{self.names.of(args[0])}.forward({call_arguments(self.signature, values)})"
        return f"{self.names.of(target)}({self.arguments(node, args)})"

    def of_arguments(self, node: fx.Node) -> str:
        """A node as one nested expression of the placeholders, to be used as an operand."""
        inner = Expressions(self.names, self.signature)
        for source in sorted({node, *ancestors(node)}):
            inner.texts[source] = str(source.target).lstrip("*") if source.op == "placeholder" else inner.of(source)
        return inner.operand(node)

    def arguments(self, node: fx.Node, args: Iterable[Any]) -> str:
        """The arguments of a call, the forwarded keywords last."""
        forwarded = [f"**{node.meta[FORWARDED]}"] if FORWARDED in node.meta else []
        target, defaults = node.target, dict[str, Any]()
        if inspect.isfunction(target) and target.__module__.startswith("torch.nn.functional"):
            parameters = inspect.signature(target).parameters.values()  # a traced call passes them all
            defaults = {p.name: p.default for p in parameters if p.default in (None, True, False)}
        keywords = [f"{k}={self.value(v)}" for k, v in node.kwargs.items() if v is not defaults.get(k, node)]
        return ", ".join([*map(self.value, args), *keywords, *forwarded])

    def operand(self, value: Any) -> str:
        text = self.value(value)
        if isinstance(value, fx.Node):
            compound = value.target in INFIX or value.target in PREFIX or value.target is operator.contains
            return f"({text})" if compound and not text.isidentifier() else text
        simple = isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and value >= 0)
        return text if simple else f"({text})"

    def index(self, key: Any) -> str:
        if isinstance(key, tuple) and key:
            return ", ".join(map(self.index, key))
        if isinstance(key, slice):
            parts = ["" if v is None else self.value(v) for v in (key.start, key.stop)]
            return ":".join(parts) + (f":{self.value(key.step)}" if key.step is not None else "")
        return self.value(key)

    def value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value not in self.texts:  # an equation outside of a loop reads a value of one iteration
                origin = value.meta.get("origin", ("?",))[0] or "the region"
                note = f"the state is the result of `{value.target}` in {origin}"
                message = "a state is read behind the loop that computes it piece by piece"
                raise PeftcError(Diagnostic("P405", message, notes=(note,)))
            return self.texts[value]
        if isinstance(value, tuple):
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.value(k)}: {self.value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(map(self.value, value))}}}" if value else "set()"
        if isinstance(value, slice):
            return f"slice({', '.join(self.value(v) for v in (value.start, value.stop, value.step))})"
        if value is ...:
            return "..."
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, Enum):
            member = f".{value.name}" if value.name in type(value).__members__ else f"({value.value!r})"
            return f"{self.names.of(type(value))}{member}"
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        return f"torch.{value!r}" if isinstance(value, torch.device) else self.names.of(value)


def is_form(node: Any) -> bool:
    """Whether a node reads the module of a form, whose parameters are then read from it."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and str(node.target).startswith(f"{CONTAINER}.")


def is_parameter_of_form(node: fx.Node) -> bool:
    """Whether a node reads a tensor of a form, or of the module that it shares with others."""
    owner: Any = node.args[0] if node.target is getattr and node.args[1] != TRAINING else None
    return is_form(owner) or (isinstance(owner, fx.Node) and is_parameter_of_form(owner))


def attribute_path(target: str) -> str:
    """`layer.0.dropout` as code: `getattr(self.layer, "0").dropout`."""
    text = "self"
    for part in () if target == "_self" else target.split("."):
        plain = part.isidentifier() and not keyword.iskeyword(part)
        text = f"{text}.{part}" if plain else f"getattr({text}, {part!r})"
    return text


def function(name: str, signature: inspect.Signature, lines: Iterable[str]) -> str:
    """The source of a function with this signature and these body lines."""
    return "\n".join([f"def {name}({parameters(signature)}):", *indented(lines)])


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def parameters(signature: inspect.Signature) -> str:
    """A forward's parameters as code; defaults that are no plain constants become None."""
    texts: list[str] = []
    starred = False
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            starred = True
            texts.append(f"{'*' if p.kind is p.VAR_POSITIONAL else '**'}{p.name}")
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            texts.append("*")
            starred = True
        plain = isinstance(p.default, (bool, int, float, str))
        default = "" if p.default is p.empty else f"={p.default!r}" if plain else "=None"
        texts.append(p.name + default)
    return ", ".join(texts)


def call_arguments(signature: inspect.Signature, values: Iterable[str] | None = None) -> str:
    """The arguments of a call of a forward: its own parameters, or `values` in their places."""
    texts: list[str] = []
    for p, value in zip(signature.parameters.values(), values or signature.parameters, strict=True):
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        texts.append(f"{p.name}={value}" if p.kind is p.KEYWORD_ONLY else star + value)
    return ", ".join(texts)


def wrapped(line: str) -> list[str]:
    """`line`, or the lines of a call or sum longer than `WIDTH`, with one argument a line."""
    if len(line) <= WIDTH or not line.endswith(")"):
        return [line]
    depth, cuts = 0, [len(line) - 1]  # positions of the call's brackets and commas, the last first
    for i, character in reversed([*enumerate(line)]):
        depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(character, 0)
        if depth == 0 or (depth == 1 and character == ","):
            cuts.append(i)
        if depth == 0:
            break
    parts = [line[start + 1 : stop].strip() for start, stop in itertools.pairwise(reversed(cuts))]
    is_call = re.search(r"[\w\])]$", line[: cuts[-1]]) is not None
    comma = "," if is_call or len(parts) > 1 else ""  # else it would make a tuple of a value in brackets
    return [line[: cuts[-1] + 1], *(f"    {p}{comma}" for p in parts), ")"]


def is_wrapped(source: str) -> bool:
    """Whether a line of generated code was too long, or is now; comments are never wrapped."""
    lines = (line for line in source.split("\n") if not line.lstrip().startswith("#"))
    return any(len(line) > WIDTH or line.endswith(("(", "[", "{")) for line in lines)


def write_dispatch(choices: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """Code that runs the first statement whose conditions hold. Shared ones are tested once."""
    lines: list[str] = []
    while choices:
        first = choices[0][0]
        if not first:
            return [*lines, choices[0][1]]
        group = [c for c in choices if c[0][:1] == first[:1]]
        columns = zip(*(conditions for conditions, _ in group), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
        inner = write_dispatch([(conditions[shared:], statement) for conditions, statement in group])
        head = [f"if {first[0]}:"] if shared == 1 else conjunction("if ", first[:shared], ":")
        lines += [*head, *indented(inner)]
        choices = [c for c in choices if c[0][:1] != first[:1]]
    return lines


def conjunction(before: str, conditions: Iterable[str], after: str = "") -> list[str]:
    """The lines of `before(a and b and …)after`, one condition a line."""
    first, *others = [*conditions] or ["True"]
    return [f"{before}(", f"    {first}", *(f"    and {c}" for c in others), f"){after}"]
