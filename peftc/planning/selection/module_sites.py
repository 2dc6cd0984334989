"""Modules, their parameters (`wb`) and shared modules as sites."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import prod

from peftc.addressing.module_infos import used_ties
from peftc.addressing.parameter_ranges import Parameters
from peftc.addressing.paths import BRANCHES, stack_steps
from peftc.addressing.site_list import Place, SiteList, site_list
from peftc.addressing.sites import (
    INPUT,
    OUTPUT,
    ActivationRef,
    MatrixLayout,
    ModuleInfo,
    Site,
    SiteTable,
    State,
    Steps,
    WeightRef,
    parameter_name,
)
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import FEW_NAMES, first_names, for_sites, join_names
from peftc.forms.shapes import Ids, Tokens, Vector, Weight
from peftc.semantics.substitute import substitute
from peftc.syntax import ast
from peftc.syntax.vocabulary import PARAMETERS, WEIGHT_AND_BIAS
from peftc.syntax.walk import names_in

NAMES = {"weight": "w", "bias": "b"}
ALSO_THERE = "an edit here also acts there"
SiteKey = tuple[str, tuple[object, ...]]  # a module, and what of the module


def module_site(module: ModuleInfo, sites: SiteList) -> Place | Site:
    """The only site that the whole module computes, else one with the module's own tensors."""
    places = sites.by_module.get(module.name, ())
    whole = [place for place in places if _is_whole(sites.template_site(place))]
    if len(places) == 1 and _is_only_product(sites.template_site(places[0]), module):
        return places[0]
    owners = [place for place in whole if any(state.weight for state in sites.template_site(place).states.values())]
    if not owners and not module.parameters and whole:  # a container: its widest role
        fewest = min(len(sites.template_site(place).steps) for place in whole)
        owners = [place for place in whole if len(sites.template_site(place).steps) == fewest]
    if len(owners) == 1:
        return owners[0]
    shapes = ",".join(f"{name}{list(shape)}" for name, shape in module.parameters.items())
    path = f'"{module.name}"'
    states = {state.name: state for state in _states(module)}
    return Site(path, ((path, None),), module.name, module.name, f"{module.type}({shapes})", states)


def _is_whole(site: Site) -> bool:
    return site.calls == 1 and not _is_part(site)


def _is_only_product(site: Site, module: ModuleInfo) -> bool:
    """Whether a product in a module's code has all the parameters of the module."""
    # Seen in: routers, which return more than what they multiply
    refs = [state.weight for state in site.states.values() if state.weight]
    is_own = all(ref.module == site.module and not ref.is_partial for ref in refs)
    return site.bare and site.calls == 1 and is_own and {ref.attribute for ref in refs} == {*module.parameters}


def _is_part(site: Site) -> bool:
    """Whether the site is rows of a module (q of a fused qkv), or not what the module computes."""
    refs = [state.weight for state in site.states.values() if state.weight]
    return site.bare or any(ref.module != site.module or ref.is_partial for ref in refs)


