"""Terms in one form, whatever way they are written: sums and products without an order, and numbers
multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

from peftc.planning import ir
from peftc.planning.ir import FormCall, FormInstance
from peftc.syntax import ast

Node = ir.Term | ast.Expr
# Arguments that do not change what a form computes, or that the sizes of its tensors tell.
_OTHERS = frozenset({"init", "keep", "std", "r", "reduction"})
_OF_SCALE = frozenset({"alpha", "rslora"})


@dataclass(frozen=True, eq=False)
class Product:
    """A number, and the forms by which it is multiplied, by name."""

    number: float
    calls: dict[str, FormCall]

    @classmethod
    def of(cls, term: ir.Term) -> Product:
        factors = list(operands(term, "*"))
        return cls(_number(factors), {one.instance.form.name: one for one in factors if isinstance(one, FormCall)})


def operands(term: Node, op: str) -> Iterator[Node]:
    """The terms of a sum, or the factors of a product."""
    match term:
        case ir.Arithmetic(op=own, left=left, right=right) | ast.Binary(op=own, left=left, right=right) if own == op:
            yield from operands(left, op)
            yield from operands(right, op)
        case _:
            yield term


def text(term: Node) -> str:
    match term:
        case ir.Read(state=name) | ast.Name(id=name):
            return name
        case ir.FrozenCall(function=function, input=value) | ast.Call(function=function, args=(value,)):
            return f"{function}({text(value)})"
        case ir.Feature(input=value, index=index):
            return f"{text(value)}[{index}]"
        case ir.Concat(parts=parts):
            return f"concat({', '.join(map(text, parts))})"
        case ir.Arithmetic(op="+") | ast.Binary(op="+"):
            return f"({' + '.join(sorted(map(text, operands(term, '+'))))})"
        case ir.Arithmetic(op="-" | "/" as op, left=left, right=right):
            return f"({text(left)} {op} {text(right)})"
        case ir.Constant() | ir.FormCall() | ir.Arithmetic():
            factors = list(operands(term, "*"))
            number = _number(factors)
            texts = sorted(_factor(one) for one in factors if not isinstance(one, ir.Constant))
            return " * ".join([*([repr(number)] if number != 1 or not texts else []), *texts])
        case _:
            return repr(term)


def _factor(term: Node) -> str:
    if not isinstance(term, FormCall):
        return text(term)
    form = term.instance.form
    args = {k: v for k, v in form.fill(term.instance.args).items() if k not in (_OTHERS | _scale_arguments(term))}
    return f"{form.name}[{form.text}]({', '.join(map(text, term.inputs))}; {args})"


def _scale_arguments(call: FormCall) -> frozenset[str]:
    return _OF_SCALE if call.instance.form.name == "lora" else frozenset()


def _number(factors: list[Node]) -> float:
    """The product of the numbers; alpha / r of a LoRA is one."""
    numbers = (factor.value for factor in factors if isinstance(factor, ir.Constant))
    scales = (lora_scale(f.instance) for f in factors if isinstance(f, FormCall) and f.instance.form.name == "lora")
    return prod([*numbers, *scales], start=1.0)


def lora_scale(instance: FormInstance) -> float:
    args = instance.form.fill(instance.args)
    rank, alpha = float(args["r"]), args["alpha"]  # pyright: ignore[reportArgumentType]
    alpha = rank if alpha is None or alpha == "r" else float(alpha)  # pyright: ignore[reportArgumentType]
    return alpha / (sqrt(rank) if args["rslora"] else rank)
