"""Finds pairs of edits that assign one state: the second would undo the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from peftc.addressing.sites import Slice
from peftc.diagnostics import Diagnostic
from peftc.planning.ir import Assign, SiteEdit
from peftc.syntax import ast

_Assignment = tuple[SiteEdit, Assign, Slice | None]  # with the rows that it assigns


def conflicts(edits: Sequence[tuple[ast.Edit, Sequence[SiteEdit]]]) -> Iterator[tuple[ast.Edit, Diagnostic]]:
    """P302, with the later edit, for each pair of edits that assign (`=`) a state of one site."""
    earlier: dict[object, list[_Assignment]] = defaultdict(list)
    reported: set[tuple[str, str]] = set()
    for edit, site_edits in edits:
        for site_edit in (use for one in site_edits for use in one.uses()):
            for assign in {a.state: a for a in site_edit.assigns if a.source.op == "="}.values():
                key, rows = _storage(site_edit, assign.state)
                for first, other, other_rows in earlier[key]:
                    overlap = rows is None or other_rows is None or rows.overlaps(other_rows)
                    pair = (first.edit, edit.name)
                    if first.edit != edit.name and overlap and pair not in reported:
                        reported.add(pair)
                        yield edit, _conflict(first, other, edit.name, assign)
                earlier[key].append((site_edit, assign, rows))


def _storage(site_edit: SiteEdit, name: str) -> tuple[object, Slice | None]:
    """The same key for two names of one state, such as `z` of an ffn and `h` of `ffn.hidden`."""
    state = site_edit.site.states[name]
    if state.weight is not None:
        return (state.weight.module, state.weight.attribute, state.weight.stacked_slice), state.weight.rows
    if state.activation is not None:
        return (site_edit.site.root, state.activation.node), state.activation.rows
    return (site_edit.site.path, name), None


def _conflict(first: SiteEdit, earlier: Assign, name: str, later: Assign) -> Diagnostic:
    message = f"`{first.edit}` and `{name}` both assign `{later.state}` of `{first.site.path}`"
    note = f"`{first.edit}` assigns `{earlier.state}` in line {earlier.source.span.line}"
    is_pair = later.state == "kv"
    help_ = "put all rows in one `concat`" if is_pair else "write both equations in one edit, or add with `+=`"
    label = "this would undo the other"
    return Diagnostic("P302", message, later.source.span, label=label, notes=(note,), help=help_)
