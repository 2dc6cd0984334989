"""The forms of a spec: the built-in ones and those that it defines."""

from collections.abc import Mapping

from peftc.equations.definition import form_row
from peftc.forms import FORMS
from peftc.forms.registry import Form
from peftc.syntax import ast


def forms_of(spec: ast.Spec) -> Mapping[str, Form]:
    """The forms that the edits of a spec can call, by name."""
    own = {s.name: form_row(s, spec.source) for s in spec.statements if isinstance(s, ast.Form)}
    return {**FORMS, **own} if own else FORMS
