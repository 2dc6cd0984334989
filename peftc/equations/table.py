"""The forms of a spec: the built-in ones and those that it defines.

What reads equations is imported only for a spec that has some: most commands see none.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from peftc.diagnostics import Diagnostic
from peftc.forms import FORMS
from peftc.forms.registry import Form
from peftc.syntax import ast


def forms_of(spec: ast.Spec) -> Mapping[str, Form]:
    """The forms that the edits of a spec can call, by name."""
    forms = _own(spec)
    if not forms:
        return FORMS
    form_row = import_module("peftc.equations.definition").form_row
    return {**FORMS, **{form.name: form_row(form, spec.source) for form in forms}}


def form_errors(spec: ast.Spec) -> Iterator[Diagnostic]:
    """The errors in the texts of a spec's forms."""
    if forms := _own(spec):
        yield from import_module("peftc.equations.checks").check_forms(forms)


def _own(spec: ast.Spec) -> list[ast.Form]:
    return [statement for statement in spec.statements if isinstance(statement, ast.Form)]
