"""Diagnostics about names, which several checks report."""

from __future__ import annotations

from peftc.diagnostics import Diagnostic, Span
from peftc.semantics.vocabulary import STATES
from peftc.syntax import ast


def unused(let: ast.Let) -> Diagnostic:
    return Diagnostic("P114", f"`{let.name}` is never used", let.span, help="remove it", severity="warning")


def bound_twice(let: ast.Let) -> Diagnostic:
    return Diagnostic("P111", f"`{let.name}` is bound twice", let.span, help="give one of them another name")


def reserved(state: str, span: Span) -> Diagnostic:
    message = f"`{state}` is reserved: it is {STATES[state]}"
    return Diagnostic("P121", message, span, help="use another name")
