"""What a second spec on a model must not share with the first: its name, the names of its edits,
what it trains.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.installation.record import Installation, InstalledSpec
from peftc.semantics.applied_method import prefix_names
from peftc.syntax import ast


def prefixed(flat: ast.Spec, prefix: str | None) -> ast.Spec:
    """A flat spec with `prefix.` before the names of its edits. Raises: P545 for no words."""
    if prefix is None:
        return flat
    if not isinstance(prefix, str) or not all(  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        word.isidentifier() and word.isascii() for word in prefix.split(".")
    ):
        raise PeftcError(Diagnostic("P545", f"`{prefix}` cannot stand before the name of an edit", help="use a word"))
    statements = prefix_names(flat.statements, prefix)
    flat_statements = (s for s in statements if isinstance(s, ast.Let | ast.Edit | ast.Train | ast.Expect))
    return replace(flat, statements=tuple(flat_statements))


def free_name(specs: Iterable[InstalledSpec], name: str | None, default: str) -> str:
    """A name that no spec of the model has. Raises: P412 for a second one, P545 for no text."""
    if name is not None and not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        raise PeftcError(Diagnostic("P545", f"the name of a spec is a text, not a {type(name).__name__}"))
    present = {spec.name for spec in specs}
    if name in present:
        help_ = "give this one another `name`, or `peftc.remove` the other"
        raise PeftcError(Diagnostic("P412", f"the model has a spec `{name}` already", help=help_))
    numbered = (f"{default}-{n}" for n in count(2))
    return name or next(free for free in chain((default,), numbered) if free not in present)


@contextmanager
def with_note(note: str) -> Generator[None]:
    """Adds a note to what is raised in the block."""
    try:
        yield
    except PeftcError as error:
        raise PeftcError(replace(d, notes=(*d.notes, note)) for d in error.diagnostics) from error


def refuse_second(record: Installation, flat: ast.Spec, trained: Iterable[str]) -> None:
    """Raises: P412 for edits of the same names, P414 for base parameters that are trained twice."""
    errors = [*_clashes(record.specs, flat), *_trained_twice(record, trained)]
    if errors:
        raise PeftcError(errors)


def _clashes(specs: Iterable[InstalledSpec], flat: ast.Spec) -> Iterable[Diagnostic]:
    first = {name: spec for spec in specs for name in _names(spec.spec)}
    same = [name for name in _names(flat) if name in first]
    if same:
        yield Diagnostic(
            "P412",
            f"the model has an edit `{same[0]}` already",
            source=flat.source,
            notes=(f"its spec `{first[same[0]].name}` and this one both have {join_names(same)}",),
            help='give `prefix="…"`: a word that is put before the names of the new edits',
        )


def _names(spec: ast.Spec) -> list[str]:
    return [s.name for s in spec.statements if isinstance(s, ast.Edit | ast.Train | ast.Let)]


def _trained_twice(record: Installation, trained: Iterable[str]) -> Iterable[Diagnostic]:
    first = {name: saved.partition("/")[0] for saved, name in record.trained.items()}
    twice = [name for name in trained if name in first]
    if twice:
        more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
        edit = first[twice[0]]
        yield Diagnostic(
            "P414",
            f"`{twice[0]}`{more} would be trained by two specs",
            notes=(f"`{edit}` of the spec `{record.owner(edit).name}` on the model trains it",),
            help="leave it out of one of them, or write both in one spec",
        )
