"""Passes of a saved adapter, whose functions the program that loads it hands in."""

from __future__ import annotations

from collections.abc import Mapping

from peftc.adapters.metadata import Adapter
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.installation.compiled_model import CompiledModel
from peftc.planning.pass_form import Pass
from peftc.rewriting.passes.first_run import first_runs
from peftc.syntax import ast

Passes = Mapping[str, Pass]


def require_no_passes(adapter: Adapter) -> None:
    """Raises: P447 for an adapter with passes."""
    if adapter.passes:
        raise missing(adapter.passes)


def missing(names: tuple[str, ...]) -> PeftcError:
    what = f"the pass `{names[0]}`" if len(names) == 1 else f"the passes {join_names(names)}"
    message = f"the adapter needs {what}, whose code is not saved"
    return PeftcError(Diagnostic("P447", message, help=f"`peftc.load(…, passes={{{names[0]!r}: …}})`"))


def statements_of_passes(
    adapter: Adapter, spec: ast.Spec, passes: Passes | None, compiled: CompiledModel
) -> dict[str, ast.Statement]:
    """The statements of an adapter's passes, by name, after their first runs.

    Raises: P447 (a function is missing), P525 (the adapter has no such edit), P440-P445.
    """
    absent = tuple(name for name in adapter.passes if name not in (passes or {}))
    if absent or passes is None:
        raise missing(absent or adapter.passes)
    edits = {s.name: s for s in spec.statements if isinstance(s, ast.Edit)}
    if unknown := [name for name in adapter.passes if name not in edits]:
        raise PeftcError(Diagnostic("P525", f"the adapter has no edit of its pass `{unknown[0]}`"))
    table, structure = compiled.analysis.table, compiled.analysis.structure
    return {n: first_runs(n, passes[n], edits[n].selector, table, structure) for n in adapter.passes}
