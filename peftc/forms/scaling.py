"""Factors: one for each feature, one for a site, one for each example."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, features, integer, number
from peftc.forms.registry import Args, AtInit, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Heads, KeyValue, Rows, Scalar, Shape, Tokens, Vector

INIT_VALUE = Param("init", "float", "first value of every entry", 1.0)


def vector_size(target: Shape) -> tuple[int, ...]:
    """The stored shape of `vector` at a state: broadcast over everything but heads and features.

    Raises: Illegal P310 where a state has no features of its own.
    """
    match target:
        case Tokens(d=d) | Vector(d):
            return (d,)
        case Heads(heads, d_head):
            return (heads, d_head)
        case Rows(heads=heads, d_head=d_head):
            return (heads, 1, d_head)
        case _:
            raise Illegal("P310", f"`vector` has one entry for each feature; {target} has no features to scale")


def _shape(args: Args, dims: Dims) -> Shape:
    vector_size(dims.target)
    return dims.target


def _count(args: Args, dims: Dims) -> Count:
    size = vector_size(dims.target)
    total = size[0] * (size[-1] if len(size) > 1 else 1)
    return Count(total, total)


def _at_init(args: Args) -> AtInit:
    return number(args, "init")


register(
    Form(
        name="vector",
        equation="f = l, one trained entry for each feature",
        takes_input=False,
        params=(INIT_VALUE, DTYPE),
        shape=_shape,
        count=_count,
        at_init=_at_init,
        affine=lambda args: None,
        module="peftc.forms.scaling_module:Vector",
        paper="Liu et al. 2022, arXiv:2205.05638, section 3.3 ((IA)³)",
    )
)
register(
    Form(
        name="scalar",
        equation="f = s, one trained number",
        takes_input=False,
        params=(INIT_VALUE, DTYPE),
        shape=lambda args, dims: Scalar(),
        count=lambda args, dims: Count(1, 1),
        at_init=_at_init,
        affine=lambda args: None,
        module="peftc.forms.scaling_module:Scalar",
        paper="He et al. 2022, arXiv:2110.04366, section 4.5 (learned s)",
    )
)


def gates(args: Args) -> int:
    """How many numbers a gate has for an example."""
    return 1 if args["rows"] is None else integer(args, "rows")


def _gate_shape(args: Args, dims: Dims) -> Shape:
    features("gate", dims.input, "reads")
    if args["rows"] is not None and not isinstance(dims.target, KeyValue):
        help_ = "write `kv = concat(gate(x, rows=l) * prefix(len=l), kv)`"
        raise Illegal("P310", f"`rows` of `gate` are those of a prefix, here {dims.target}", "rows", help=help_)
    return Scalar(per_example=True, rows=0 if args["rows"] is None else integer(args, "rows"))


def _gate_count(args: Args, dims: Dims) -> Count:
    total = gates(args) * (features("gate", dims.input, "reads") + 1)
    return Count(total, total)


register(
    Form(
        name="gate",
        equation="f(x) = mean over tokens of σ(x w + b), one number for each example; with rows, one for each row of a prefix, too",
        takes_input=True,
        params=(Param("rows", "int", "numbers for each example, as many as the prefix has rows", low=1), DTYPE),
        shape=_gate_shape,
        count=_gate_count,
        at_init=lambda args: None,
        affine=lambda args: "it depends on the input",
        module="peftc.forms.scaling_module:Gate",
        paper="Mao et al. 2022, arXiv:2110.07577, section 3.2 (UniPELT); Zhang et al. 2023, arXiv:2305.15212, Eq. 2 (rows)",
    )
)
