"""Nodes of a graph as Python expressions."""

from __future__ import annotations

import inspect
import keyword
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from peftc.dataflow.nodes import ancestors
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.rewriting.boundary import base_call
from peftc.specialization.code_layout import call_arguments
from peftc.specialization.names import GlobalNames

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
FORWARDED = "forwarded"  # in a call's meta: the `**` parameter that is passed on to it


class Expressions:
    """Prints expressions. `texts`: the names or expressions of the nodes printed so far."""

    def __init__(self, names: GlobalNames, signature: inspect.Signature) -> None:
        self.names, self.signature = names, signature
        self.texts: dict[fx.Node, str] = {}

    def of(self, node: fx.Node) -> str:
        target: Any = node.target
        args = node.args
        if node.op == "get_attr":
            return attribute_path(target)
        if node.op == "call_module":
            return f"{attribute_path(target)}({self.arguments(node, args)})"
        if node.op == "call_method":
            return f"{self.operand(args[0])}.{target}({self.arguments(node, args[1:])})"
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
        defaults = _defaults(node.target)
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
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.value(v) for v in (value.start, value.stop, value.step))})"
        if value is ...:
            return "..."
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        return f"torch.{value!r}" if isinstance(value, torch.device) else self.names.of(value)


def _defaults(target: Any) -> dict[str, Any]:
    """The defaults of torch's own functions: a traced call passes all arguments."""
    if not inspect.isfunction(target) or not target.__module__.startswith("torch.nn.functional"):
        return {}
    return {
        p.name: p.default for p in inspect.signature(target).parameters.values() if p.default in (None, True, False)
    }


def attribute_path(target: str) -> str:
    """`layer.0.dropout` as code: `getattr(self.layer, "0").dropout`."""
    text = "self"
    for part in () if target == "_self" else target.split("."):
        plain = part.isidentifier() and not keyword.iskeyword(part)
        text = f"{text}.{part}" if plain else f"getattr({text}, {part!r})"
    return text
