"""Trained tokens before those of the input."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from peftc.forms.arguments import DTYPE, describe, hidden_width, integer, number
from peftc.forms.form import Args, Argument, Dims, Form, Parameter, PlacementError
from peftc.forms.registry import register
from peftc.forms.shapes import Shape, Tokens

PROMPT = "prompt"  # whose tokens its rows are


@register
class Prompt(Form):
    name = "prompt"
    equation = "h ← [P; h]; with reparam P = MLP(E) row by row, or P = W' tanh(W z + b) + b' of a small vector z"
    paper = (
        "Lester et al. 2021, arXiv:2104.08691; Liu et al. 2021, arXiv:2103.10385 (P-tuning); "
        "Qin et al. 2021, arXiv:2110.07867 (intrinsic prompt tuning)"
    )
    inputs = ()
    module = "peftc.forms.prompt_module:PromptModule"
    arguments = (
        Argument("len", "int", "rows added before the tokens of the input", required=True, low=1),
        Argument("reparam", "call", "make the rows by an MLP with so many hidden features", choices=("mlp",)),
        Argument("intrinsic", "int", "make all rows at once from one vector of this size", low=1),
        Argument("keep", "bool", "save the MLP too, so that training can go on; else only the rows it makes", False),
        Argument("std", "float", "deviation of the first values of direct rows; 0.02 without it", low=0.0),
        DTYPE,
    )

    def shape(self, args: Args, dims: Dims) -> Shape:
        if not isinstance(dims.target, Tokens):
            message = f"`prompt` gives tokens [len, d], here {describe(dims.target)}"
            raise PlacementError("P310", message, help="write `h = concat(prompt(…), h)` at `embed`")
        length, direct = integer(args, "len"), hidden_width(args) is None
        if dims.positions is not None and length >= dims.positions:
            message = f"a prompt of {length} tokens leaves no position for the input: the model has {dims.positions}"
            raise PlacementError("P314", message, "len", help=f"use len < {dims.positions}")
        if direct and args["keep"]:
            raise PlacementError("P312", "`keep` stores the MLP of `reparam`; this prompt has none", "keep")
        if not direct and args["std"] is not None:
            raise PlacementError("P312", "`std` is for direct prompts; the rows of this one come from an MLP", "std")
        if direct and args["intrinsic"] is not None:
            raise PlacementError("P312", "`intrinsic` is the size of what the MLP of `reparam` reads", "intrinsic")
        return Tokens(dims.target.d, PROMPT)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        assert isinstance(dims.target, Tokens)
        rows, m = (integer(args, "len"), dims.target.d), hidden_width(args)
        if m is None:
            yield Parameter("tokens", rows, ("normal", 0.02 if args["std"] is None else number(args, "std")))
            return
        role = "trained" if args["keep"] else "training"
        whole, source = args["intrinsic"] is not None, rows
        if whole:
            source = (integer(args, "intrinsic"),)
        yield Parameter("tokens", None)
        yield Parameter("embedding", source, ("normal", 1.0), role=role)
        d_out = rows[0] * rows[1] if whole else rows[1]
        for name, exists, size in (
            ("inner", True, (m, source[-1])),
            ("middle", not whole, (m, m)),
            ("outer", True, (d_out, m)),
        ):
            yield Parameter(name, size if exists else None, "kaiming", role=role)
            bias = size[:1] if exists else None
            yield Parameter(f"{name}_bias", bias, ("uniform", 1 / sqrt(size[1])), role=role)
        if not args["keep"]:
            yield Parameter("tokens", rows, role="saved")

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        return "it adds tokens, which no weight holds"

    def saved_as(self, args: Args) -> str | None:
        return "prompt" if hidden_width(args) is not None and not args["keep"] else None
