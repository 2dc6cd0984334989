"""Adapters whose weights are made by networks that tasks and layers have in common."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, REDUCTION, WIDTH, integer, not_linear, over, width
from peftc.forms.form import Args, Argument, Dims, FirstValue, Form, Parameter, PlacementError, Scope, Spot
from peftc.forms.registry import register
from peftc.forms.shapes import Shape

_STD: FirstValue = ("normal", 0.01)  # of the first values of all projections


def stack_of(args: Args, spot: Spot) -> str:
    """The stack of a site, where each has networks of its own; else "", the one name for all."""
    return spot.layer.rpartition("[")[0] if args["nets"] == "stacks" else ""


def net_of(args: Args, spot: Spot) -> str:
    """The network of a site, by name: the place in a layer, the stack, or "", the one for all."""
    return spot.part if args["nets"] == "positions" else stack_of(args, spot)


@register
class Hyper(Form):
    name = "hyper"
    equation = (
        "f(x) = γ ⊙ LN(act(x D + b) U + c) + β, all of them W I or, with `offset`, W I + w, where "
        "I = LN(P₂ ReLU(P₁ [task; layer; position])): one embedding for each task, layer and position, one set of networks for the "
        "sites of the edit, or of each stack, and all tasks"
    )
    paper = "Karimi Mahabadi et al. 2021, arXiv:2106.04489 (HyperFormer++), Eq. 1-6"
    module = "peftc.forms.hyper_module:HyperModule"
    common_module = "peftc.forms.hyper_module:TaskEmbedding"
    tasks_module = "peftc.forms.hyper_module:HyperNetworks"
    mixes_shapes = True
    arguments = (
        WIDTH,
        REDUCTION,
        Argument("t", "int", "features of the embeddings, and of I", 64, low=1),
        Argument("m", "int", "hidden features between P₁ and P₂", 128, low=1),
        Argument(
            "nets",
            "choice",
            "networks that make the weights: one for all sites, one for each position in a layer, or one for each stack; "
            "stacks have P₁, P₂ and the embeddings of positions apart, too",
            "one",
            choices=("one", "positions", "stacks"),
        ),
        Argument("offset", "bool", "whether the networks have biases: w", False),
        ACT,
        Argument("bias", "bool", "whether b and c are made, too", True),
        Argument("norm", "bool", "whether there are LN, γ and β", True),
        DROPOUT,
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        width(args, self.read_features(dims), self.name)
        self.written_features(dims)
        self.nets(args, dims)
        return over(dims)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        t, m = integer(args, "t"), integer(args, "m")
        yield Parameter("embedding", (t,), ("normal", 1.0), scope="common")
        yield Parameter("layers", (len(self.layers(dims)), t), ("normal", 1.0), scope="tasks")
        for i, parts in enumerate(self.parts(args, dims).values()):
            end = f"_{i}" if args["nets"] == "stacks" else ""
            yield Parameter(f"positions{end}", (len(parts), t), ("normal", 1.0), scope="tasks")
            yield Parameter(f"p1{end}", (m, 3 * t), _STD, scope="tasks")
            yield Parameter(f"p1_bias{end}", (m,), scope="tasks")
            yield Parameter(f"p2{end}", (t, m), _STD, scope="tasks")
            yield Parameter(f"p2_bias{end}", (t,), scope="tasks")
            yield Parameter(f"norm_weight{end}", (t,), 1.0, scope="tasks")
            yield Parameter(f"norm_bias{end}", (t,), scope="tasks")
        for i, (d_in, d_out) in enumerate(self.nets(args, dims).values()):
            r = width(args, d_in, self.name)
            sizes = {
                "down": r * d_in,
                "up": d_out * r,
                "down_bias": r,
                "up_bias": d_out,
                "scale": d_out,
                "shift": d_out,
            }
            for name, size in sizes.items():
                exists = args["norm"] if name in ("scale", "shift") else args["bias"] or name in ("down", "up")
                yield Parameter(f"{name}_{i}", (size, t) if exists else None, _STD, scope="tasks")
                yield Parameter(f"{name}_offset_{i}", (size,) if exists and args["offset"] else None, scope="tasks")

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "its layer norm is not linear" if args["norm"] else not_linear(args)

    def common(self, args: Args) -> Scope | None:
        return "edit"

    # The sites that have the networks in common

    def spots(self, dims: Dims) -> tuple[Spot, ...]:
        """The sites; this one alone where the others are not known yet."""
        return dims.spots or (Spot("", "", self.read_features(dims), self.written_features(dims)),)

    def layers(self, dims: Dims) -> list[str]:
        """The layers, in order: each has an embedding."""
        return list(dict.fromkeys(spot.layer for spot in self.spots(dims)))

    def parts(self, args: Args, dims: Dims) -> dict[str, list[str]]:
        """The places in a layer, in order, by stack: each has an embedding."""
        parts: dict[str, list[str]] = {}
        for spot in self.spots(dims):
            of_stack = parts.setdefault(stack_of(args, spot), [])
            if spot.part not in of_stack:
                of_stack.append(spot.part)
        return parts

    def nets(self, args: Args, dims: Dims) -> dict[str, tuple[int, int]]:
        """d_in and d_out of what each network makes, by its name.

        Raises: PlacementError P301 where one network would have to make weights of several sizes.
        """
        nets: dict[str, tuple[int, int]] = {}
        for spot in self.spots(dims):
            name, size = net_of(args, spot), (spot.d_in, spot.d_out)
            if nets.setdefault(name, size) != size:
                first, here = (f"{a} to {b} features" for a, b in (nets[name], size))
                message = f"one network makes adapters of one size, here {first} and {here}"
                help_ = "write one edit for each size" if args["nets"] == "positions" else "write `nets=positions`"
                raise PlacementError("P301", message, "nets", help=help_)
        return nets
