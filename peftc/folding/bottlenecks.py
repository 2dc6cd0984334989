"""Equations that add a bottleneck of `x` to `h`, and the number it is multiplied by."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peftc.forms.module import FormModule
from peftc.planning.ir import Arithmetic, Constant, FormCall, Read, SiteEdit, Term


@dataclass(eq=False)
class NotWider(Exception):
    """Why an edit is not such a bottleneck, or its ffn cannot be widened."""

    reason: str


def bottleneck_of(placed: SiteEdit) -> tuple[FormCall, tuple[tuple[str, Term], ...]]:
    """The form of `h += factors * form(x)`, and the factors with their operators. Raises: NotWider for any other equation."""
    if (
        placed.site.steps[-1][0] == "ffn"
        and len(placed.assigns) == 1
        and placed.assigns[0].state == "h"
        and not placed.lets
    ):
        value = placed.assigns[0].value
        if isinstance(value, Arithmetic) and value.op == "+":
            for one, other in ((value.left, value.right), (value.right, value.left)):
                if isinstance(one, Read) and one.state == "h" and (found := product(other)) is not None:
                    return found
    raise NotWider("it is not a sum of `h` and a bottleneck of `x`")


def product(term: Term) -> tuple[FormCall, tuple[tuple[str, Term], ...]] | None:
    match term:
        case FormCall(input=Read(state="x")) if not term.instance.tasks:
            return term, ()
        case Arithmetic(op="*", left=left, right=right):
            for one, other in ((left, right), (right, left)):
                if is_number(other) and (found := product(one)) is not None:
                    return found[0], (*found[1], ("*", other))
        case Arithmetic(op="/", left=left, right=right) if is_number(right) and (found := product(left)) is not None:
            return found[0], (*found[1], ("/", right))
        case _:
            pass
    return None


def is_number(term: Term) -> bool:
    return isinstance(term, Constant) or (
        isinstance(term, FormCall) and term.instance.form.name == "scalar" and not term.instance.tasks
    )


def factor_of(factors: Collection[tuple[str, Term]], modules: Mapping[str, FormModule]) -> Tensor:
    scale = torch.ones((), dtype=torch.float64)
    for op, term in factors:
        if isinstance(term, Constant):
            value = torch.tensor(term.value, dtype=torch.float64)
        else:
            assert isinstance(term, FormCall)
            value = modules[term.instance.key](scale).detach().squeeze()
        scale = scale * value if op == "*" else scale / value
    return scale


def is_sum(placed: SiteEdit) -> bool:
    """Whether an edit adds to h what does not depend on h: the order of such edits makes no difference."""
    try:
        bottleneck_of(placed)
    except NotWider:
        return False
    return True
