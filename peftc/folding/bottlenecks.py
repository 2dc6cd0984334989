"""Equations that add a bottleneck of `x` to `h`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peftc.forms.module import FormModule
from peftc.planning.foldability.check import is_number
from peftc.planning.ir import Arithmetic, Constant, FormCall, Read, SiteEdit, Term


@dataclass(eq=False)
class NotWider(Exception):
    """Why an edit is no bottleneck, or its ffn cannot be widened."""

    reason: str


Bottleneck = tuple[FormCall, tuple[tuple[str, Term], ...]]  # a form, and its factors with their operators


def bottleneck_of(site_edit: SiteEdit) -> Bottleneck:
    """The bottleneck of `h += factors * form(x)`. Raises: NotWider for any other equation."""
    is_ffn = site_edit.site.steps[-1][0] == "ffn" and not site_edit.lets
    if is_ffn and len(site_edit.assigns) == 1 and site_edit.assigns[0].state == "h":
        value = site_edit.assigns[0].value
        if isinstance(value, Arithmetic) and value.op == "+":
            for one, other in ((value.left, value.right), (value.right, value.left)):
                if isinstance(one, Read) and one.state == "h" and (bottleneck := product(other)) is not None:
                    return bottleneck
    raise NotWider("it is not a sum of `h` and a bottleneck of `x`")


def product(term: Term) -> Bottleneck | None:
    match term:
        case FormCall(input=Read(state="x")) if not term.instance.tasks:
            return term, ()
        case Arithmetic(op="*", left=left, right=right):
            for one, other in ((left, right), (right, left)):
                if is_number(other) and (inner := product(one)) is not None:
                    return inner[0], (*inner[1], ("*", other))
        case Arithmetic(op="/", left=left, right=right) if is_number(right) and (inner := product(left)) is not None:
            return inner[0], (*inner[1], ("/", right))
        case _:
            pass
    return None


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


def is_sum(site_edit: SiteEdit) -> bool:
    """Whether an edit adds to h what does not depend on h: such edits commute."""
    try:
        bottleneck_of(site_edit)
    except NotWider:
        return False
    return True
