"""The forms that are Python classes, which a program registers, by name."""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar, cast

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.filesystem import resources
from peftc.forms.form import Argument, Form

FormClass = TypeVar("FormClass", bound=type[Form])
ENTRY_POINTS = "peftc.forms"
_forms: dict[str, Form] = {}
PYTHON_FORMS: Mapping[str, Form] = MappingProxyType(_forms)


def register(form: FormClass) -> FormClass:
    """Makes a form that is a class known to specs, for the rest of the process.

    A spec never imports code: the program that compiles it registers the forms, or names the
    entry points that do (`register_entry_point`, `peftc … --forms NAME`). A class with the module
    and name of an earlier one takes its place, as when a cell of a notebook runs again.

    Args:
        form: a subclass of `Form`. It also works as a decorator.

    Returns:
        The class.

    Raises:
        PeftcError: P571 if it is not such a class, has no name that a spec can write, does not name
            its module, or has the name of another form.
    """
    _check(form)
    present = _forms.get(form.name)
    if present is not None and not _is_same(type(present), form):
        message = f"there is a form `{form.name}` already, `{class_path(present)}`"
        raise _refusal(form, message, "give it another name")
    if present is None or type(present) is not form:
        _forms[form.name] = cast(Form, form())
        copyreg.pickle(form, _by_name)
    return form


def unregister(name: str) -> None:
    """Makes a form that a program has registered unknown again. Other names are ignored."""
    _forms.pop(name, None)


def register_entry_point(name: str) -> type[Form]:
    """Registers the form that an installed distribution offers under a name.

    The distribution declares it in the table `project.entry-points."peftc.forms"` of its
    pyproject.toml, as in `signs = "my_package.forms:Signs"`. Importing it runs code of the
    distribution: name only those that you trust.

    Returns:
        The class.

    Raises:
        PeftcError: P572 if no installed distribution offers it, several do, or it cannot be
            imported; P571 as for `register`.
    """
    entries = _entry_points(name=name)
    if not entries:
        known = sorted(entry.name for entry in _entry_points())
        help_ = did_you_mean(name, known) or (f"installed: {join_names(known)}" if known else None)
        message = f"no installed distribution offers the form `{name}`"
        raise PeftcError(Diagnostic("P572", message, notes=(f"group `{ENTRY_POINTS}`",), help=help_))
    if len(entries) > 1:
        notes = tuple(map(_described, entries))
        raise PeftcError(Diagnostic("P572", f"several distributions offer the form `{name}`", notes=notes))
    try:
        form = entries[0].load()
    except Exception as error:  # the distribution's own code
        message = f"the form `{name}` cannot be imported: {type(error).__name__}: {error}"
        raise PeftcError(Diagnostic("P572", message, notes=(_described(entries[0]),))) from error
    return register(form)


def entry_point(name: str) -> str | None:
    """The entry point of an installed distribution that offers a form, without importing it."""
    return next(map(_described, _entry_points(name=name)), None)


def entry_points() -> dict[str, str]:
    """What offers forms in the installed distributions, by name, without importing it."""
    return {entry.name: _described(entry) for entry in _entry_points()}


def python_form(name: str) -> Form:
    """The registered form of that name. Raises: PeftcError P101 for another."""
    if name not in _forms:
        help_ = "register it first: `peftc.forms.register(…)`"
        raise PeftcError(Diagnostic("P101", f"there is no form `{name}`", help=help_))
    return _forms[name]


def class_path(form: Form) -> str:
    """`package.module:Class`, of a form that is a class."""
    return f"{type(form).__module__}:{type(form).__qualname__}"


def is_built_in(form: Form) -> bool:
    """Whether a form is one of the package."""
    return type(form).__module__.partition(".")[0] == __name__.partition(".")[0]


def _entry_points(**selection: str) -> list[Any]:
    # Imported here: `importlib.metadata` costs a tenth of what checking a spec does.
    entries = import_module("importlib.metadata").entry_points(group=ENTRY_POINTS, **selection)
    return list(dict.fromkeys(entries))


def _by_name(form: Form) -> tuple[Any, ...]:
    """How a form is pickled: it is code."""
    return python_form, (form.name,)


def _described(entry: Any) -> str:
    return f"`{entry.value}`" + (f" of {entry.dist.name} {entry.dist.version}" if entry.dist else "")


def _is_same(one: type, other: type) -> bool:
    """Whether two classes are one, or that of a module which was imported again."""
    return one is other or (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _check(form: object) -> None:
    if not isinstance(form, type) or not issubclass(form, Form):
        raise _refusal(form, f"`{form!r}` is not a subclass of `peftc.forms.Form`")
    name: object = form.name
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _refusal(form, f"`{form.name}` is not a name that a spec can write", 'write `name = "…"` in the class')
    if form.name in resources.forms():
        raise _refusal(form, f"`{form.name}` is a form of peftc", "give it another name")
    if not form.module:
        raise _refusal(form, "it names no module", 'write `module = "package.module:Class"`')
    for path in (form.module, form.common_module, form.tasks_module):
        module, _, name = path.partition(":") if isinstance(path, str) and path else ("a", ":", "class")
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise _refusal(form, f"`{path}` does not name a module", 'write `module = "package.module:Class"`')
    if not isinstance(form.arguments, tuple) or not all(isinstance(one, Argument) for one in form.arguments):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _refusal(form, "its arguments are no tuple of `peftc.forms.Argument`")
    arguments = [argument.name for argument in form.arguments]
    twice = next((name for name in arguments if arguments.count(name) > 1), None)
    if twice is not None:
        raise _refusal(form, f"it has two arguments `{twice}`")
    if len(form.inputs) > 2:
        raise _refusal(form, "a form has at most two inputs")


def _refusal(form: object, message: str, help_: str | None = None) -> PeftcError:
    name = f"{form.__module__}:{form.__qualname__}" if isinstance(form, type) else repr(form)
    notes = (f"registering `{name}`",)
    return PeftcError(Diagnostic("P571", message, notes=notes, help=help_))
