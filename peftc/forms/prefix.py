"""Trained keys and values that every query sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import sqrt

from peftc.forms.arguments import DTYPE, hidden_width, integer, number
from peftc.forms.form import Args, Argument, Dims, Form, ModulePath, Parameter, PlacementError, Scope
from peftc.forms.registry import register
from peftc.forms.shapes import KeyValue, Shape


@register
class Prefix(Form):
    name = "prefix"
    equation = "K ← [P_k; K], V ← [P_v; V]; with reparam [P_k, P_v] = tanh(E W + b) W' + b' for all layers of a group"
    paper = "Li and Liang 2021, arXiv:2101.00190; He et al. 2022, arXiv:2110.04366, section 3.1"
    inputs = ()
    module = "peftc.forms.prefix_module:PrefixModule"
    arguments = (
        Argument("len", "int", "rows added to the keys and to the values, in tokens", required=True, low=1),
        Argument("reparam", "call", "make the rows by one MLP for each attention group", choices=("mlp",)),
        Argument("keep", "bool", "save the MLP too, so that training can go on; else only the rows it makes", False),
        Argument("std", "float", "deviation of the first values of direct rows; 0.02 without it", low=0.0),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        if not isinstance(dims.target, KeyValue):
            message = f"`prefix` gives rows of keys and values, here {dims.target}"
            raise PlacementError("P310", message, help="write `kv = concat(prefix(…), kv)` at an attention")
        width = hidden_width(args)
        if width is not None and width < 1:
            raise PlacementError("P312", f"`mlp` has {width} hidden features; it needs at least one", "reparam")
        if width is None and args["keep"]:
            raise PlacementError("P312", "`keep` stores the MLP of `reparam`; this prefix has none", "keep")
        if width is not None and args["std"] is not None:
            raise PlacementError("P312", "`std` is for direct prefixes; the rows of this one come from an MLP", "std")
        return replace(dims.target, rows=integer(args, "len"))

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        """Of one site; of all that share an MLP."""
        assert isinstance(dims.target, KeyValue)
        length, target, d, m = integer(args, "len"), dims.target, dims.d_model, hidden_width(args)
        sizes = {"key": (target.kv_heads, length, target.d_head)}
        sizes["value"] = (target.kv_heads, length, target.d_value or target.d_head)
        if m is None:
            first = ("normal", 0.02 if args["std"] is None else number(args, "std"))
            yield from (Parameter(name, size, first) for name, size in sizes.items())
            return
        role, features = "trained" if args["keep"] else "training", dims.sites * sum(target.widths)
        yield Parameter("embedding", (length, d), ("normal", 1.0), role=role)
        yield Parameter("down", (m, d), "kaiming", role=role)
        yield Parameter("down_bias", (m,), ("uniform", 1 / sqrt(d)), role=role)
        yield Parameter("up", (features, m), "kaiming", role=role)
        yield Parameter("up_bias", (features,), ("uniform", 1 / sqrt(m)), role=role)
        if not args["keep"]:
            for _ in range(dims.sites):
                yield from (Parameter(name, size, role="saved") for name, size in sizes.items())

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "it adds rows to the keys and values, which no weight holds"

    def common(self, args: Args) -> Scope | None:
        return None if args.get("reparam") is None else "group"

    def saved_as(self, args: Args) -> str | None:
        return "prefix" if hidden_width(args) is not None and not args["keep"] else None

    def module_of(self, args: Args) -> ModulePath:
        return self.module if hidden_width(args) is None else "peftc.forms.prefix_module:PrefixGroup"

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        return f"softmax({source} P_kᵀ) P_v"
