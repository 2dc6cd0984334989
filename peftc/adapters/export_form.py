"""What is saved of a compiled model: its tensors by name, and the spec whose parameters they are.

A reparametrised prefix or prompt is saved as the rows it makes, a mixture of adapters as their mean, a masked change as
what is kept of it; the spec that is saved has a direct prefix, an adapter or a sparse change in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms import FORMS
from peftc.forms.module import FormModule
from peftc.installation.contents import parameters, states
from peftc.installation.record import Installation
from peftc.installation.spec_conflicts import noted
from peftc.installation.surgery import identifier
from peftc.planning.ir import SiteEdit
from peftc.rewriting.container import SHARED
from peftc.semantics.arguments import bind
from peftc.semantics.walk import is_shared, walk
from peftc.syntax import ast
from peftc.syntax.printer import print_spec

ONLY_WHILE_TRAINING = ("reparam", "keep", "intrinsic")  # arguments that say how what is saved is made


@dataclass(frozen=True)
class Collapsed:
    """A form that is saved as what it makes: `place` is its name then, `before` the beginning of the names that are not saved."""

    place: str
    before: str
    module: str
    index: int


def stored_tensors(model: nn.Module, record: Installation, name: str | None = None) -> dict[str, Tensor]:
    """Everything trained (by the spec `name`, or by all) and its state, by the name under which it is saved; forms that
    collapse as what they make.
    """
    edits = {edit for part in record.selected(name) for edit in part.edits}
    placed = [p for p in record.site_edits if p.edit in edits]
    found = [one for p in placed for one in _collapsed(record, p)]
    collapsed = {one.place: one for one in found}  # sites that are saved together have one place
    before = tuple(one.before for one in found)
    kept = {**parameters(model, name), **states(model, name)}
    names = {old: new for p in placed for old, new in _renamed(p).items()}
    tensors = {_under(n, names): p.detach() for n, p in kept.items() if not n.startswith(before)}
    for one in collapsed.values():
        module = cast(FormModule, model.get_submodule(one.module))
        with noted(f"it is of the edit `{one.place.partition('/')[0]}`"):
            tensors |= {f"{one.place}.{name}": made for name, made in module.collapsed_at(one.index).items()}
    return tensors


def stored_spec(spec: ast.Spec) -> str:
    """The spec whose parameters `stored_tensors` are: direct rows, and no expectations, which were held before. What is shared stays
    so where its simpler form has a part in common, too.

    Raises: P528 where shared rows are used twice in one edit.
    """
    shared = {
        let.name: _form(let)
        for let in spec.statements
        if isinstance(let, ast.Let) and (name := _saved_as(_form(let))) is not None and not _together(name)
    }
    statements = [s for s in spec.statements if not isinstance(s, ast.Expect) and getattr(s, "name", "") not in shared]
    direct = tuple(
        _direct_edit(s, shared)
        if isinstance(s, ast.Edit)
        else replace(s, value=_direct(s.value, shared))
        if isinstance(s, ast.Let)
        else s
        for s in statements
    )
    return print_spec(replace(spec, statements=direct))


def _collapsed(record: Installation, placed: SiteEdit) -> Iterator[Collapsed]:
    """The forms of an edit at a site that are saved as what they make, those of each task by themselves."""
    names = _renamed(placed)
    for one in placed.instances:
        form = one.form.collapses(one.form.fill(one.args))
        if form is None:
            continue
        name = f"{placed.edit}/{placed.site.path}/{one.key}"
        for task, tail in one.task_suffixes():
            owner = one.owner_of(task)
            if owner is None:
                yield Collapsed(names[name] + tail, f"{name}{tail}.", f"{record.form_modules[name]}{tail}", one.index)
            else:
                where = f"{SHARED}.{identifier(owner)}"
                before = next(saved for saved, place in record.form_modules.items() if place == where)
                if not _together(form):
                    yield Collapsed(names[name] + tail, f"{before}.", where, one.index)
                    continue
                key = names[name].rpartition("/")[2]
                named = f"{placed.edit}.{key}" if one.owner == f"{placed.edit}.{one.key}" else one.owner
                place = f"{before.partition('/')[0]}/{replace(one, form=FORMS[form], owner=named).owner_of(task)}/{key}"
                yield Collapsed(place, f"{before}.", where, one.index)
                yield Collapsed(place, f"{name}{tail}.", where, one.index)


def _together(form: str) -> bool:
    """Whether a form is saved once for all sites of an edit."""
    return FORMS[form].common_count is not None and FORMS[form].common(FORMS[form].fill({})) is not None


def _renamed(placed: SiteEdit) -> dict[str, str]:
    """The names under which the forms of an edit at a site are saved, by those that they have: `mixture` becomes `adapter`."""
    seen, found = Counter[str](), dict[str, str]()
    for one in placed.instances:
        form = one.form.collapses(one.form.fill(one.args)) or one.form.name
        seen[form] += 1
        key = form if seen[form] == 1 else f"{form}_{seen[form]}"
        found[f"{placed.edit}/{placed.site.path}/{one.key}"] = f"{placed.edit}/{placed.site.path}/{key}"
    return found


def _under(name: str, places: Mapping[str, str]) -> str:
    """The name of a tensor whose form is saved under another name."""
    edit, _, rest = name.partition("/")
    site, _, last = rest.rpartition("/")
    key, _, tail = last.partition(".")
    place = places.get(f"{edit}/{site}/{key}")
    return name if place is None else f"{place}.{tail}"


# The spec ------------------------------------------------------------------------------------------------------------


def _form(let: ast.Let) -> ast.Expr:
    return let.value.args[0] if is_shared(let.value) and isinstance(let.value, ast.Call) else let.value


def _saved_as(value: ast.Expr) -> str | None:
    """The form that is saved in the place of a call."""
    form = FORMS.get(value.function) if isinstance(value, ast.Call) else None
    if form is None or not isinstance(value, ast.Call):
        return None
    return form.collapses(bind(value, form, shared=not value.args).args)


def _direct_edit(edit: ast.Edit, shared: dict[str, ast.Expr]) -> ast.Edit:
    calls = [e.function for line in edit.body for e in walk(line.value) if isinstance(e, ast.Call)]
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
            made = replace(value, args=tuple(_direct(arg, shared) for arg in args))
            if (name := _saved_as(value)) is None:
                return made
            takes = {param.name for param in FORMS[name].params}.difference(ONLY_WHILE_TRAINING)
            return replace(made, function=name, kwargs=tuple(k for k in kwargs if k.name in takes))
        case ast.Negative(operand):
            return replace(value, operand=_direct(operand, shared))
        case ast.Binary(_, left, right):
            return replace(value, left=_direct(left, shared), right=_direct(right, shared))
        case _:
            return value
