"""`wb`: the weight and the bias of each module as places of their own, tied ones once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from peftc.addressing.parameter_ranges import Parameters, parameter_name, used_ties
from peftc.addressing.sites import ModuleInfo, Site, SiteTable, WeightRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.semantics.substitute import substitute
from peftc.semantics.vocabulary import PARAMETERS, WEIGHT_AND_BIAS
from peftc.semantics.walk import names_in
from peftc.syntax import ast


def of_parameters(edit: ast.Edit) -> bool:
    """Whether the equations of an edit are of `wb`."""
    return any(
        (isinstance(line, ast.Equation) and line.target == WEIGHT_AND_BIAS) or WEIGHT_AND_BIAS in names_in(line.value)
        for line in edit.body
    )


def body_at(edit: ast.Edit, site: Site) -> tuple[ast.Equation | ast.Let, ...]:
    """The equations of `wb` as those of the one state of the site, `w` or `b`."""
    if not of_parameters(edit) or len(site.states) != 1:
        return edit.body
    (state,) = site.states
    return tuple(_renamed(line, state) for line in edit.body)


def _renamed(line: ast.Equation | ast.Let, state: str) -> ast.Equation | ast.Let:
    if WEIGHT_AND_BIAS in names_in(line.value):
        line = replace(line, value=substitute(line.value, {WEIGHT_AND_BIAS: ast.Name(state, span=line.value.span)}))
    return replace(line, target=state) if isinstance(line, ast.Equation) and line.target == WEIGHT_AND_BIAS else line


def parameter_sites(edit: ast.Edit, sites: Sequence[Site], table: SiteTable) -> list[Site]:
    """A site for each weight and each bias that modules have, in their order. One that several modules are tied to is one site.

    Raises: P205 for sites that have neither: sub-layers, and modules that keep the weights of experts in one parameter.
    """
    modules = {module.name: module for module in table.modules}
    if wrong := [found for site in sites if (found := _neither(edit, site, modules[site.module], table)) is not None]:
        more = (
            (f"the same at {len(wrong) - 1} more site{'s' * (len(wrong) > 2)} of this edit",) if len(wrong) > 1 else ()
        )
        raise PeftcError(replace(wrong[0], notes=(*wrong[0].notes, *more)))
    found = [_part(site, name) for site in sites for name in PARAMETERS if name in site.states]
    return list(_tied_once(found, table))


def left_out(edit: ast.Edit, sites: Iterable[Site], table: SiteTable) -> list[Diagnostic]:
    """P204 warnings for parameters of these modules that are neither weights nor biases, such as the token of a class."""
    modules = {module.name: module for module in table.modules}
    other = {s.module: _others(s, modules[s.module]) for s in sites}
    return [
        Diagnostic(
            "P204",
            f"`{module}` has parameters that are neither `w` nor `b`: {join_names(names)}",
            edit.selector.span,
            label="they stay as they are",
            severity="warning",
        )
        for module, names in other.items()
        if names
    ]


def _others(site: Site, module: ModuleInfo) -> list[str]:
    there = {state.weight.attribute for state in site.states.values() if state.weight is not None}
    return [name for name in module.parameters if name not in there]


def _neither(edit: ast.Edit, site: Site, module: ModuleInfo, table: SiteTable) -> Diagnostic | None:
    """P205 where a site that was named has nothing that `wb` is; a container of modules may be named by a pattern."""
    if any(name in site.states for name in PARAMETERS):
        return None
    parts = [one.path for one in table.sites if any(_of_part(s.weight, site.module) for s in one.states.values())]
    bare = site.path.startswith('"')
    if bare and not parts:
        return None
    notes = (f"its parameters are those of {join_names(parts[:3])}{' and others' * (len(parts) > 3)}",) if parts else ()
    return Diagnostic(
        "P205",
        f"`{site.path}` has no weight and no bias of its own",
        edit.selector.span,
        label="no `wb` here",
        notes=notes,
        help="leave it out with `-`, and name these sites: `w += …`" if parts else f"write `{site.path}.**`",
    )


def _of_part(ref: WeightRef | None, module: str) -> bool:
    return ref is not None and ref.stacked_slice is not None and ref.module == module


def _part(site: Site, name: str) -> Site:
    """The weight or the bias of a site as a site."""
    also = tuple(_part(other, name) for other in site.shared_with)
    steps, states = (*site.steps, (name, None)), {name: site.states[name]}
    return replace(site, path=f"{site.path}.{name}", steps=steps, states=states, frozen_modules={}, shared_with=also)


def _tied_once(sites: Sequence[Site], table: SiteTable) -> Iterator[Site]:
    """The first site of a tied parameter, if possible one with a name, with the others as `also`."""
    parameters, known = Parameters(table), {site.path for site in table.sites}
    used = {name for group in used_ties(table) for name in group}
    groups: dict[object, list[Site]] = defaultdict(list)
    for site in sites:
        (state,) = site.states.values()
        assert state.weight is not None
        own = site.path if state.weight.is_partial else None
        groups[parameters.canonical(state.weight), own, state.shape, state.weight.transposed].append(site)
    for group in groups.values():
        reading = [site for site in group if _name(site) in used] or group
        reading.sort(key=lambda site: site.path.rpartition(".")[0] not in known)
        yield replace(reading[0], shared_with=tuple(use for site in reading for use in (site, *site.shared_with))[1:])


def _name(site: Site) -> str:
    """The dotted name of the parameter."""
    (state,) = site.states.values()
    assert state.weight is not None
    return parameter_name(state.weight)
