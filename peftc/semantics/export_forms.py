"""The spec of an adapter's tensors: some forms are saved in a simpler one, their export form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equations.table import FORMS, forms_of
from peftc.forms import Args, Form
from peftc.semantics.arguments import bind, shared_call
from peftc.semantics.layer_values import variants
from peftc.syntax import ast
from peftc.syntax.walk import is_shared, walk


def without_expectations(spec: ast.Spec) -> ast.Spec:
    return replace(spec, statements=tuple(s for s in spec.statements if not isinstance(s, ast.Expect)))


def stored_statements(spec: ast.Spec) -> ast.Spec:
    """The spec whose parameters `stored_tensors` are, without expectations.

    A `shared` binding is inlined unless its export form has shared parameters, too. Raises: P528.
    """
    bindings = {let.name: let.value for let in spec.statements if isinstance(let, ast.Let)}
    bound = {n: v.args[0] if is_shared(v) and isinstance(v, ast.Call) else v for n, v in bindings.items()}
    forms = forms_of(spec)
    exported = {name: _export_form(value, forms) for name, value in bound.items()}
    of_sites = (name for name, form in exported.items() if form is not None and not has_common_parameters(form[1]))
    inlined = {name: bound[name] for name in of_sites}
    statements: list[ast.Statement] = []
    for statement in without_expectations(spec).statements:
        if getattr(statement, "name", "") in inlined:
            continue
        if isinstance(statement, ast.Edit):
            statement = _export_edit(statement, inlined, forms)
        elif isinstance(statement, ast.Let):
            statement = replace(statement, value=_export(statement.value, inlined, forms))
        statements.append(statement)
    return replace(spec, statements=tuple(statements))


def saved_form(form: Form, args: Args) -> Form | None:
    """The form that is saved in the place of another."""
    name = form.saved_as(form.fill(args))
    return None if name is None else form if name == form.name else FORMS[name]


def has_common_parameters(form: Form) -> bool:
    return form.has_common_part and form.common(form.fill({})) is not None


def _export_form(value: ast.Expr, forms: Mapping[str, Form]) -> tuple[Mapping[str, str], Form] | None:
    """The form that is saved in the place of a call, behind its names for arguments of the call."""
    form = forms.get(value.function) if isinstance(value, ast.Call) else None
    if form is None or not isinstance(value, ast.Call):
        return None
    exports = list[tuple[Mapping[str, str], Form] | None]()
    for one in variants(value):
        args = form.fill(bind(one, form, shared=not value.args).args)
        saved = saved_form(form, args)
        exports.append(None if saved is None else (form.saved_arguments(args), saved))
    if any(export != exports[0] for export in exports):
        message = f"`{value.function}` is saved as another form at some layers"
        raise PeftcError(Diagnostic("P528", message, help="write an edit for each of these layers"))
    return exports[0]


def _export_edit(edit: ast.Edit, inlined: dict[str, ast.Expr], forms: Mapping[str, Form]) -> ast.Edit:
    calls = [e.function for line in edit.body for e in walk(line.value) if isinstance(e, ast.Call)]
    for name in inlined:
        if calls.count(name) > 1:
            message = f"`{edit.name}` uses the shared `{name}` more than once, which rows cannot express"
            help_ = "write `keep=true` where it is bound, so that its MLP is saved"
            raise PeftcError(Diagnostic("P528", message, help=help_))
    body = tuple(replace(line, value=_export(line.value, inlined, forms)) for line in edit.body)
    return replace(edit, body=body)


def _export(value: ast.Expr, inlined: dict[str, ast.Expr], forms: Mapping[str, Form]) -> ast.Expr:
    match value:
        case ast.Call(function, args, kwargs):
            if isinstance(form := inlined.get(function), ast.Call):
                return _export(shared_call(form, value), {}, forms)
            call = replace(value, args=tuple(_export(arg, inlined, forms) for arg in args))
            if (export := _export_form(value, forms)) is None:
                return call
            names, saved = export
            renamed = [replace(k, name=names[k.name]) for k in kwargs if k.name in names]
            own = tuple(keyword for keyword in renamed if saved.argument(keyword.name) is not None)
            return replace(call, function=saved.name, kwargs=own)
        case ast.Negative(operand):
            return replace(value, operand=_export(operand, inlined, forms))
        case ast.Binary(_, left, right):
            return replace(value, left=_export(left, inlined, forms), right=_export(right, inlined, forms))
        case _:
            return value
