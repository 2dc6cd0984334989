"""Checks selectors against modules whose code cannot be traced.

A selector that names what such a module may contain would edit only some of it: an error. Any other
selector that names a layer with such a module gets a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from peftc.addressing.paths import BRANCHES, SitePaths, compress_paths
from peftc.addressing.sites import Site, SiteTable, Steps, UntracedModule
from peftc.diagnostics import Diagnostic
from peftc.planning.messages import plural
from peftc.planning.selection.selector_errors import name_span
from peftc.semantics.walk import selects_stack
from peftc.syntax import ast
from peftc.syntax.printer import print_selector

UntracedModules = tuple[UntracedModule, ...]


def untraced_errors(selector: ast.Selector, paths: SitePaths) -> list[Diagnostic]:
    """P214, one for each arm that names what untraced modules may contain."""
    arms = [(arm, is_positive, _candidates(arm, paths)) for arm, is_positive in signed_arms(selector)]
    excluded = {module for _, is_positive, modules in arms if not is_positive for module in modules}
    named = [(arm, tuple(m for m in ms if m not in excluded)) for arm, is_positive, ms in arms if is_positive]
    return [_error(arm, modules, paths) for arm, modules in named if modules]


def signed_arms(selector: ast.Selector) -> Iterator[tuple[ast.Path, bool]]:
    """The paths of a selector; False for those that a difference removes."""
    match selector:
        case ast.Path():
            yield selector, True
        case ast.Union(arms):
            for arm in arms:
                yield from signed_arms(arm)
        case ast.Difference(left, right):
            yield from signed_arms(left)
            yield from ((path, False) for path, is_positive in signed_arms(right) if is_positive)
        case ast.Glob():
            pass


def _candidates(path: ast.Path, paths: SitePaths) -> UntracedModules:
    """The untraced modules that may contain some of what a path names."""
    names = [step.name for i, step in enumerate(path.steps) if not selects_stack(path.steps, i)]
    if "layer" not in names or names[-1] == "**" or not paths.table.untraced:
        return ()
    layer = names.index("layer")
    stack, below = names[:layer], names[layer + 1 :]
    steps = path.steps[: len(path.steps) - len(below)]
    layers = {match.site.steps for match in paths.matches(steps) if paths.has_indices(match, steps)}

    def may_contain(module: UntracedModule) -> bool:
        if "layer" in module.roles:  # a whole layer: does the path name its stack?
            words = iter(name for name, _ in module.steps)
            return all(name in words for name in stack)
        if module.steps not in layers or not below or below[0] not in module.roles:
            return False
        # a path that names `self` or `cross` means a traced one, if the module's layer has it
        prefix = (*module.steps, *((name, None) for name in below[:2]))
        is_branch = len(below) > 1 and below[1] in BRANCHES
        return not (is_branch and any(site.steps[: len(prefix)] == prefix for site in paths.table.sites))

    return tuple(filter(may_contain, paths.table.untraced))


def _error(arm: ast.Path, modules: UntracedModules, paths: SitePaths) -> Diagnostic:
    names = [step.name for step in arm.steps]
    layer = names.index("layer")
    step = arm.steps[min(layer + 1, len(arm.steps) - 1)]
    pattern = compress_paths([module.module for module in modules])[0][0]
    glob = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", modules[0].module)
    traced = [f"`attn.{branch}`" for branch in _traced_branches(names[layer + 1 :], modules, paths)]
    message = f"`{print_selector(arm)}` may name sites in `{pattern}`, which cannot be traced"
    help_ = f'name its modules by a pattern in quotes, such as `"{glob}.**"`'
    help_ += f", or write {' or '.join(traced)} for what is traced" if traced else ""
    label, notes = f"some `{step.name}` may be left out", tuple(reason_lines(modules))
    return Diagnostic("P214", message, name_span(step), label=label, notes=notes, help=help_)


def _traced_branches(below: Sequence[str], modules: UntracedModules, paths: SitePaths) -> list[str]:
    """Those of `self` and `cross` that the layers have, if a path does not say which it means."""
    if below[:1] != ["attn"] or BRANCHES.intersection(below):
        return []
    layers = {module.steps for module in modules}
    sites = [site.steps for site in paths.table.sites if len(site.steps) > 2]
    attentions = [steps for steps in sites if steps[:-2] in layers]
    branches = (steps[-1][0] for steps in attentions if steps[-2][0] == "attn")
    return list(dict.fromkeys(name for name in branches if name in BRANCHES))


def reason_lines(modules: Iterable[UntracedModule]) -> list[str]:
    """Each module with its reason; names that differ in a number, in one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        groups.setdefault((module.type, module.reason), []).append(module.module)
    return [
        f"`{pattern}` ({type_}): {reason}"
        for (type_, reason), names in groups.items()
        for pattern, _ in compress_paths(names)
    ]


def untraced_in_layers(sites: Iterable[Site], table: SiteTable) -> UntracedModules:
    ends = ((site.steps, i) for site in sites for i, (name, _) in enumerate(site.steps) if name == "layer")
    layers = {steps[: i + 1] for steps, i in ends} if table.untraced else set[Steps]()
    return tuple(module for module in table.untraced if module.steps in layers)


def untraced_warning(selector: ast.Selector, modules: Sequence[UntracedModule]) -> Diagnostic:
    """P215 for untraced modules in the layers of a selector that names nothing in them."""
    message = f"{plural(len(modules), 'module')} of these layers cannot be traced"
    label = f"there are no sites in {'them' if len(modules) > 1 else 'it'}"
    notes = tuple(reason_lines(modules))
    return Diagnostic("P215", message, selector.span, label=label, notes=notes, severity="warning")
