"""Resolves `train` statements to the base parameters that get a gradient."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from peftc.addressing.module_infos import used_ties
from peftc.addressing.parameter_ranges import Parameters, RowRange, numel
from peftc.addressing.sites import Site, SiteTable, State, parameter_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import FEW_NAMES, first_names, join_names
from peftc.syntax import ast


@dataclass(frozen=True)
class TrainTarget:
    name: str
    sites: tuple[Site, ...]  # those that have one of the states
    ranges: frozenset[RowRange]
    parameters: tuple[str, ...]  # dotted names in the base
    adapters: tuple[str, ...] = ()  # attached ones, each with values of its own


def resolve_train(statement: ast.Train, sites: Sequence[Site], table: SiteTable) -> TrainTarget:
    """The parameters of a `train` statement; an RMS norm, for one, need not have a `b`.

    Raises: P205 (no such state), P211 (other uses), P212 (shared memory), P309 (only some rows).
    """
    parameters = Parameters(table)
    states = [(site, state) for site in sites for name in statement.states if (state := site.states.get(name))]
    refs = [(site, state, state.weight) for site, state in states if state.weight is not None]
    if not refs:
        others = dict.fromkeys(name for site in sites for name, state in site.states.items() if state.weight)
        message = f"none of the {len(sites)} sites has {join_names(statement.states, 'or')} to train"
        notes = (f"they have {join_names(others)}" if others else "they have no parameters of their own",)
        help_ = None if {"w", "b"}.issuperset(statement.states) else "`train` takes `w` and `b`"
        error = Diagnostic("P205", message, statement.span, label="nothing to unfreeze", notes=notes, help=help_)
        raise PeftcError(error)
    ranges = frozenset(rows for _, state, ref in refs for rows in parameters.row_ranges(ref, state.shape))
    names = dict.fromkeys(parameters.canonical(ref) for _, _, ref in refs)
    for site, state, ref in refs:
        name = parameters.canonical(ref)
        if ref.is_partial and numel(rows for rows in ranges if rows.parameter == name) < parameters.numel(name):
            raise PeftcError(_partial(statement, site, state, name))
    if (error := _memory_overlap(statement, names, table) or _tied(statement, sites, table)) is not None:
        raise PeftcError(error)
    unique = {site.path: site for site, _, _ in refs}
    return TrainTarget(statement.name, tuple(unique.values()), ranges, tuple(names), statement.adapters)


def _memory_overlap(statement: ast.Train, names: Collection[str], table: SiteTable) -> Diagnostic | None:
    """P212 for a parameter that shares memory with another one, or with itself (a group alone)."""
    for group in table.overlaps:
        name = next((name for name in group if name in names), None)
        if name is None:
            continue
        if len(group) == 1:
            message = f"entries of `{name}` are in the same place in memory, as in an expanded tensor"
            label = "a step of training would write one over the other"
            help_ = "give it memory of its own (`.contiguous()`) before you compile"
        else:
            ties = next((tied for tied in table.tied if name in tied), (name,))
            other = next((n for n in group if n not in ties), next(n for n in group if n != name))
            message = f"`{name}` and `{other}` are two parameters over the same memory"
            label = "a step of training would change both, by the gradient of one"
            help_ = "make them one parameter, or give each memory of its own, before you compile"
        return Diagnostic("P212", message, statement.span, label=label, help=help_)
    return None


def _tied(statement: ast.Train, sites: Sequence[Site], table: SiteTable) -> Diagnostic | None:
    """P211 for a parameter that layers also use at sites that are not selected."""
    states = [use.states.get(name) for site in sites for use in site.uses for name in statement.states]
    selected = {parameter_name(state.weight) for state in states if state is not None and state.weight is not None}
    in_layers = [site for site in table.sites if any(step == "layer" for step, _ in site.steps)]
    bodies = {site.root: site.parts for site in in_layers if site.parts}
    parts = {part for site in in_layers if site.root not in bodies for part in (site.root,)}
    layers = tuple(f"{part}." for part in (*parts, *(part for site in in_layers for part in site.parts)))
    refs = [(site, state.weight) for site in reversed(table.sites) for state in site.states.values()]
    paths = {parameter_name(ref): site.path for site, ref in refs if ref is not None and not ref.is_partial}
    for group, used in zip(table.tied, used_ties(table), strict=True):
        name = next((name for name in group if name in selected), None)
        others = [other for other in used if other not in selected and other.startswith(layers)]
        if name and others:
            union = " | ".join(paths.get(n, f'"{n.rpartition(".")[0]}"') for n in (name, *others))
            message = f"`{name}` is one parameter with {first_names(others)}"
            help_ = "name all of its uses in layers" + (f", `at {union}`" if len(others) < FEW_NAMES else "")
            label = "training it here also trains it there"
            return Diagnostic("P211", message, statement.span, label=label, help=help_)
    return None


def _partial(statement: ast.Train, site: Site, state: State, name: str) -> Diagnostic:
    if state.weight is None or state.weight.stacked_slice is None:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site.module)
        help_ = f'train all of it, by name: `at "{pattern}"`; or change its rows: `h += lora(x, r=8)`'
    else:
        *_, (experts, _), (role, _) = site.steps
        roles = ("gate", "up") if state.weight.rows else (role,)
        union = " | ".join(f"layer[*].ffn.{experts}[*].{name}" for name in roles)
        help_ = f"name all the sites that it holds: `at {union}`; or add to its rows alone: `w += lowrank(r=8)`"
    message = f"`{state.name}` of `{site.path}` is only some rows of `{name}`"
    label = "a parameter gets a gradient as a whole"
    return Diagnostic("P309", message, statement.span, label=label, help=help_)
