"""`train` statements: which parameters of the base get a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from peftc.addressing.parameter_ranges import Parameters, RowRange, numel, parameter_name, used_ties
from peftc.addressing.sites import Site, SiteTable, State, WeightRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.planning.selection.shared_modules import SHOWN, shown, uses
from peftc.syntax import ast


@dataclass(frozen=True)
class Trained:
    """`parameters`: dotted names in the base; `sites`: those that have one of the states."""

    name: str
    states: tuple[str, ...]
    sites: tuple[Site, ...]
    regions: frozenset[RowRange]
    parameters: tuple[str, ...]


def trained(statement: ast.Train, sites: Sequence[Site], table: SiteTable) -> Trained:
    """What a `train` statement unfreezes at these sites. A site need not have all the states (an RMS norm has no `b`).

    Raises: P205 where none has any of them. P211 for one that layers use at other sites, too. P212 for one that shares its
    memory. P309 where only some rows of a parameter are meant.
    """
    parameters = Parameters(table)
    found = [(site, state) for site in sites for name in statement.states if (state := site.states.get(name))]
    refs = [(site, state, state.weight) for site, state in found if state.weight is not None]
    if not refs:
        raise PeftcError(_nothing(statement, sites))
    regions = frozenset(region for _, state, ref in refs for region in parameters.regions(ref, state.shape))
    names = dict.fromkeys(parameters.canonical(ref) for _, _, ref in refs)
    for site, state, ref in refs:
        name = parameters.canonical(ref)
        if ref.is_partial and numel(region for region in regions if region.parameter == name) < parameters.numel(name):
            raise PeftcError(_part(statement, site, state, name))
    if common := _in_common(names, table):
        raise PeftcError(_overlap(statement, *common))
    if wrong := _tied(statement, [use for site in sites for use in uses(site)], table):
        raise PeftcError(wrong)
    return Trained(statement.name, statement.states, _unique([site for site, _, _ in refs]), regions, tuple(names))


def missing(statement: ast.Train, made: Trained) -> list[Diagnostic]:
    """P204 warnings for states that none of the sites has."""
    there = {name for site in made.sites for name in site.states}
    return [
        Diagnostic("P204", f"no site of `{statement.name}` has `{name}`", statement.span, severity="warning")
        for name in statement.states
        if name not in there
    ]


def _in_common(names: Collection[str], table: SiteTable) -> tuple[str, str | None] | None:
    """A parameter among these and another one, an object of its own, over the same memory; None for itself."""
    for group in table.overlaps:
        if mine := next((name for name in group if name in names), None):
            if len(group) == 1:
                return mine, None
            ties = next((tied for tied in table.tied if mine in tied), (mine,))
            return mine, next((name for name in group if name not in ties), next(n for n in group if n != mine))
    return None


def _tied(statement: ast.Train, sites: Sequence[Site], table: SiteTable) -> Diagnostic | None:
    """P211 for a parameter that modules in layers have in common which are not all among these sites."""
    named = {parameter_name(ref) for site in sites for n in statement.states if (ref := _weight(site, n)) is not None}
    for group, used in zip(table.tied, used_ties(table), strict=True):
        mine = next((name for name in group if name in named), None)
        others = [name for name in used if name not in named and _in_layers(name, table)] if mine else []
        if mine and others:
            paths = {parameter_name(ref): site.path for site, ref in _weights(table)}
            every = " | ".join(paths.get(name, f'"{name.rpartition(".")[0]}"') for name in (mine, *others))
            return Diagnostic(
                "P211",
                f"`{mine}` is one parameter with {shown(others)}",
                statement.span,
                label="what is trained here is trained there, too",
                help="name all of its uses in layers" + (f", `at {every}`" if len(others) < SHOWN else ""),
            )
    return None


def _in_layers(name: str, table: SiteTable) -> bool:
    """Whether a parameter is in a layer, as far as sites tell where layers are."""
    layers = {site.root for site in table.sites if any(step == "layer" for step, _ in site.steps)}
    return any(name.startswith(f"{layer}.") for layer in layers)


def _weights(table: SiteTable) -> Iterator[tuple[Site, WeightRef]]:
    """Each site with each parameter that is all its own; the first site of a parameter comes last."""
    for site in reversed(table.sites):
        refs = (state.weight for state in site.states.values())
        yield from ((site, ref) for ref in refs if ref is not None and not ref.is_partial)


def _weight(site: Site, state: str) -> WeightRef | None:
    return site.states[state].weight if state in site.states else None


def _overlap(statement: ast.Train, name: str, other: str | None) -> Diagnostic:
    if other is None:
        return Diagnostic(
            "P212",
            f"entries of `{name}` are in the same place in memory, as in an expanded tensor",
            statement.span,
            label="a step of training would write one over the other",
            help="give it memory of its own (`.contiguous()`) before you compile",
        )
    return Diagnostic(
        "P212",
        f"`{name}` and `{other}` are two parameters over the same memory",
        statement.span,
        label="a step of training would change both, by the gradient of one",
        help="make them one parameter, or give each memory of its own, before you compile",
    )


def _unique(sites: Sequence[Site]) -> tuple[Site, ...]:
    return tuple({site.path: site for site in sites}.values())


def _nothing(statement: ast.Train, sites: Sequence[Site]) -> Diagnostic:
    has = dict.fromkeys(name for site in sites for name, state in site.states.items() if state.weight)
    only_base = [name for name in statement.states if name not in ("w", "b")]
    return Diagnostic(
        "P205",
        f"none of the {len(sites)} sites has {join_names(statement.states, 'or')} to train",
        statement.span,
        label="nothing to unfreeze",
        notes=(f"they have {join_names(has)}" if has else "they have no parameters of their own",),
        help="`train` takes `w` and `b`" if only_base else None,
    )


def _part(statement: ast.Train, site: Site, state: State, name: str) -> Diagnostic:
    return Diagnostic(
        "P309",
        f"`{state.name}` of `{site.path}` is only some rows of `{name}`",
        statement.span,
        label="a parameter gets a gradient as a whole",
        help=_whole(site, state),
    )


def _whole(site: Site, state: State) -> str:
    """How to name a parameter that holds more than the site's rows."""
    if state.weight is None or state.weight.stacked_slice is None:
        return f'train all of it, by name: `at "{site.module}"`'
    *_, (experts, _), (role, _) = site.steps
    roles = ("gate", "up") if state.weight.rows else (role,)
    sites = " | ".join(f"layer[*].ffn.{experts}[*].{name}" for name in roles)
    return f"name all the sites that it holds: `at {sites}`; or add to its rows alone: `w += lowrank(r=8)`"
