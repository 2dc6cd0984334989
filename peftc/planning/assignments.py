"""Two edits that assign one state: the second would throw the first away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peftc.addressing.sites import Slice, State
from peftc.diagnostics import Diagnostic
from peftc.planning.ir import Assign, SiteEdit
from peftc.syntax import ast


@dataclass(frozen=True)
class Clash:
    statement: ast.Edit  # the later of the two
    diagnostic: Diagnostic


def clashes(edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]]) -> Iterable[Clash]:
    """P302, once for each pair of edits that both assign (`=`, not `+=` or `*=`) a state of some site."""
    first: dict[object, list[tuple[ast.Edit, SiteEdit, Assign, Slice | None]]] = {}
    told: set[tuple[str, str]] = set()
    for edit, places in edits:
        for placed in (use for one in places for use in one.uses()):
            for assign in _assigned(placed):
                where, rows = _where(placed, placed.site.states[assign.state])
                for before, at, earlier, other in first.get(where, ()):
                    if before.name != edit.name and _overlap(rows, other) and (before.name, edit.name) not in told:
                        told.add((before.name, edit.name))
                        yield Clash(edit, _clash(before, at, earlier, edit, assign))
                first.setdefault(where, []).append((edit, placed, assign, rows))


def _assigned(placed: SiteEdit) -> Iterable[Assign]:
    return {assign.state: assign for assign in placed.assigns if assign.source.op == "="}.values()


def _where(placed: SiteEdit, state: State) -> tuple[object, Slice | None]:
    """The same for two names of one state, such as `z` of an ffn and `h` of `ffn.hidden`."""
    if state.weight is not None:
        return (state.weight.module, state.weight.attribute, state.weight.stacked_slice), state.weight.rows
    if state.activation is not None:
        return (placed.site.root, state.activation.node), state.activation.rows
    return (placed.site.path, state.name), None


def _overlap(rows: Slice | None, others: Slice | None) -> bool:
    return rows is None or others is None or rows.overlaps(others)


def _clash(before: ast.Edit, at: SiteEdit, earlier: Assign, edit: ast.Edit, assign: Assign) -> Diagnostic:
    line = earlier.source.span.line
    help_ = (
        "put all rows in one `concat`" if assign.state == "kv" else "write both equations in one edit, or add with `+=`"
    )
    return Diagnostic(
        "P302",
        f"`{before.name}` and `{edit.name}` both assign `{assign.state}` of `{at.site.path}`",
        assign.source.span,
        label="this would undo the other",
        notes=(f"`{before.name}` assigns `{earlier.state}` in line {line}",),
        help=help_,
    )
