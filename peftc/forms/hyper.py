"""Adapters whose weights are made by networks that tasks and layers have in common."""

from __future__ import annotations

from peftc.forms.arguments import ACT, DROPOUT, DTYPE, REDUCTION, WIDTH, features, integer, over
from peftc.forms.bottleneck import affine, width
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, Spot, register
from peftc.forms.shapes import Shape


def spots_of(dims: Dims) -> tuple[Spot, ...]:
    """The sites that have the networks in common; this one alone where they are not known yet."""
    d_in, d_out = features("hyper", dims.input, "reads"), features("hyper", dims.target, "writes")
    return dims.spots or (Spot("", "", d_in, d_out),)


def layers_of(dims: Dims) -> list[str]:
    """The layers, in order: each has an embedding."""
    return list(dict.fromkeys(spot.layer for spot in spots_of(dims)))


def stack_of(args: Args, spot: Spot) -> str:
    """The stack of a site, where each has networks of its own; else "", the one name for all."""
    return spot.layer.rpartition("[")[0] if args["nets"] == "stacks" else ""


def net_of(args: Args, spot: Spot) -> str:
    """The network of a site, by name: the place in a layer, the stack, or "", the one for all."""
    return spot.part if args["nets"] == "positions" else stack_of(args, spot)


def parts_of(args: Args, dims: Dims) -> dict[str, list[str]]:
    """The places in a layer, in order, by stack: each has an embedding."""
    found: dict[str, list[str]] = {}
    for spot in spots_of(dims):
        parts = found.setdefault(stack_of(args, spot), [])
        if spot.part not in parts:
            parts.append(spot.part)
    return found


def nets_of(args: Args, dims: Dims) -> dict[str, tuple[int, int]]:
    """d_in and d_out of what each network makes, by its name.

    Raises: Illegal P301 where one network would have to make weights of several sizes.
    """
    found: dict[str, tuple[int, int]] = {}
    for spot in spots_of(dims):
        name, size = net_of(args, spot), (spot.d_in, spot.d_out)
        if found.setdefault(name, size) != size:
            first, here = (f"{a} to {b} features" for a, b in (found[name], size))
            help_ = "write one edit for each size" if args["nets"] == "positions" else "write `nets=positions`"
            raise Illegal("P301", f"one network makes adapters of one size, here {first} and {here}", "nets", (), help_)
    return found


def made_count(args: Args, d_in: int, d_out: int) -> int:
    """How many numbers a network makes."""
    r = width(args, d_in, "hyper")
    return r * (d_in + d_out) + (r + d_out if args["bias"] else 0) + (2 * d_out if args["norm"] else 0)


def _shape(args: Args, dims: Dims) -> Shape:
    width(args, features("hyper", dims.input, "reads"), "hyper")
    features("hyper", dims.target, "writes")
    nets_of(args, dims)
    return over(dims)


def _common_count(args: Args, dims: Dims) -> Count:
    return Count(integer(args, "t"), integer(args, "t"))


def _all_count(args: Args, dims: Dims) -> Count:
    t, m = integer(args, "t"), integer(args, "m")
    stacks = parts_of(args, dims)
    total = t * (len(layers_of(dims)) + sum(map(len, stacks.values())))
    total += len(stacks) * (3 * t * m + m + m * t + t + 2 * t)
    total += (t + bool(args["offset"])) * sum(made_count(args, *size) for size in nets_of(args, dims).values())
    return Count(total, total)


register(
    Form(
        name="hyper",
        equation="f(x) = γ ⊙ LN(act(x D + b) U + c) + β, all of them W I or, with `offset`, W I + w, where "
        "I = LN(P₂ ReLU(P₁ [task; layer; position])): one embedding for each task, layer and position, one set of networks for the "
        "sites of the edit, or of each stack, and all tasks",
        takes_input=True,
        params=(
            WIDTH,
            REDUCTION,
            Param("t", "int", "features of the embeddings, and of I", 64, low=1),
            Param("m", "int", "hidden features between P₁ and P₂", 128, low=1),
            Param(
                "nets",
                "choice",
                "networks that make the weights: one for all sites, one for each position in a layer, or one for each stack; "
                "stacks have P₁, P₂ and the embeddings of positions apart, too",
                "one",
                choices=("one", "positions", "stacks"),
            ),
            Param("offset", "bool", "whether the networks have biases: w", False),
            ACT,
            Param("bias", "bool", "whether b and c are made, too", True),
            Param("norm", "bool", "whether there are LN, γ and β", True),
            DROPOUT,
            DTYPE,
        ),
        shape=_shape,
        count=lambda args, dims: Count(0, 0),
        at_init=lambda args: None,
        affine=lambda args: "its layer norm is not linear" if args["norm"] else affine(args),
        module="peftc.forms.hyper_module:Hyper",
        paper="Karimi Mahabadi et al. 2021, arXiv:2106.04489 (HyperFormer++), Eq. 1-6",
        common=lambda args: "edit",
        common_count=_common_count,
        all_count=_all_count,
        anywhere=True,
    )
)
