"""`wb`: the weight and the bias of each module as sites of their own, tied ones once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from peftc.addressing.parameter_ranges import Parameters, parameter_name, used_ties
from peftc.addressing.sites import Site, SiteTable, WeightRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.planning.messages import for_sites
from peftc.semantics.substitute import substitute
from peftc.semantics.vocabulary import PARAMETERS, WEIGHT_AND_BIAS
from peftc.semantics.walk import names_in
from peftc.syntax import ast


def edits_parameters(edit: ast.Edit) -> bool:
    """Whether the equations of an edit are of `wb`."""
    targets = [line.target for line in edit.body if isinstance(line, ast.Equation)]
    return WEIGHT_AND_BIAS in targets or any(WEIGHT_AND_BIAS in names_in(line.value) for line in edit.body)


def body_at(edit: ast.Edit, site: Site) -> tuple[ast.Equation | ast.Let, ...]:
    """The body of an edit, with `wb` renamed to the one state of the site, `w` or `b`."""
    if not edits_parameters(edit) or len(site.states) != 1:
        return edit.body
    (state,) = site.states
    body: list[ast.Equation | ast.Let] = []
    for line in edit.body:
        if WEIGHT_AND_BIAS in names_in(line.value):
            value = substitute(line.value, {WEIGHT_AND_BIAS: ast.Name(state, span=line.value.span)})
            line = replace(line, value=value)
        is_target = isinstance(line, ast.Equation) and line.target == WEIGHT_AND_BIAS
        body.append(replace(line, target=state) if is_target else line)
    return tuple(body)


def parameter_sites(edit: ast.Edit, sites: Sequence[Site], table: SiteTable) -> list[Site]:
    """A site for each weight and each bias, in model order; tied parameters are one site.

    Raises: P205: sites that have neither, such as sub-layers and modules with stacked experts.
    """
    if errors := [error for site in sites if (error := _no_parameters(edit, site, table)) is not None]:
        raise PeftcError(for_sites(errors, " of this edit"))
    parts = [_parameter_site(site, name) for site in sites for name in PARAMETERS if name in site.states]
    return list(_merge_tied(parts, table))


def other_parameters(edit: ast.Edit, sites: Sequence[Site], table: SiteTable) -> list[Diagnostic]:
    """P204 warnings for parameters that are neither weights nor biases, such as a class token."""
    modules = {module.name: module for module in table.modules}
    others: dict[str, list[str]] = {}
    for site in sites:
        attributes = {state.weight.attribute for state in site.states.values() if state.weight is not None}
        others[site.module] = [name for name in modules[site.module].parameters if name not in attributes]
    return [
        Diagnostic("P204", message, edit.selector.span, label="they stay as they are", severity="warning")
        for module, names in others.items()
        if names and (message := f"`{module}` has parameters that are neither `w` nor `b`: {join_names(names)}")
    ]


def _no_parameters(edit: ast.Edit, site: Site, table: SiteTable) -> Diagnostic | None:
    """P205 for a site without `w` and `b`, unless it is a container that a pattern matches."""

    def in_stack(ref: WeightRef | None) -> bool:
        return ref is not None and ref.stacked_slice is not None and ref.module == site.module

    if any(name in site.states for name in PARAMETERS):
        return None
    parts = [other.path for other in table.sites if any(in_stack(s.weight) for s in other.states.values())]
    if site.path.startswith('"') and not parts:
        return None
    message = f"`{site.path}` has no weight and no bias of its own"
    notes = (f"its parameters are those of {join_names(parts[:3])}{' and others' * (len(parts) > 3)}",) if parts else ()
    help_ = "leave it out with `-`, and name these sites: `w += …`" if parts else f"write `{site.path}.**`"
    return Diagnostic("P205", message, edit.selector.span, label="no `wb` here", notes=notes, help=help_)


def _parameter_site(site: Site, name: str) -> Site:
    return replace(
        site,
        path=f"{site.path}.{name}",
        steps=(*site.steps, (name, None)),
        states={name: site.states[name]},
        frozen_modules={},
        shared_with=tuple(_parameter_site(other, name) for other in site.shared_with),
    )


def _merge_tied(sites: Sequence[Site], table: SiteTable) -> Iterator[Site]:
    """Merges the sites of a tied parameter into one, if possible one that is in the table."""
    parameters, known = Parameters(table), {site.path for site in table.sites}
    used = {name for group in used_ties(table) for name in group}
    groups: dict[object, list[Site]] = defaultdict(list)
    for site in sites:
        ref = _weight(site)
        part = site.path if ref.is_partial else None
        shapes = [state.shape for state in site.states.values()]
        groups[parameters.canonical(ref), part, *shapes, ref.transposed].append(site)
    for group in groups.values():
        readers = [site for site in group if parameter_name(_weight(site)) in used] or group
        readers.sort(key=lambda site: site.path.rpartition(".")[0] not in known)
        yield replace(readers[0], shared_with=tuple(use for site in readers for use in site.uses)[1:])


def _weight(site: Site) -> WeightRef:
    (state,) = site.states.values()
    assert state.weight is not None
    return state.weight
