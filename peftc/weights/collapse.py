"""What is saved of a compiled model: its tensors by name, and the spec whose parameters they are.

A reparametrised prefix or prompt is saved as the rows it makes, so the spec that is saved has a direct one in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from peftc.compiler import parameters, states
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms import FORMS
from peftc.forms.module import FormModule
from peftc.planning.ir import Instance
from peftc.rewriting.install import SHARED, identifier
from peftc.rewriting.record import Installation
from peftc.semantics.arguments import bind
from peftc.semantics.walk import expressions, is_shared
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec

ONLY_WHILE_TRAINING = ("reparam", "keep", "intrinsic")  # arguments that say how rows are made


def stored_tensors(model: nn.Module, record: Installation, name: str | None = None) -> dict[str, Tensor]:
    """Everything trained (by the spec `name`, or by all) and its state, by the name under which it is saved; prefixes as rows unless they
    keep their MLP.
    """
    found = list(_collapsed(record, {edit for part in record.chosen(name) for edit in part.edits}))
    collapsed = tuple(f"{place if one.owner is None else _owner_name(record, one)}." for place, one in found)
    kept = {**parameters(model, name), **states(model, name)}
    tensors = {n: p.detach() for n, p in kept.items() if not n.startswith(collapsed)}
    for place, one in found:
        where = record.places[place] if one.owner is None else f"{SHARED}.{identifier(one.owner)}"
        module = cast(FormModule, model.get_submodule(where))
        tensors |= {f"{place}.{name}": rows for name, rows in module.collapsed_at(one.index).items()}
    return tensors


def stored_spec(text: str) -> str:
    """The spec whose parameters `stored_tensors` are: direct rows, and no expectations, which were held before.

    Raises: P528 where shared rows are used twice in one edit.
    """
    spec = parse_text(text)
    shared = {let.name: _form(let) for let in spec.statements if isinstance(let, ast.Let) and _is_collapsed(_form(let))}
    statements = [s for s in spec.statements if not isinstance(s, ast.Expect) and getattr(s, "name", "") not in shared]
    direct = tuple(_direct_edit(s, shared) if isinstance(s, ast.Edit) else s for s in statements)
    return print_spec(replace(spec, statements=direct))


def _collapsed(record: Installation, edits: Collection[str]) -> Iterator[tuple[str, Instance]]:
    """The places of these edits' forms that are saved as what they make, each under its saved name."""
    for placed in (p for p in record.placed if p.edit in edits):
        for one in placed.instances:
            if one.form.collapses(one.form.fill(one.args)):
                yield f"{placed.edit}/{placed.site.path}/{one.key}", one


def _owner_name(record: Installation, instance: Instance) -> str:
    assert instance.owner is not None
    place = f"{SHARED}.{identifier(instance.owner)}"
    return next(name for name, where in record.places.items() if where == place)


# The spec ------------------------------------------------------------------------------------------------------------


def _form(let: ast.Let) -> ast.Expr:
    return let.value.args[0] if is_shared(let.value) and isinstance(let.value, ast.Call) else let.value


def _is_collapsed(value: ast.Expr) -> bool:
    form = FORMS.get(value.function) if isinstance(value, ast.Call) else None
    return (
        isinstance(value, ast.Call)
        and form is not None
        and form.collapses(bind(value, form, shared=not value.args).args)
    )


def _direct_edit(edit: ast.Edit, shared: dict[str, ast.Expr]) -> ast.Edit:
    calls = [e.function for line in edit.body for e in expressions(line.value) if isinstance(e, ast.Call)]
    for name in shared:
        if calls.count(name) > 1:
            raise PeftcError(
                Diagnostic(
                    "P528",
                    f"`{edit.name}` uses the shared `{name}` more than once, which rows cannot say",
                    help="write `keep=true` where it is bound, so that its MLP is saved",
                )
            )
    return replace(edit, body=tuple(replace(line, value=_direct(line.value, shared)) for line in edit.body))


def _direct(value: ast.Expr, shared: dict[str, ast.Expr]) -> ast.Expr:
    match value:
        case ast.Call(function, args, kwargs):
            if isinstance(meant := shared.get(function), ast.Call):
                return _direct(replace(meant, kwargs=(*meant.kwargs, *kwargs)), {})
            kept = tuple(k for k in kwargs if k.name not in ONLY_WHILE_TRAINING) if _is_collapsed(value) else kwargs
            return replace(value, args=tuple(_direct(arg, shared) for arg in args), kwargs=kept)
        case ast.Negative(operand):
            return replace(value, operand=_direct(operand, shared))
        case ast.Binary(_, left, right):
            return replace(value, left=_direct(left, shared), right=_direct(right, shared))
        case _:
            return value
