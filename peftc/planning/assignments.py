"""Finds pairs of edits that assign one state: the second would undo the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from peftc.addressing.sites import Slice
from peftc.diagnostics import Diagnostic
from peftc.planning.ir import Assign, SiteEdit
from peftc.syntax import ast


class _Assignment(NamedTuple):
    edit: ast.Edit
    path: str
    assign: Assign
    rows: Slice | None


def conflicts(edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]]) -> Iterable[tuple[ast.Edit, Diagnostic]]:
    """P302, with the later edit, for each pair of edits that assign (`=`) a state of one site."""
    earlier: dict[object, list[_Assignment]] = {}
    reported: set[tuple[str, str]] = set()
    for edit, site_edits in edits:
        for site_edit in (use for one in site_edits for use in one.uses()):
            for assign in {a.state: a for a in site_edit.assigns if a.source.op == "="}.values():
                key, rows = _storage(site_edit, assign.state)
                current = _Assignment(edit, site_edit.site.path, assign, rows)
                for first in earlier.setdefault(key, []):
                    pair = (first.edit.name, edit.name)
                    overlap = rows is None or first.rows is None or rows.overlaps(first.rows)
                    if first.edit.name != edit.name and overlap and pair not in reported:
                        reported.add(pair)
                        yield edit, _conflict(first, current)
                earlier[key].append(current)


def _storage(site_edit: SiteEdit, name: str) -> tuple[object, Slice | None]:
    """The same key for two names of one state, such as `z` of an ffn and `h` of `ffn.hidden`."""
    state = site_edit.site.states[name]
    if state.weight is not None:
        return (state.weight.module, state.weight.attribute, state.weight.stacked_slice), state.weight.rows
    if state.activation is not None:
        return (site_edit.site.root, state.activation.node), state.activation.rows
    return (site_edit.site.path, name), None


def _conflict(first: _Assignment, second: _Assignment) -> Diagnostic:
    name, state = first.edit.name, second.assign.state
    help_ = "put all rows in one `concat`" if state == "kv" else "write both equations in one edit, or add with `+=`"
    return Diagnostic(
        "P302",
        f"`{name}` and `{second.edit.name}` both assign `{state}` of `{first.path}`",
        second.assign.source.span,
        label="this would undo the other",
        notes=(f"`{name}` assigns `{first.assign.state}` in line {first.assign.source.span.line}",),
        help=help_,
    )