def _states(module: ModuleInfo) -> Iterator[State]:
    for attribute, size in module.parameters.items():
        name = NAMES.get(attribute, attribute)
        transposed = module.transposed and len(size) == 2
        d_in = prod(size[1:])
        is_kernel = module.output_map and len(size) > 2 and module.input == d_in
        layout = MatrixLayout(tuple(range(len(size))), 1) if is_kernel else None
        ref = WeightRef(module.name, attribute, transposed=transposed, layout=layout)
        if is_kernel:
            yield State(name, Weight(prod(size) // d_in, d_in), weight=ref)
        elif len(size) == 2:
            d_out, d_in = reversed(size) if transposed else size
            yield State(name, Weight(d_out, d_in), weight=ref)
        elif len(size) == 1:
            yield State(name, Vector(size[0]), weight=ref)
    if module.input is not None and module.ids:
        yield State("x", Ids(module.input), ActivationRef(module.ids, key_path=module.input_path))
    elif module.input is not None:
        place = ActivationRef(INPUT, feature_map=module.input_map, key_path=module.input_path, kernel=module.kernel)
        yield State("x", Tokens(module.input), place)
    if module.output is not None:
        place = ActivationRef(OUTPUT, feature_map=module.output_map, key_path=module.output_path)
        yield State("h", Tokens(module.output), place)


def modules_below(paths: Iterable[Steps], table: SiteTable) -> list[ModuleInfo]:
    """The modules with parameters at and under each path, in model order.

    A sub-layer need not be one module; its sites then tell what is below.
    """
    roots = {root for steps in dict.fromkeys(paths) for root in _roots(steps, table)}
    return [info for info in table.modules if info.parameters and not roots.isdisjoint(_prefixes(info.name))]


def _roots(steps: Steps, table: SiteTable) -> set[str]:
    sites = [site for site in table.sites if site.steps[: len(steps)] == steps]
    others = [site.module for site in table.sites if site.steps[: len(steps)] != steps]
    owners = {ref.module for site in sites for state in site.states.values() if (ref := state.weight)}
    layers = [site.module for site in sites if site.steps[-1][0] == "layer"]
    if layers and all(stack_steps([name for name, _ in site.steps]) >= len(steps) for site in sites):
        lists = {layer.rpartition(".")[0] for layer in layers}  # the lists of layers, then the stacks that hold them
        modules = lists | {name.rpartition(".")[0] for name in lists}
    else:
        modules = {site.module for site in sites if site.steps == steps}
    return owners | {name for name in modules if name and not any(name in _prefixes(other) for other in others)}


def _prefixes(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`"""
    return list(accumulate(name.split("."), lambda parent, part: f"{parent}.{part}"))


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
    """A site for each weight and bias, tied ones once, in model order. Raises: P205."""
    if errors := [error for site in sites if (error := _no_parameters(edit, site, table)) is not None]:
        raise PeftcError(for_sites(errors, " of this edit"))
    parts = [parameter_site(site, name) for site in sites for name in PARAMETERS if name in site.states]
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


def parameter_site(site: Site, name: str) -> Site:
    return replace(
        site,
        path=f"{site.path}.{name}",
        steps=(*site.steps, (name, None)),
        states={name: site.states[name]},
        frozen_modules={},
        shared_with=tuple(parameter_site(other, name) for other in site.shared_with),
    )


def _merge_tied(sites: Sequence[Site], table: SiteTable) -> Iterator[Site]:
    """Merges the sites of a tied parameter into one, if possible one that is in the table."""
    parameters, listed = Parameters(table), site_list(table)
    used = {name for group in used_ties(table) for name in group}
    groups: dict[object, list[Site]] = defaultdict(list)
    for site in sites:
        ref = _weight(site)
        part = site.path if ref.is_partial else None
        shapes = [state.shape for state in site.states.values()]
        groups[parameters.canonical(ref), part, *shapes, ref.transposed].append(site)
    for group in groups.values():
        readers = [site for site in group if parameter_name(_weight(site)) in used] or group
        readers.sort(key=lambda site: listed.find(site.path.rpartition(".")[0]) is None)
        yield replace(readers[0], shared_with=tuple(use for site in readers for use in site.uses)[1:])


def _weight(site: Site) -> WeightRef:
    (state,) = site.states.values()
    assert state.weight is not None
    return state.weight


class SharedModules:
    """Modules that are registered under several names."""

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.groups = {name: group for group in table.shared_modules for name in group}

    @cached_property
    def sites(self) -> Mapping[SiteKey, Site]:
        return {(site.module, _role(site)): site for site in reversed(self.table.sites) if site.module in self.groups}

    def merge(self, sites: Sequence[Site], selector: ast.Selector) -> list[Site]:
        """Sites with each module once, at its first name. Raises: P211: it has uses elsewhere."""
        self._refuse_cross_layer_calls(sites, selector)
        sites = self._merge_calls(sites, selector)
        if not any(site.module in self.groups for site in sites):
            return list(sites)
        selected = {(site.module, _role(site)): site for site in sites}
        errors = [error for site in sites if (error := self._incomplete(site, selected, selector)) is not None]
        if errors:
            raise PeftcError(for_sites(errors))
        merged: list[Site] = []
        for site in sites:
            first, *names = self.groups.get(site.module, (site.module,))
            if site.module == first:  # else it is one of the others of the first
                others = tuple(selected[name, _role(site)] for name in names)
                runs = site.runs + sum(other.runs for other in others)
                merged.append(replace(site, shared_with=others, runs=runs) if others else site)
        return merged

    def _merge_calls(self, sites: Sequence[Site], selector: ast.Selector) -> list[Site]:
        """Sites of one module that its layer calls in several sub-layers as one. Raises: P211."""
        selected = _by_call(sites)
        every = _by_call(self.table.sites) if selected else {}
        errors: list[Diagnostic] = []
        for key, (first, *others) in selected.items():
            paths = [site.path for site in every.get(key, ())]
            if missing := [path for path in paths if path not in {site.path for site in (first, *others)}]:
                message = f"`{first.path}` is one module with {first_names(missing)}"
                note = f"its layer calls `{first.module}` in each of these places"
                help_ = f"name all of them: one set of parameters acts at each, `at {' | '.join(paths)}`"
                errors.append(Diagnostic("P211", message, selector.span, label=ALSO_THERE, notes=(note,), help=help_))
        if errors:
            raise PeftcError(for_sites(errors))
        merged = {members[0].path: members for members in selected.values()}
        dropped = {site.path for members in selected.values() for site in members[1:]}
        return [
            replace(site, shared_with=tuple(merged[site.path][1:])) if len(merged.get(site.path, ())) > 1 else site
            for site in sites
            if site.path not in dropped
        ]

    def _refuse_cross_layer_calls(self, sites: Sequence[Site], selector: ast.Selector) -> None:
        """Raises: P211 if another layer calls the module of a site without registering it."""
        calls = dict(self.table.cross_layer_calls)
        for site in sites:
            if (layer := calls.get(site.module)) is not None and site.module not in self.groups:
                message = f"`{site.module}` of `{site.path}` is called by `{layer}`, too"
                help_ = "register the module in both layers: one set of parameters then acts at each"
                raise PeftcError(Diagnostic("P211", message, selector.span, label=ALSO_THERE, help=help_))

    def _incomplete(self, site: Site, selected: Mapping[SiteKey, Site], selector: ast.Selector) -> Diagnostic | None:
        """P211 if not all sites of a module are selected."""
        role = _role(site)
        missing = [name for name in self.groups.get(site.module, ()) if (name, role) not in selected]
        if not missing:
            return None
        paths = [other.path if (other := self.sites.get((name, role))) else f'"{name}"' for name in missing]
        message = f"`{site.path}` is one module with {first_names(paths)}"
        note = f"`{site.module}` is also {first_names(missing)}"
        help_ = "name all of them: one set of parameters acts at each"
        if len(paths) <= FEW_NAMES:
            help_ += f", `at {' | '.join((site.path, *paths))}`"
        return Diagnostic("P211", message, selector.span, label=ALSO_THERE, notes=(note,), help=help_)


def _by_call(sites: Iterable[Site]) -> dict[object, list[Site]]:
    """Sites of the same states of a module that its layer calls again, together."""
    groups: dict[object, list[Site]] = defaultdict(list)
    for site in sites:
        if site.is_of_every_call:
            start = stack_steps([name for name, _ in site.steps]) + 1
            layer, names = site.steps[:start], tuple(name for name, _ in site.steps[start:] if name not in BRANCHES)
            rows = tuple(str(state.weight and state.weight.rows) for state in site.states.values())
            groups[site.module, layer, names, tuple(site.states), rows].append(site)
    return groups


def _role(site: Site) -> tuple[object, ...]:
    """What of its module a site is: part of the weight, or something that the module computes."""
    refs = (state.weight for state in site.states.values() if state.weight is not None)
    parts = sorted({(str(ref.rows), str(ref.stacked_slice)) for ref in refs if ref.module == site.module})
    below = site.steps[stack_steps([name for name, _ in site.steps]) + 1 :]
    if parts:
        return ("weight", *parts, below if site.calls > 1 else ())
    return ("module",) if site.steps[-1][0].startswith('"') else ("part", below)
