"""The forms of a spec: the built-in ones and those that it defines.

What reads equations is imported only where a form of a text is asked for.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module

from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.filesystem import resources
from peftc.forms import PYTHON_FORMS
from peftc.forms.form import Form
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_statement
from peftc.syntax.walk import values, walk


class BuiltInForms(Mapping[str, Form]):
    """The forms by name: the registered Python ones, and those of `forms/*.peft`, read when
    something asks for them.
    """

    def __getitem__(self, name: str) -> Form:
        form = PYTHON_FORMS.get(name)
        return _built_in(name) if form is None else form

    def __contains__(self, name: object) -> bool:
        return name in PYTHON_FORMS or name in resources.forms()

    def __iter__(self) -> Iterator[str]:
        yield from sorted({*PYTHON_FORMS, *resources.forms()})

    def __len__(self) -> int:
        return len({*PYTHON_FORMS, *resources.forms()})


FORMS = BuiltInForms()


@cache
def _parsed(name: str) -> ast.Form:
    path = resources.forms()[name]
    spec = parse_text(path.read_text(encoding="utf-8"), f"forms/{path.name}")
    form = next(statement for statement in spec.statements if isinstance(statement, ast.Form))
    return replace(form, origin=spec.source)


@cache
def _built_in(name: str) -> Form:
    return _form(_parsed(name))


@cache
def _printed(name: str) -> str | None:
    """The text of a form of the package; None where it has none."""
    return print_statement(_parsed(name)) if name in resources.forms() else None


def _form(form: ast.Form, source: Source | None = None) -> Form:
    return import_module("peftc.equations.definition").text_form(form, source)


def forms_of(spec: ast.Spec) -> Mapping[str, Form]:
    """The forms that the edits of a spec can call, by name."""
    own = {form.name: _form(form, spec.source) for form in _own(spec)}
    return ChainMap(own, FORMS) if own else FORMS  # pyright: ignore[reportArgumentType]  # it is only read


def _calls(spec: ast.Spec) -> dict[str, None]:
    """The names of what a spec calls, in their order."""
    parts = (part for statement in spec.statements for value in values(statement) for part in walk(value))
    return dict.fromkeys(part.function for part in parts if isinstance(part, ast.Call))


def registered_forms(spec: ast.Spec) -> dict[str, Form]:
    """The Python forms that a spec calls, by name."""
    return {name: PYTHON_FORMS[name] for name in _calls(spec) if name in PYTHON_FORMS}


def built_in_texts(spec: ast.Spec) -> dict[str, str]:
    """The texts of the built-in forms that a spec calls, by name."""
    own = {form.name: form for form in _own(spec)}
    texts: dict[str, str] = {}
    for name in _calls(spec):
        form = own.get(name)
        if form is None and name in resources.forms():
            texts[name] = _printed(name) or ""
        elif form is not None and form.built_in:
            texts[name] = print_statement(form)
    return texts


def with_built_in(spec: ast.Spec, texts: Mapping[str, str]) -> ast.Spec:
    """A spec whose built-in forms are those of the texts, where the package has others by now.

    Raises: PeftcError for a text that is no form.
    """
    forms: list[ast.Form] = []
    calls = _calls(spec)
    for name, text in texts.items():
        if name not in calls or text == _printed(name):
            continue
        source = parse_text(f"peft 2\n{text}\n", f"forms/{name}.peft")
        form = next((s for s in source.statements if isinstance(s, ast.Form)), None)
        if form is None or form.name != name or len(source.statements) > 1:
            raise PeftcError(Diagnostic("P521", f"the text of the form `{name}` is another one"))
        if name not in FORMS or FORMS[name].text is None or _parsed(name) != form:
            forms.append(replace(form, built_in=True, origin=source.source))
    return replace(spec, statements=(*forms, *spec.statements)) if forms else spec


def form_errors(spec: ast.Spec) -> Iterator[Diagnostic]:
    """The errors in the texts of a spec's forms."""
    if forms := _own(spec):
        yield from import_module("peftc.equations.checks").check_forms(forms)


def _own(spec: ast.Spec) -> list[ast.Form]:
    return [statement for statement in spec.statements if isinstance(statement, ast.Form)]
