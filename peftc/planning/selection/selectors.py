"""Selectors to sites. Every arm must name something that is there; nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peftc.addressing.path_compression import compress_paths, index_ranges
from peftc.addressing.paths import (
    BRANCHES,
    Family,
    Match,
    Paths,
    families,
    fits,
    glob_pattern,
    selected,
    show_site_steps,
)
from peftc.addressing.sites import ModuleInfo, Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.selection import selector_errors
from peftc.planning.selection.module_sites import module_site, modules_below
from peftc.planning.selection.untraced import missed
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_index as show_index
from peftc.syntax.print_expressions import print_selector as show

Found = dict[str, Site]  # by path


def resolve(selector: ast.Selector, table: SiteTable) -> list[Site]:
    """The sites a selector names, each once, in model order.

    Raises:
        P201: an arm matches nothing. P202: an index that does not exist. P203: a difference that removes
        nothing, or everything. P214: what an arm asks for may be in a module that could not be read. Every arm is
        looked at before anything is raised.
    """
    paths = Paths(table)
    resolution = _Resolution(paths)
    found = resolution.of(selector)
    unread = missed(selector, paths)
    if errors := [*unread, *(e for e in resolution.errors if not (unread and e.code == "P201"))]:
        raise PeftcError(errors)
    return _in_model_order(found.values(), table)


def coverage_warnings(selector: ast.Selector, table: SiteTable) -> list[Diagnostic]:
    """P204 warnings for arms that miss some of the layers they ask for, one a stack."""
    paths = Paths(table)
    return [warning for path in _arms(selector) for warning in (*_uneven(path, paths), *_without(path, paths))]


class _Resolution:
    def __init__(self, paths: Paths) -> None:
        self.paths, self.errors = paths, list[Diagnostic]()

    def of(self, selector: ast.Selector) -> Found:
        match selector:
            case ast.Path():
                return self._path(selector)
            case ast.Glob():
                return self._glob(selector)
            case ast.Union(arms):
                return {path: site for arm in arms for path, site in self.of(arm).items()}
            case ast.Difference():
                return self._difference(selector)

    def _path(self, path: ast.Path) -> Found:
        below = path.steps[-1].name == "**"
        steps = path.steps[:-1] if below else path.steps
        if not steps:
            return self._modules(module for module in self.paths.table.modules if module.parameters)
        matches = list(self.paths.matches(steps))
        if below and not matches:  # a stack is no site, but there are modules below it
            matches = list(self.paths.matches(steps, whole=False))
        if not matches:
            self.errors.append(selector_errors.dead_path(path, steps, self.paths))
            return {}
        if wrong := list(_wrong_indices(steps, matches, self.paths)):
            self.errors.extend(wrong)
            return {}
        chosen = [match for match in matches if self.paths.chosen(match, steps)]
        if not chosen:
            self.errors.append(selector_errors.empty_choice(path, self.paths.table))
        elif below:
            return self._modules(modules_below([match.reached for match in chosen], self.paths.table))
        return {match.site.path: match.site for match in chosen}

    def _glob(self, glob: ast.Glob) -> Found:
        pattern = glob_pattern(glob.pattern)
        found = [module for module in self.paths.table.modules if pattern.fullmatch(module.name)]
        if not found:
            self.errors.append(selector_errors.dead_glob(glob, self.paths.table))
        return self._modules(found)

    def _modules(self, modules: Iterable[ModuleInfo]) -> Found:
        sites = (module_site(module, self.paths.table) for module in modules)
        return {site.path: site for site in sites}

    def _difference(self, selector: ast.Difference) -> Found:
        dead = len(self.errors)
        left, right = self.of(selector.left), self.of(selector.right)
        if len(self.errors) > dead:
            return {}
        kept = {path: site for path, site in left.items() if path not in right}
        if len(kept) == len(left):
            self.errors.append(_removes_nothing(selector, left, right))
        elif not kept:
            self.errors.append(
                Diagnostic("P203", f"`{show(selector)}` leaves no site", selector.span, label="takes all of them away")
            )
        return kept


def _wrong_indices(steps: Sequence[ast.Step], matches: Sequence[Match], paths: Paths) -> Iterable[Diagnostic]:
    for i, step in enumerate(steps):
        if step.indices is None:
            continue
        found = families(matches, i)
        sizes = {family: paths.size(family) for family in found if paths.size(family)}
        if not sizes:
            yield selector_errors.not_indexed(step)
            continue
        for index in step.indices:
            if not any(fits(index, size) for size in sizes.values()):
                yield selector_errors.no_such_index(index, step, sizes)


def _removes_nothing(selector: ast.Difference, left: Found, right: Found) -> Diagnostic:
    return Diagnostic(
        "P203",
        f"`- {show(selector.right)}` removes nothing",
        selector.right.span,
        label="none of these sites is on the left",
        notes=(
            f"the left side has {_count(left)}, such as `{next(iter(left))}`",
            f"the right side has {_count(right)}, such as `{next(iter(right))}`",
        ),
        help="leave this part out",
    )


def _count(found: Found) -> str:
    return f"{len(found)} site{'s' * (len(found) != 1)}"


def _arms(selector: ast.Selector) -> Iterable[ast.Path]:
    match selector:
        case ast.Path():
            yield selector
        case ast.Glob():
            pass
        case ast.Union(arms):
            for arm in arms:
                yield from _arms(arm)
        case ast.Difference(left, _):
            yield from _arms(left)


def _uneven(path: ast.Path, paths: Paths) -> Iterable[Diagnostic]:
    """The layers that the arm asks for and that have no such site, stack by stack."""
    if path.steps[-1].name == "**":
        return
    matches = list(paths.matches(path.steps))
    for i, step in enumerate(path.steps):
        for family in families(matches, i):
            size = paths.size(family)
            if not size:
                continue
            indices = step.indices if step.indices is not None else (ast.Index(None, None),)
            asked = sorted({at for index in indices for at in selected(index, size)})
            there = {match.index(i) for match in matches if match.family(i) == family}
            if missing := [at for at in asked if at not in there]:
                yield _warning(path, family, asked, missing)
            for index in indices:
                if not fits(index, size) and len(families(matches, i)) > 1:
                    yield _past_the_end(index, family, size)


def _without(path: ast.Path, paths: Paths) -> Iterable[Diagnostic]:
    """The attentions that have nothing of what the arm asks for, in layers with another one that does."""
    names = [step.name for step in path.steps]
    at = names.index("attn") if "attn" in names[:-1] else -1
    if at < 0 or BRANCHES.intersection(names):
        return
    matches = [match for match in paths.matches(path.steps) if paths.chosen(match, path.steps)]
    with_it = {match.site.steps[: match.positions[at] + 2] for match in matches}
    layers = {steps[:-2] for steps in with_it}
    all_of_them = [
        site.steps for site in paths.table.sites if site.steps[:-2] in layers and site.steps[-1][0] in BRANCHES
    ]
    if missing := [show_site_steps(steps) for steps in all_of_them if steps not in with_it]:
        yield Diagnostic(
            "P204",
            f"`{show(path)}` is missing on {len(missing)} of {len(all_of_them)} attentions of these layers",
            path.span,
            label="not in every `attn`",
            notes=(f"without it: {', '.join(line for line, _ in compress_paths(missing))}",),
            help="write `attn.self` or `attn.cross` if one of them is meant",
            severity="warning",
        )


def _warning(path: ast.Path, family: Family, asked: list[int], missing: list[int]) -> Diagnostic:
    return Diagnostic(
        "P204",
        f"`{show(path)}` is missing on {len(missing)} of {len(asked)} layers",
        path.span,
        label=f"not in every `{family}`",
        notes=(f"without it: {family}[{index_ranges(missing)}]",),
        help="write the layers that have it, if this is meant",
        severity="warning",
    )


def _past_the_end(index: ast.Index, family: Family, size: int) -> Diagnostic:
    return Diagnostic(
        "P204",
        f"`{show_index(index)}` goes past the end of `{family}`",
        index.span,
        label=f"`{family}` has 0..{size - 1}",
        notes=("the layers that are there are taken",),
        severity="warning",
    )


def _in_model_order(sites: Iterable[Site], table: SiteTable) -> list[Site]:
    """Table sites as the table has them; modules that are no sites by where they stand in the model."""
    found = list(sites)
    position = {site.path: i for i, site in enumerate(table.sites)}
    if all(site.path in position for site in found):
        return sorted(found, key=lambda site: position[site.path])
    module = {info.name: i for i, info in enumerate(table.modules)}
    return sorted(found, key=lambda site: (module.get(site.module, -1), position.get(site.path, -1)))
