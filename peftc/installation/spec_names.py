"""Names of specs and tasks, and what specs on one model must not share."""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.equations.table import built_in_texts
from peftc.installation.record import Installation, InstalledSpec
from peftc.planning.planner import PlanResult
from peftc.semantics.applied_method import prefix_names
from peftc.syntax import ast
from peftc.syntax.printer import print_statement
from peftc.syntax.upgrade import check_keywords

NAME = re.compile(r"[A-Za-z0-9_-]+")
_DICT = nn.ModuleDict()  # no task may have the name of one of its attributes


def prefixed(flat: ast.Spec, prefix: str | None) -> ast.Spec:
    """A flat spec with `prefix.` before the names of its edits. Raises: P545 for invalid prefix."""
    if prefix is None:
        return flat
    if not isinstance(prefix, str) or not all(  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        word.isidentifier() and word.isascii() for word in prefix.split(".")
    ):
        raise PeftcError(Diagnostic("P545", f"`{prefix}` cannot stand before the name of an edit", help="use a word"))
    statements = prefix_names(flat.statements, prefix)
    flat_statements = (s for s in statements if isinstance(s, ast.Expanded))
    return replace(flat, statements=tuple(flat_statements))


def free_name(specs: Iterable[InstalledSpec], name: str | None, default: str) -> str:
    """`name`, else a free one like `default`. Raises: P412 if `name` is taken, P545 for no text."""
    if name is not None and not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        raise PeftcError(Diagnostic("P545", f"the name of a spec is a text, not a {type(name).__name__}"))
    present = {spec.name for spec in specs}
    if name in present:
        help_ = "give this one another `name`, or `peftc.remove` the other"
        raise PeftcError(Diagnostic("P412", f"the model has a spec `{name}` already", help=help_))
    numbered = (f"{default}-{n}" for n in count(2))
    return name or next(free for free in chain((default,), numbered) if free not in present)


@contextmanager
def with_note(note: str) -> Generator[None]:
    """Adds a note to each diagnostic that the block raises."""
    try:
        yield
    except PeftcError as error:
        raise PeftcError(replace(d, notes=(*d.notes, note)) for d in error.diagnostics) from error.__cause__


def check_spec_conflicts(record: Installation, flat: ast.Spec, planned: PlanResult) -> None:
    """Raises: P412 if two specs have edits of one name, P414 if both train a base parameter."""
    errors: list[Diagnostic] = []
    versions = {flat.version, *(spec.spec.version for spec in record.specs)}
    if len(versions) > 1:  # an adapter of both is written in the later one
        for spec in (flat, *(one.spec for one in record.specs)):
            if spec.version == 1:
                check_keywords(spec.statements, flat.source)
    first = {name: spec.name for spec in record.specs for name in _names(spec.spec)}
    if same := [name for name in _names(flat) if name in first]:
        note = f"its spec `{first[same[0]]}` and this one both have {join_names(same)}"
        help_ = 'give `prefix="…"`: a word that is put before the names of the new edits'
        message = f"the model has an edit `{same[0]}` already"
        errors.append(Diagnostic("P412", message, source=flat.source, notes=(note,), help=help_))
    forms = {s.name: s for spec in record.specs for s in spec.spec.statements if isinstance(s, ast.Form)}
    shared = {s.name for spec in record.specs for s in spec.spec.statements if isinstance(s, ast.Let)}
    for let in (s for s in flat.statements if isinstance(s, ast.Let) and s.name in forms):
        message = f"the model has a form named `{let.name}`"
        errors.append(Diagnostic("P412", message, let.span, let.origin or flat.source, help="use another name"))
    for form in (s for s in flat.statements if isinstance(s, ast.Form) and s.name in shared):
        message = f"the model has shared parameters named `{form.name}`"
        errors.append(Diagnostic("P412", message, form.name_span, form.origin or flat.source, help="use another name"))
    for form in (s for s in flat.statements if isinstance(s, ast.Form) and forms.get(s.name, s) != s):
        message = f"the model has another form named `{form.name}`"
        help_ = "give one of them another name"
        errors.append(Diagnostic("P412", message, form.name_span, form.origin or flat.source, help=help_))
    errors += _changed_forms(record, flat)
    trainers = {name: saved.partition("/")[0] for saved, name in record.trained.items()}
    trained = dict.fromkeys(planned.trained_parameters.values())
    of_adapters = {
        name: saved.partition("/")[0] for saved, name in record.adapter_parameters.items() if name in trained
    }
    trainers |= of_adapters  # attached ones do not act together
    if twice := [name for name in (*trained, *planned.adapter_parameters.values()) if name in trainers]:
        more, edit = f" and {len(twice) - 1} more" if len(twice) > 1 else "", trainers[twice[0]]
        note = f"`{edit}` of the spec `{record.owner(edit).name}` on the model trains it"
        help_ = "leave it out of one of them, or write both in one spec"
        message = f"`{twice[0]}`{more} would be trained by two specs"
        errors.append(Diagnostic("P414", message, notes=(note,), help=help_))
    if errors:
        raise PeftcError(errors)


def _changed_forms(record: Installation, flat: ast.Spec) -> Iterator[Diagnostic]:
    """P412 for a built-in form that one spec has from an older adapter, and another calls."""
    for one, other in ((flat, spec.spec) for spec in record.specs):
        for spec, calls in ((one, built_in_texts(other)), (other, built_in_texts(one))):
            forms = (s for s in spec.statements if isinstance(s, ast.Form) and s.built_in)
            for form in (s for s in forms if s.name in calls and calls[s.name] != print_statement(s)):
                message = f"an adapter was saved with another `{form.name}` than this model has"
                help_ = "load it onto a model of its own, or train it again"
                yield Diagnostic("P412", message, source=flat.source, help=help_)


def _names(spec: ast.Spec) -> list[str]:
    return [s.name for s in spec.statements if isinstance(s, ast.Edit | ast.Train | ast.Let)]


def has_tasks(planned: PlanResult) -> bool:
    """Whether an edit is `per task`."""
    return any(
        one.tasks and not one.are_adapters
        for site_edit in planned.site_edits.representatives
        for one in site_edit.instances
    )


def task_names(tasks: Sequence[str] | None, present: tuple[str, ...] = ()) -> tuple[str, ...]:
    """`tasks`, by default those that the model has (`present`). Raises: P537 for wrong names."""
    if tasks is None:
        return present
    names = (tasks,) if isinstance(tasks, str) or not isinstance(tasks, Iterable) else tuple(tasks)  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
    wrong = [n for n in names if not isinstance(n, str) or not NAME.fullmatch(n) or hasattr(_DICT, n)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong or not names:
        message = f"`{wrong[0]}` is no name of a task" if names else "no task is named"
        raise PeftcError(Diagnostic("P537", message, help="names are of letters, digits, `_` and `-`"))
    if len(set(names)) < len(names):
        raise PeftcError(Diagnostic("P537", f"a task is named twice: {join_names(names)}"))
    if present and names != present:
        message = f"the model has parameters for {join_names(present)}"
        raise PeftcError(Diagnostic("P537", message, help="add a task with `peftc.add_task`, or leave `tasks` out"))
    return names


def require_tasks(tasks: Sequence[str] | None, planned: PlanResult) -> None:
    """Raises: P537 if there are `tasks`, but no edit is `per task`."""
    if tasks is not None and not has_tasks(planned):
        raise PeftcError(Diagnostic("P537", "`tasks` was given, but no edit is marked `per task`"))
