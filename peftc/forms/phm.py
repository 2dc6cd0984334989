"""Bottlenecks whose weights are sums of Kronecker products (Compacter)."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, REDUCTION, divides, integer, not_linear, over, width
from peftc.forms.form import Args, Argument, Dims, FirstValue, Form, Parameter, PlacementError, Scope
from peftc.forms.registry import register
from peftc.forms.shapes import Shape

_RULE: FirstValue = ("normal", 1e-4)  # of the Aᵢ


def _glorot(fan_in: int, fan_out: int) -> FirstValue:
    return ("uniform", sqrt(6 / (fan_in + fan_out)))


@register
class PHM(Form):
    name = "phm"
    equation = (
        "f(x) = act(x W_down + b_down) W_up + b_up, each W = Σᵢ Aᵢ ⊗ (Lᵢ Rᵢ), the Aᵢ common to all sites of the edit"
    )
    paper = "Mahabadi et al. 2021, arXiv:2106.04647 (Compacter); Zhang et al. 2021, arXiv:2102.08597 (PHM)"
    module = "peftc.forms.phm_module:PHMModule"
    common_module = "peftc.forms.phm_module:Rules"
    mixes_shapes = True
    arguments = (
        Argument("r", "int", "width of the bottleneck, in features; n divides it", low=1),
        REDUCTION,
        Argument("n", "int", "number and size of the Aᵢ; it divides all features", 4, low=1),
        Argument("rank", "int", "rank of Lᵢ Rᵢ", 1, low=1),
        Argument("factorised", "bool", "whether Lᵢ Rᵢ is such a product, else one matrix", True),
        Argument("shared", "bool", "whether the Aᵢ are common to all projections, else each has its own", True),
        ACT,
        Argument("bias", "bool", "whether the two projections have biases", True),
        DROPOUT,
        DTYPE,
    )

    def sizes(self, args: Args, dims: Dims) -> tuple[int, int, int]:
        """d_in, r, d_out. Raises: PlacementError P313 where n does not divide one of them."""
        d_in, d_out = self.read_features(dims), self.written_features(dims)
        r, n = width(args, d_in, self.name), integer(args, "n")
        for whole in (d_in, d_out):
            divides(self.name, args, "n", whole)
        if r % n:
            argument, message = "r" if args["r"] is not None else "reduction", f"`n` of `phm` is {n}"
            message += f", which does not divide r = {r}"
            raise PlacementError("P313", message, argument, help=f"use r={r // n * n + n}")
        return d_in, r, d_out

    def shape(self, args: Args, dims: Dims) -> Shape:
        most, rank = min(self.sizes(args, dims)) // integer(args, "n"), integer(args, "rank")
        if args["factorised"] and rank > most:
            raise PlacementError("P311", f"the smaller factors of `phm` have at most rank {most}, not {rank}", "rank")
        return over(dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        d_in, r, d_out = self.sizes(args, dims)
        n, rank, shared, factors = integer(args, "n"), integer(args, "rank"), args["shared"], args["factorised"]
        for name, a, b in (("down", d_in // n, r // n), ("up", r // n, d_out // n)):
            yield Parameter(f"{name}_left", (n, a, rank) if factors else None, _glorot(a, rank))
            yield Parameter(f"{name}_right", (n, rank, b) if factors else None, _glorot(rank, b))
            yield Parameter(f"{name}_whole", None if factors else (n, a, b), _glorot(a, b))
            yield Parameter(f"{name}_A", None if shared else (n, n, n), _RULE)
        yield Parameter("down_bias", (r,) if args["bias"] else None)
        yield Parameter("up_bias", (d_out,) if args["bias"] else None)
        yield Parameter("A", (n, n, n) if shared else None, _RULE, scope="common")

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return not_linear(args)

    def common(self, args: Args) -> Scope | None:
        return "edit" if args["shared"] else None
