"""Trained tokens before those of the input."""

from __future__ import annotations

from peftc.forms.arguments import DTYPE, describe, hidden_width, integer
from peftc.forms.registry import Args, Count, Dims, Form, Illegal, Param, register
from peftc.forms.shapes import Shape, Tokens

PROMPT = "prompt"  # whose tokens its rows are


def _shape(args: Args, dims: Dims) -> Shape:
    if not isinstance(dims.target, Tokens):
        raise Illegal(
            "P310",
            f"`prompt` gives tokens [len, d], here {describe(dims.target)}",
            help="write `h = concat(prompt(…), h)` at `embed`",
        )
    length = integer(args, "len")
    if dims.positions is not None and length >= dims.positions:
        raise Illegal(
            "P314",
            f"a prompt of {length} tokens leaves no position for the input: the model has {dims.positions}",
            "len",
            help=f"use len < {dims.positions}",
        )
    if hidden_width(args) is None and args["keep"]:
        raise Illegal("P312", "`keep` stores the MLP of `reparam`; this prompt has none", "keep")
    if hidden_width(args) is not None and args["std"] is not None:
        raise Illegal("P312", "`std` is for direct prompts; the rows of this one come from an MLP", "std")
    if args["intrinsic"] is not None and hidden_width(args) is None:
        raise Illegal("P312", "`intrinsic` is the size of what the MLP of `reparam` reads", "intrinsic")
    return Tokens(dims.target.d, PROMPT)


def _count(args: Args, dims: Dims) -> Count:
    assert isinstance(dims.target, Tokens)
    length, d, m = integer(args, "len"), dims.target.d, hidden_width(args)
    if m is None:
        return Count(length * d, length * d)
    if args["intrinsic"] is not None:
        k = integer(args, "intrinsic")
        trained = k + k * m + m + m * length * d + length * d
    else:
        trained = length * d + d * m + m + m * m + m + m * d + d
    return Count(trained, trained if args["keep"] else length * d)


register(
    Form(
        name="prompt",
        equation="h ← [P; h]; with reparam P = MLP(E) row by row, or P = W' tanh(W z + b) + b' of a small vector z",
        takes_input=False,
        params=(
            Param("len", "int", "rows added before the tokens of the input", required=True, low=1),
            Param("reparam", "call", "make the rows by an MLP with so many hidden features", choices=("mlp",)),
            Param("intrinsic", "int", "make all rows at once from one vector of this size", low=1),
            Param("keep", "bool", "save the MLP too, so that training can go on; else only the rows it makes", False),
            Param("std", "float", "deviation of the first values of direct rows; 0.02 without it", low=0.0),
            DTYPE,
        ),
        shape=_shape,
        count=_count,
        at_init=lambda args: None,
        affine=lambda args: "it adds tokens, which no weight holds",
        module="peftc.forms.prompt_module:Prompt",
        paper="Lester et al. 2021, arXiv:2104.08691; Liu et al. 2021, arXiv:2103.10385 (P-tuning); "
        "Qin et al. 2021, arXiv:2110.07867 (intrinsic prompt tuning)",
        collapses=lambda args: "prompt" if hidden_width(args) is not None and not args["keep"] else None,
    )
)
