"""Resolves selectors to sites. Every arm must match something."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

from peftc.addressing.paths import (
    BRANCHES,
    ItemMatch,
    SitePaths,
    StepList,
    compress_paths,
    glob_pattern,
    in_range,
    index_range,
    index_ranges,
    paths_of,
)
from peftc.addressing.selection import Selection
from peftc.addressing.site_list import Place, show_steps
from peftc.addressing.sites import ModuleInfo, Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.planning.foldability.affine import computes_product
from peftc.planning.selection import selector_errors
from peftc.planning.selection.module_sites import module_site, modules_below
from peftc.planning.selection.selector_errors import signed_arms, untraced_errors
from peftc.semantics.checks.edits import check_selector
from peftc.syntax import ast
from peftc.syntax.printer import print_index, print_selector
from peftc.syntax.walk import above_modules, ends_in_linears, spell_out


def resolve(selector: ast.Selector, table: SiteTable) -> list[Site]:
    """The sites that a selector names, each once, in model order. Raises: as `select`."""
    return ordered(select(selector, table), table)


def select(selector: ast.Selector, table: SiteTable) -> Selection:
    """What a selector names.

    Raises: P201 (no match), P208 (an unknown name in an arm that may match nothing), P202 (no such
    index), P203 (a difference removes nothing or all), P214 (an arm may name sites in an untraced
    module): all errors of the selector together.
    """
    paths = paths_of(table)
    resolver = _Resolver(paths)
    selection = resolver.resolve(selector)
    if not resolver.errors and not len(selection):
        resolver.errors.append(selector_errors.every_arm_optional(selector, table))
    untraced = untraced_errors(selector, paths)
    if errors := [*untraced, *(e for e in resolver.errors if not (untraced and e.code == "P201"))]:
        raise PeftcError(errors)
    return selection


def ordered(selection: Selection, table: SiteTable) -> list[Site]:
    """The sites of a selection: in model order, or in that of modules if some have no role."""
    sites = selection.sites
    if not selection.others:
        return [sites.at(place) for place in selection.places()]
    module = {info.name: i for i, info in enumerate(table.modules)}
    keys = {(module.get(site.module, -1), -1, path): site for path, site in selection.others.items()}
    listed = ((place, sites.at(place)) for place in selection.places())
    keys |= {(module.get(site.module, -1), sites.order(place), site.path): site for place, site in listed}
    return [keys[key] for key in sorted(keys, key=lambda key: key[:2])]


def coverage_warnings(selector: ast.Selector, table: SiteTable) -> list[Diagnostic]:
    """P204 warnings for arms that lack a site in some of the layers that they name."""
    paths = paths_of(table)
    arms = [path for path, is_positive in signed_arms(selector) if is_positive and not path.optional]
    return [warning for path in arms for warning in (*_uneven_layers(path, paths), *_uneven_attentions(path, paths))]


class _Resolver:
    def __init__(self, paths: SitePaths) -> None:
        self.paths, self.table, self.errors = paths, paths.table, list[Diagnostic]()
        self.nothing = Selection(paths.sites, {}, {})

    def resolve(self, selector: ast.Selector) -> Selection:
        match selector:
            case ast.Path():
                return self._path(selector)
            case ast.BracedPath():
                return self.resolve(spell_out(selector))
            case ast.Glob(text, is_optional):
                pattern = glob_pattern(text)
                modules = [module for module in self.table.modules if pattern.fullmatch(module.name)]
                modules = modules or [module for name, module in _by_aliases(self.table) if pattern.fullmatch(name)]
                if not modules and not is_optional:
                    self.errors.append(selector_errors.no_module(selector, self.table))
                return self._modules(modules)
            case ast.Union(arms):
                return reduce(Selection.__or__, map(self.resolve, arms), self.nothing)
            case ast.Difference():
                return self._difference(selector)

    def _path(self, path: ast.Path) -> Selection:
        above = above_modules(path.steps)
        below, steps = above is not None, path.steps if above is None else above
        if not steps:
            return self._below(path, (module for module in self.table.modules if module.parameters))
        matches = list(self.paths.item_matches(steps))
        whole = bool(matches) or not below  # a stack is no site, but there are modules below it
        if not whole:
            matches = list(self.paths.item_matches(steps, whole=False))
        if not matches:
            nothing = selector_errors.no_match(path, steps, self.paths)
            self.errors += check_selector(path) if path.optional else [nothing]
            return self.nothing
        if errors := list(_index_errors(steps, matches, self.paths)):
            self.errors.extend(errors)
            return self.nothing
        chosen = [(match, *self.paths.selected(match, steps)) for match in matches]
        items = {(block, match.item): numbers for match, blocks, numbers in chosen if numbers for block in blocks}
        if not items and not path.optional:
            message = f"`{print_selector(path)}` matches nothing in {self.table.model_id}"
            label = "there is such a site, but not in these layers"
            self.errors.append(Diagnostic("P201", message, path.span, label=label))
        elif items and below:
            singles = self.paths.matches(steps, whole=whole)
            prefixes = [match.prefix for match in singles if self.paths.has_indices(match, steps)]
            return self._below(path, modules_below(prefixes, self.table))
        return Selection(self.paths.sites, items, {})

    def _below(self, path: ast.Path, modules: Iterable[ModuleInfo]) -> Selection:
        """The modules that `**` names, or the Linears among them."""
        selection = self._modules(modules)
        if not ends_in_linears(path.steps):
            return selection
        places = (*selection.places(), *selection.others.values())
        linears = [place for place in places if computes_product(self._site(place))]
        if not linears and not path.optional:
            self.errors.append(selector_errors.no_linear(path, self.table))
        return Selection.of(self.paths.sites, linears)

    def _site(self, place: Place | Site) -> Site:
        return place if isinstance(place, Site) else self.paths.sites.template_site(place)

    def _modules(self, modules: Iterable[ModuleInfo]) -> Selection:
        return Selection.of(self.paths.sites, (module_site(module, self.paths.sites) for module in modules))

    def _difference(self, selector: ast.Difference) -> Selection:
        errors = len(self.errors)
        left, right = self.resolve(selector.left), self.resolve(selector.right)
        if len(self.errors) > errors:
            return self.nothing
        rest = left - right
        if not len(right) and len(rest):  # all arms on the right are optional
            return rest
        if len(rest) == len(left) and len(left):
            self.errors.append(selector_errors.removes_nothing(selector, left.paths, right.paths))
        elif not len(rest) and len(left):
            message = f"`{print_selector(selector)}` leaves no site"
            self.errors.append(Diagnostic("P203", message, selector.span, label="takes all of them away"))
        return rest


def _by_aliases(table: SiteTable) -> Iterator[tuple[str, ModuleInfo]]:
    """The further names of modules that are registered in several places."""
    # Seen in: no transformers model, but Enformer, whose stack has two names
    for alias, own in table.aliases:
        for module in table.modules:
            if module.name == own or module.name.startswith(f"{own}."):
                yield alias + module.name[len(own) :], module


def _index_errors(steps: Sequence[ast.Step], matches: Sequence[ItemMatch], paths: SitePaths) -> Iterator[Diagnostic]:
    for i, step in enumerate(steps):
        if step.indices is None:
            continue
        lists = (lists for match in matches for lists, _, _ in paths.indices(match, i))
        sizes = {one: paths.size(one) for one in lists if paths.size(one)}
        if not sizes:
            message = f"`{step.name}` takes no index here: there is one in each place"
            yield Diagnostic("P202", message, step.span, label="not numbered", help=f"write `{step.name}`")
            continue
        for index in step.indices:
            if not any(in_range(index, size) for size in sizes.values()):
                yield selector_errors.no_such_index(index, step, _all_sizes(steps, i, matches, paths))


def _all_sizes(
    steps: Sequence[ast.Step], written: int, matches: Sequence[ItemMatch], paths: SitePaths
) -> dict[StepList, int]:
    """The size of each list that a step stands for, in every layer."""
    lists = [paths.step_list(match, block, written) for match in matches for block in match.blocks]
    return {one: size for one in dict.fromkeys(lists) if (size := paths.size(one))}


def _uneven_layers(path: ast.Path, paths: SitePaths) -> Iterator[Diagnostic]:
    """Layers that the arm names and that lack such a site, for each stack."""
    if above_modules(path.steps) is not None:
        return
    matches = list(paths.item_matches(path.steps))
    for i, step in enumerate(path.steps):
        present: dict[StepList, set[int]] = defaultdict(set)  # with such a site, for each list in order
        alike: dict[StepList, list[tuple[ItemMatch, Sequence[int]]]] = defaultdict(list)
        for match in matches:
            for lists, blocks, numbers in paths.indices(match, i):
                present[lists].update(numbers)
                alike[lists].append((match, blocks))
        for first, numbers in present.items():
            size = paths.size(first)
            if not size:
                continue
            indices = step.indices if step.indices is not None else (ast.Index(None, None),)
            named = sorted({number for index in indices for number in index_range(index, size)})
            missing = [number for number in named if number not in numbers]
            past = [index for index in indices if not in_range(index, size)] if len(present) > 1 else []
            in_layers = (paths.step_list(match, block, i) for match, blocks in alike[first] for block in blocks)
            for steps in dict.fromkeys(in_layers) if missing or past else ():  # that list in layers of the kind
                yield from _uneven_list(path, steps, size, named, missing, past)


def _uneven_list(
    path: ast.Path,
    steps: StepList,
    size: int,
    named: Sequence[int],
    missing: Sequence[int],
    past: Iterable[ast.Index],
) -> Iterator[Diagnostic]:
    """P204 for the numbers of one list that have no such site, and for indices past its end."""
    if missing:
        message = f"`{print_selector(path)}` is missing on {len(missing)} of {len(named)} layers"
        note = f"without it: {steps}[{index_ranges(missing)}]"
        help_ = "write the layers that have it, if this is meant"
        yield _warning(message, path.span, f"not in every `{steps}`", note, help_)
    for index in past:
        message = f"`{print_index(index)}` goes past the end of `{steps}`"
        yield _warning(message, index.span, f"`{steps}` has 0..{size - 1}", "only the layers that exist are selected")


def _uneven_attentions(path: ast.Path, paths: SitePaths) -> Iterator[Diagnostic]:
    """Attentions that lack such a site, in layers where another attention has one."""
    names = [step.name for step in path.steps]
    if "attn" not in names[:-1] or BRANCHES.intersection(names):
        return
    attn = names.index("attn")
    matches = [(match, *paths.selected(match, path.steps)) for match in paths.item_matches(path.steps)]
    present = {
        paths.steps(block, match.item)[: match.positions[attn] + 2]
        for match, blocks, numbers in matches
        if numbers
        for block in blocks
    }
    layers = {steps[:-2] for steps in present}
    attentions = [steps for steps in paths.attentions if steps[:-2] in layers]
    if missing := [show_steps(steps) for steps in attentions if steps not in present]:
        subject = f"`{print_selector(path)}` is missing on {len(missing)} of {len(attentions)}"
        note = f"without it: {', '.join(line for line, _ in compress_paths(missing))}"
        help_ = "write `attn.self` or `attn.cross` if one of them is meant"
        yield _warning(f"{subject} attentions of these layers", path.span, "not in every `attn`", note, help_)


def _warning(message: str, span: Span, label: str, note: str, help_: str | None = None) -> Diagnostic:
    return Diagnostic("P204", message, span, label=label, notes=(note,), help=help_, severity="warning")
