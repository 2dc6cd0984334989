"""Resolves selectors to sites. Every arm must match something."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from peftc.addressing.paths import (
    BRANCHES,
    Match,
    SitePaths,
    StepList,
    compress_paths,
    glob_pattern,
    in_range,
    index_range,
    index_ranges,
    paths_of,
    show_site_steps,
    step_lists,
)
from peftc.addressing.sites import ModuleInfo, Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.planning.selection import selector_errors
from peftc.planning.selection.module_sites import module_site, modules_below
from peftc.planning.selection.selector_errors import signed_arms, untraced_errors
from peftc.syntax import ast
from peftc.syntax.printer import print_index, print_selector

SitesByPath = dict[str, Site]


def resolve(selector: ast.Selector, table: SiteTable) -> list[Site]:
    """The sites that a selector names, each once, in model order.

    Raises: P201 (no match), P202 (no such index), P203 (a difference removes nothing or all), P214
    (an arm may name sites in an untraced module): all errors of the selector together.
    """
    paths = paths_of(table)
    resolver = _Resolver(paths)
    sites = resolver.resolve(selector)
    untraced = untraced_errors(selector, paths)
    if errors := [*untraced, *(e for e in resolver.errors if not (untraced and e.code == "P201"))]:
        raise PeftcError(errors)
    position = {site.path: i for i, site in enumerate(table.sites)}
    if sites.keys() <= position.keys():
        return sorted(sites.values(), key=lambda site: position[site.path])
    module = {info.name: i for i, info in enumerate(table.modules)}  # some sites are modules without a role
    return sorted(sites.values(), key=lambda site: (module.get(site.module, -1), position.get(site.path, -1)))


def coverage_warnings(selector: ast.Selector, table: SiteTable) -> list[Diagnostic]:
    """P204 warnings for arms that lack a site in some of the layers that they name."""
    paths = paths_of(table)
    arms = [path for path, is_positive in signed_arms(selector) if is_positive]
    return [warning for path in arms for warning in (*_uneven_layers(path, paths), *_uneven_attentions(path, paths))]


class _Resolver:
    def __init__(self, paths: SitePaths) -> None:
        self.paths, self.table, self.errors = paths, paths.table, list[Diagnostic]()

    def resolve(self, selector: ast.Selector) -> SitesByPath:
        match selector:
            case ast.Path():
                return self._path(selector)
            case ast.Glob(text):
                pattern = glob_pattern(text)
                modules = [module for module in self.table.modules if pattern.fullmatch(module.name)]
                if not modules:
                    self.errors.append(selector_errors.no_module(selector, self.table))
                return self._modules(modules)
            case ast.Union(arms):
                return {path: site for arm in arms for path, site in self.resolve(arm).items()}
            case ast.Difference():
                return self._difference(selector)

    def _path(self, path: ast.Path) -> SitesByPath:
        below = path.steps[-1].name == "**"
        steps = path.steps[:-1] if below else path.steps
        if not steps:
            return self._modules(module for module in self.table.modules if module.parameters)
        matches = list(self.paths.matches(steps))
        if below and not matches:  # a stack is no site, but there are modules below it
            matches = list(self.paths.matches(steps, whole=False))
        if not matches:
            self.errors.append(selector_errors.no_match(path, steps, self.paths))
            return {}
        if errors := list(_index_errors(steps, matches, self.paths)):
            self.errors.extend(errors)
            return {}
        matches = [match for match in matches if self.paths.has_indices(match, steps)]
        if not matches:
            message = f"`{print_selector(path)}` matches nothing in {self.table.model_id}"
            label = "there is such a site, but not in these layers"
            self.errors.append(Diagnostic("P201", message, path.span, label=label))
        elif below:
            return self._modules(modules_below([match.prefix for match in matches], self.table))
        return {match.site.path: match.site for match in matches}

    def _modules(self, modules: Iterable[ModuleInfo]) -> SitesByPath:
        return {site.path: site for site in (module_site(module, self.table) for module in modules)}

    def _difference(self, selector: ast.Difference) -> SitesByPath:
        errors = len(self.errors)
        left, right = self.resolve(selector.left), self.resolve(selector.right)
        if len(self.errors) > errors:
            return {}
        sites = {path: site for path, site in left.items() if path not in right}
        if len(sites) == len(left):
            self.errors.append(selector_errors.removes_nothing(selector, list(left), list(right)))
        elif not sites:
            message = f"`{print_selector(selector)}` leaves no site"
            self.errors.append(Diagnostic("P203", message, selector.span, label="takes all of them away"))
        return sites


def _index_errors(steps: Sequence[ast.Step], matches: Sequence[Match], paths: SitePaths) -> Iterator[Diagnostic]:
    for i, step in enumerate(steps):
        if step.indices is None:
            continue
        sizes = {lists: paths.size(lists) for lists in step_lists(matches, i) if paths.size(lists)}
        if not sizes:
            message = f"`{step.name}` takes no index here: there is one in each place"
            yield Diagnostic("P202", message, step.span, label="not numbered", help=f"write `{step.name}`")
            continue
        for index in step.indices:
            if not any(in_range(index, size) for size in sizes.values()):
                yield selector_errors.no_such_index(index, step, sizes)


def _uneven_layers(path: ast.Path, paths: SitePaths) -> Iterator[Diagnostic]:
    """Layers that the arm names and that lack such a site, for each stack."""
    if path.steps[-1].name == "**":
        return
    matches = list(paths.matches(path.steps))
    for i, step in enumerate(path.steps):
        numbers: dict[StepList, set[int | None]] = defaultdict(set)  # with such a site, for each list in order
        for match in matches:
            numbers[match.step_list(i)].add(match.index(i))
        for steps, present in numbers.items():
            size = paths.size(steps)
            if not size:
                continue
            indices = step.indices if step.indices is not None else (ast.Index(None, None),)
            named = sorted({number for index in indices for number in index_range(index, size)})
            if missing := [number for number in named if number not in present]:
                message = f"`{print_selector(path)}` is missing on {len(missing)} of {len(named)} layers"
                note = f"without it: {steps}[{index_ranges(missing)}]"
                help_ = "write the layers that have it, if this is meant"
                yield _warning(message, path.span, f"not in every `{steps}`", note, help_)
            for index in indices:
                if not in_range(index, size) and len(numbers) > 1:
                    message = f"`{print_index(index)}` goes past the end of `{steps}`"
                    note = "only the layers that exist are selected"
                    yield _warning(message, index.span, f"`{steps}` has 0..{size - 1}", note)


def _uneven_attentions(path: ast.Path, paths: SitePaths) -> Iterator[Diagnostic]:
    """Attentions that lack such a site, in layers where another attention has one."""
    names = [step.name for step in path.steps]
    if "attn" not in names[:-1] or BRANCHES.intersection(names):
        return
    attn = names.index("attn")
    matches = [match for match in paths.matches(path.steps) if paths.has_indices(match, path.steps)]
    present = {match.site.steps[: match.positions[attn] + 2] for match in matches}
    layers = {steps[:-2] for steps in present}
    sites = [site.steps for site in paths.table.sites if site.steps[-1][0] in BRANCHES]
    attentions = [steps for steps in sites if steps[:-2] in layers]
    if missing := [show_site_steps(steps) for steps in attentions if steps not in present]:
        subject = f"`{print_selector(path)}` is missing on {len(missing)} of {len(attentions)}"
        note = f"without it: {', '.join(line for line, _ in compress_paths(missing))}"
        help_ = "write `attn.self` or `attn.cross` if one of them is meant"
        yield _warning(f"{subject} attentions of these layers", path.span, "not in every `attn`", note, help_)


def _warning(message: str, span: Span, label: str, note: str, help_: str | None = None) -> Diagnostic:
    return Diagnostic("P204", message, span, label=label, notes=(note,), help=help_, severity="warning")
