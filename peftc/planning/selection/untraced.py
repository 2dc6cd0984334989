"""Modules that could not be read, and the selectors that they matter to.

A selector that asks for what such a module may hold would change some of it and leave out the rest: that is an error. Any
other selector that reaches a layer with one gets a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from peftc.addressing.path_compression import compress_paths
from peftc.addressing.paths import BRANCHES, Paths, Steps
from peftc.addressing.sites import Site, SiteTable, UntracedModule
from peftc.diagnostics import Diagnostic
from peftc.planning.selection.selector_errors import name_span
from peftc.semantics.walk import selects_stack
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_selector as show

UntracedModules = tuple[UntracedModule, ...]


class Untraced(Protocol):
    """A module that could not be traced: its dotted name, its class, and why."""

    @property
    def module(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def reason(self) -> str: ...


def missed(selector: ast.Selector, paths: Paths) -> list[Diagnostic]:
    """P214, one for each arm that asks for what may be in modules that could not be read."""
    removed = {module for right in _removed(selector) for module in needed(right, paths)}
    found = [(arm, tuple(m for m in needed(arm, paths) if m not in removed)) for arm in _arms(selector)]
    return [_error(arm, modules, paths) for arm, modules in found if modules]


def _arms(selector: ast.Selector) -> Iterator[ast.Path]:
    match selector:
        case ast.Path():
            yield selector
        case ast.Union(arms):
            for arm in arms:
                yield from _arms(arm)
        case ast.Difference(left, _):
            yield from _arms(left)
        case _:
            pass


def _removed(selector: ast.Selector) -> Iterator[ast.Path]:
    """What the differences in a selector take away again."""
    if isinstance(selector, ast.Difference):
        yield from _arms(selector.right)
        yield from _removed(selector.left)
    elif isinstance(selector, ast.Union):
        for arm in selector.arms:
            yield from _removed(arm)


def needed(path: ast.Path, paths: Paths) -> UntracedModules:
    """The modules that may hold some of what a path asks for."""
    names = [step.name for i, step in enumerate(path.steps) if not selects_stack(path.steps, i)]
    if "layer" not in names or names[-1] == "**" or not paths.table.untraced:
        return ()
    at = names.index("layer")
    steps = path.steps[: len(path.steps) - len(names) + at + 1]
    layers = {match.site.steps for match in paths.matches(steps) if paths.chosen(match, steps)}
    return tuple(
        module
        for module in paths.table.untraced
        if (_whole(module, names[:at]) if "layer" in module.roles else module.steps in layers)
        and (
            "layer" in module.roles
            or (_hidden(names[at + 1 :], module) and not _elsewhere(names[at + 1 :], module, paths))
        )
    )


def _whole(module: UntracedModule, before: Sequence[str]) -> bool:
    """Whether a layer that could not be read is in one of the stacks that are written before `layer`."""
    stack = iter(name for name, _ in module.steps)
    return all(name in stack for name in before)


def _hidden(words: Sequence[str], module: UntracedModule) -> bool:
    return bool(words) and words[0] in module.roles


def _elsewhere(words: Sequence[str], module: UntracedModule, paths: Paths) -> bool:
    """Whether a path says `self` or `cross`, and the layer has that one."""
    wanted = (*module.steps, (words[0], None))
    branch = words[1] if len(words) > 1 and words[1] in BRANCHES else None
    depth = len(wanted)
    return branch is not None and any(
        site.steps[:depth] == wanted and len(site.steps) > depth and site.steps[depth][0] == branch
        for site in paths.table.sites
    )


def _error(arm: ast.Path, modules: UntracedModules, paths: Paths) -> Diagnostic:
    names = [step.name for step in arm.steps]
    at = names.index("layer")
    step = arm.steps[min(at + 1, len(arm.steps) - 1)]
    pattern = compress_paths([module.module for module in modules])[0][0]
    return Diagnostic(
        "P214",
        f"`{show(arm)}` asks for what may be in `{pattern}`, which could not be read",
        name_span(step),
        label=f"some `{step.name}` may be left out",
        notes=tuple(reason_lines(modules)),
        help=_help(modules, _branches(names[at + 1 :], modules, paths)),
    )


def _help(modules: UntracedModules, branches: Sequence[str]) -> str:
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", modules[0].module)
    read = [f"`attn.{branch}`" for branch in branches]
    return f'name its modules by a pattern in quotes, such as `"{pattern}.**"`' + (
        f", or write {' or '.join(read)} for what was read" if read else ""
    )


def _branches(words: Sequence[str], modules: UntracedModules, paths: Paths) -> list[str]:
    """Those of `self` and `cross` that the layers have, where a path leaves it open which is meant."""
    if words[:1] != ["attn"] or BRANCHES.intersection(words):
        return []
    layers = {module.steps for module in modules}
    parts = [site.steps for site in paths.table.sites if len(site.steps) > 2]
    found = (last for *layer, (name, _), (last, _) in parts if tuple(layer) in layers and name == "attn")
    return list(dict.fromkeys(last for last in found if last in BRANCHES))


def reason_lines(modules: Iterable[Untraced]) -> list[str]:
    """Each module with the reason, those that differ in a number alone as one."""
    same: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        same.setdefault((module.type, module.reason), []).append(module.module)
    return [
        f"`{pattern}` ({type_}): {reason}"
        for (type_, reason), names in same.items()
        for pattern, _ in compress_paths(names)
    ]


def in_layers_of(sites: Iterable[Site], table: SiteTable) -> UntracedModules:
    """The modules that could not be read in the layers of some sites."""
    layers = {_layer(site) for site in sites} if table.untraced else set[Steps]()
    return tuple(module for module in table.untraced if module.steps and module.steps in layers)


def _layer(site: Site) -> Steps:
    """A site's path as far as its layer; empty outside layers."""
    names = [name for name, _ in site.steps]
    return site.steps[: names.index("layer") + 1] if "layer" in names else ()


def warning(selector: ast.Selector, modules: Sequence[UntracedModule]) -> Diagnostic:
    """P215 for modules in the layers of a selector that asks for nothing in them."""
    return Diagnostic(
        "P215",
        f"{len(modules)} module{'s' * (len(modules) != 1)} of these layers could not be read",
        selector.span,
        label="nothing in them has a name",
        notes=tuple(reason_lines(modules)),
        severity="warning",
    )
