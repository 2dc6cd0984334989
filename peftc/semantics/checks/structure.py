"""What every expanded spec has to be, whatever the model: names once, edits that do something, facts about edits that exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from peftc.diagnostics import Diagnostic
from peftc.semantics.checks.expects import check_expect
from peftc.semantics.walk import is_shared
from peftc.syntax import ast

Named = ast.Edit | ast.Train | ast.Let


def check_structure(spec: ast.Spec) -> Iterator[Diagnostic]:
    """P111, P116-P119."""
    shared = [s for s in spec.statements if isinstance(s, ast.Let) and is_shared(s.value)]
    named = [s for s in spec.statements if isinstance(s, ast.Edit | ast.Train)]
    names = dict.fromkeys(statement.name for statement in named)
    yield from _duplicates([*shared, *named], spec)
    for statement in spec.statements:
        errors: Iterator[Diagnostic] = iter(())
        if isinstance(statement, ast.Edit):
            errors = _edit(statement)
        elif isinstance(statement, ast.Expect):
            errors = check_expect(statement, names)
        yield from (with_origin(error, statement, spec) for error in errors)


def with_origin(found: Diagnostic, statement: ast.Statement, spec: ast.Spec) -> Diagnostic:
    """`found` with the text that `statement` came from, and how it came here."""
    told = replace(found, notes=(*found.notes, *statement.via)) if not found.source else found
    return told.with_source(statement.origin or spec.source)


def _duplicates(named: Sequence[Named], spec: ast.Spec) -> Iterator[Diagnostic]:
    seen: dict[str, Named] = {}
    for statement in named:
        first = seen.setdefault(statement.name, statement)
        if first is statement:
            continue
        span = statement.span if isinstance(statement, ast.Let) else statement.name_span
        note = f"the other is in line {first.span.line} of {(first.origin or spec.source).path}"
        help_ = "give one of them another name"
        if statement.via or first.via:
            help_ = f"say which is which: `apply … as {statement.name}_2`"
        message = f"two edits are called `{statement.name}`"
        yield with_origin(Diagnostic("P111", message, span, notes=(note,), help=help_), statement, spec)


def _edit(edit: ast.Edit) -> Iterator[Diagnostic]:
    if not any(isinstance(line, ast.Equation) for line in edit.body):
        help_ = "write an equation, e.g. `h += adapter(x, r=64)`"
        yield Diagnostic("P119", f"the edit `{edit.name}` has no equation", edit.name_span, help=help_)
