"""`moved old -> new`: which names a spec had before, and the errors of such statements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.equations.table import forms_of
from peftc.forms import Form
from peftc.syntax import ast
from peftc.syntax.printer import print_line
from peftc.syntax.walk import is_shared, names_in_statements

_Kind = tuple[str, Collection[str]]


def moves_to(moves: Iterable[ast.Moved], names: Collection[str]) -> list[ast.Moved]:
    """The moves to some names, and to their parts: those to the old name of another included."""
    all_moves, ends = list(moves), set(names)
    while more := {m.old for m in all_moves if m.new in ends or m.new.partition(".")[0] in ends} - ends:
        ends |= more
    return [m for m in all_moves if m.new in ends or m.new.partition(".")[0] in ends]


def names_of(spec: ast.Spec) -> dict[str, None]:
    """The names of edits, `train` statements and shared parameters of an expanded spec."""
    own = (s for s in spec.statements if isinstance(s, ast.Edit | ast.Train | ast.Let))
    return dict.fromkeys(s.name for s in own if not isinstance(s, ast.Let) or is_shared(s.value))


def called_forms(spec: ast.Spec) -> dict[str, Form]:
    """The forms that an expanded spec calls, by name."""
    forms = forms_of(spec)
    edits = (s for s in spec.statements if isinstance(s, ast.Edit | ast.Let))
    return {name: forms[name] for name in dict.fromkeys(names_in_statements(edits)) if name in forms}


def parameters_of(form: Form) -> tuple[str, ...]:
    """The parameters of a form that has a text, whatever its arguments are."""
    text: ast.Form | None = getattr(form, "form", None)
    lines = () if text is None else text.body
    return tuple(dict.fromkeys(line.name for line in lines if isinstance(line, ast.Parameter)))


def without_moves(spec: ast.Spec) -> ast.Spec:
    """A spec as it is about its own names alone."""
    return replace(spec, statements=tuple(s for s in spec.statements if not isinstance(s, ast.Moved)))


def moves_of(spec: ast.Spec) -> list[ast.Moved]:
    return [s for s in spec.statements if isinstance(s, ast.Moved)]


def next_names(moves: Iterable[ast.Moved]) -> dict[str, str]:
    """What each old name is called next."""
    return {moved.old: moved.new for moved in moves if moved.at is None}


def last_name(name: str, following: Mapping[str, str]) -> str:
    """The end of a chain of moves."""
    for _ in following:
        name = following.get(name, name)
    return name


def check_moves(spec: ast.Spec) -> Iterator[tuple[ast.Moved, Diagnostic]]:
    """P133 for moves of an expanded spec that lead nowhere, or from what is still there."""
    moves = moves_of(spec)
    if not moves:
        return
    own, forms = names_of(spec), called_forms(spec)
    parts = {f"{name}.{one}" for name, form in forms.items() for one in parameters_of(form)}
    known = {*own, *forms, *parts}
    following = next_names(moves)
    sources = Counter(_source(moved) for moved in moves)
    targets = Counter(moved.new for moved in moves if moved.at is None)
    for moved in moves:
        if sources[_source(moved)] > 1:
            help_ = "leave one of them; a name that has changed twice is `moved a -> b` and `moved b -> c`"
            yield moved, _error(f"two statements move `{_shown(moved)}`", moved, old=True, help_=help_)
        elif moved.at is not None:
            yield from ((moved, error) for error in _site_errors(moved, own))
        elif targets[moved.new] > 1:
            yield moved, _error(f"two names move to `{moved.new}`", moved, help_="an adapter could have both")
        elif (kind := _kind(last_name(moved.new, following), own, forms, parts)) and moved.old in kind[1]:
            message = f"`{moved.old}` is still {kind[0]} of this spec"
            yield moved, _error(message, moved, old=True, help_="a name that has moved is free: use another one here")
        elif kind is None:
            yield from ((moved, error) for error in _unknown(moved, following, known))
        elif not _is_of_form(moved, following, own, forms):
            help_ = "move the form, too: `moved OLD -> NEW`, then `moved NEW.a -> NEW.b`"
            yield moved, _error(f"`{moved.old}` is of another form than `{moved.new}`", moved, help_=help_)


def _kind(name: str, own: Collection[str], forms: Collection[str], parts: Collection[str]) -> _Kind | None:
    """What a name is, and all of its kind."""
    kinds = (("an edit", own), ("a form", forms), ("a parameter", parts))
    return next((kind for kind in kinds if name in kind[1]), None)


def _source(moved: ast.Moved) -> tuple[str, ast.Path | None]:
    return moved.old, moved.at


def _shown(moved: ast.Moved) -> str:
    return moved.old if moved.at is None else print_line(moved).removeprefix("moved ").partition(" ->")[0]


def _site_errors(moved: ast.Moved, own: Collection[str]) -> Iterator[Diagnostic]:
    if moved.new not in own:
        help_ = did_you_mean(moved.new, own) or f"the edits are {join_names(own)}"
        yield _error(f"there is no edit `{moved.new}`", moved, old=True, help_=help_)
    elif moved.at == moved.to:
        yield _error("this moves nothing: both sites are the same", moved, help_="remove it")
    for path in (moved.at, moved.to):
        indices = (index for step in path.steps for index in step.indices or ()) if path is not None else ()
        if any(end is not None and end < 0 for index in indices for end in (index.start, index.stop)):
            message = "sites of a `moved` are numbered from the first layer"
            yield _error(message, moved, old=path is moved.at, help_="write `[*]`, or numbers from 0")


def _unknown(moved: ast.Moved, following: Mapping[str, str], known: Collection[str]) -> Iterator[Diagnostic]:
    """The error of a chain, at its last move; of a circle, at its first."""
    seen = [moved.old]
    while (name := following.get(seen[-1])) is not None and name not in seen:
        seen.append(name)
    if name is not None and name == moved.old and next(old for old in following if old in seen) == name:
        notes, help_ = (" → ".join([*seen, name]),), "a move ends at a name of this spec"
        yield _error(f"`{moved.old}` moves in a circle", moved, notes=notes, help_=help_)
    elif name is None and len(seen) == 2:
        help_ = did_you_mean(moved.new, known) or "name an edit, a `shared`, a form or FORM.PARAMETER of this spec"
        yield _error(f"there is no `{moved.new}` to which `{moved.old}` has moved", moved, help_=help_)


def _is_of_form(moved: ast.Moved, following: Mapping[str, str], own: Collection[str], forms: Collection[str]) -> bool:
    """Whether the old name of a parameter is one of the same form."""
    end = last_name(moved.new, following)
    if end in own or end in forms:
        return True
    owner = moved.old.rpartition(".")[0]
    return last_name(owner, following) == end.rpartition(".")[0]


def _error(
    message: str, moved: ast.Moved, *, old: bool = False, notes: tuple[str, ...] = (), help_: str | None = None
) -> Diagnostic:
    return Diagnostic("P133", message, moved.old_span if old else moved.new_span, notes=notes, help=help_)
