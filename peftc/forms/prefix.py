"""Trained keys and values that every query sees."""

from __future__ import annotations

from dataclasses import replace

from peftc.forms.arguments import DTYPE, hidden_width, integer
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import KeyValue, Shape


def _shape(args: Args, dims: Dims) -> Shape:
    if not isinstance(dims.target, KeyValue):
        raise Illegal(
            "P310",
            f"`prefix` gives rows of keys and values, here {dims.target}",
            help="write `kv = concat(prefix(…), kv)` at an attention",
        )
    width = hidden_width(args)
    if width is not None and width < 1:
        raise Illegal("P312", f"`mlp` has {width} hidden features; it needs at least one", "reparam")
    if width is None and args["keep"]:
        raise Illegal("P312", "`keep` stores the MLP of `reparam`; this prefix has none", "keep")
    if width is not None and args["std"] is not None:
        raise Illegal("P312", "`std` is for direct prefixes; the rows of this one come from an MLP", "std")
    return replace(dims.target, rows=integer(args, "len"))


def _count(args: Args, dims: Dims) -> Count:
    """Of all the sites that share the parameters: one site, or the whole group where it is reparametrised."""
    assert isinstance(dims.target, KeyValue)
    length, kv, m = integer(args, "len"), sum(dims.target.widths), hidden_width(args)
    if m is None:
        return Count(length * kv, length * kv)
    trained = length * dims.d_model + dims.d_model * m + m + dims.sites * kv * (m + 1)
    return Count(trained, trained if args["keep"] else length * kv * dims.sites)


register(
    Form(
        name="prefix",
        equation="K ← [P_k; K], V ← [P_v; V]; with reparam [P_k, P_v] = tanh(E W + b) W' + b' for all layers of a group",
        takes_input=False,
        params=(
            Param("len", "int", "rows added to the keys and to the values, in tokens", required=True, low=1),
            Param("reparam", "call", "make the rows by one MLP for each attention group", choices=("mlp",)),
            Param("keep", "bool", "save the MLP too, so that training can go on; else only the rows it makes", False),
            Param("std", "float", "deviation of the first values of direct rows; 0.02 without it", low=0.0),
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=lambda args: "it adds rows to the keys and values, which no weight holds",
        module="peftc.forms.prefix_module:Prefix",
        paper="Li and Liang 2021, arXiv:2101.00190; He et al. 2022, arXiv:2110.04366, section 3.1",
        design=lambda source, args: f"softmax({source} P_kᵀ) P_v",
        collapses=lambda args: "prefix" if hidden_width(args) is not None and not args["keep"] else None,
        common=lambda args: None if args.get("reparam") is None else "group",
    )
)
