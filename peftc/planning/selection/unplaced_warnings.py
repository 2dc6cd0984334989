"""Warnings of selectors that leave out weights without a role (P217)."""

import re
from collections.abc import Iterator, Sequence

from peftc.addressing.paths import SitePaths, glob_pattern, paths_of
from peftc.addressing.sites import SiteTable, UnplacedModule
from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import plural
from peftc.planning.selection.selector_errors import name_span, reason_lines, signed_arms
from peftc.syntax import ast
from peftc.syntax.printer import print_selector
from peftc.syntax.walk import above_modules, selects_stack

MAX_LINES = 6  # of modules, in a warning


def unplaced_warnings(selector: ast.Selector, table: SiteTable) -> Iterator[Diagnostic]:
    """P217, one for each arm that names a role which some weights of the model lack."""
    if not table.unplaced:
        return
    paths = paths_of(table)
    arms = [(arm, is_positive, list(_left_out(arm, paths))) for arm, is_positive in signed_arms(selector)]
    excluded = {module for _, is_positive, modules in arms if not is_positive for module in modules}
    excluded |= {module for module in table.unplaced if _is_named(module, selector, table)}
    for arm, is_positive, modules in arms:
        if is_positive and (others := [module for module in modules if module not in excluded]):
            yield _warning(arm, others)


def _is_named(module: UnplacedModule, selector: ast.Selector, table: SiteTable) -> bool:
    """Whether a pattern in quotes names a module, or one in it."""
    patterns = list(map(glob_pattern, _globs(selector)))
    inside = (one.name for one in table.modules if f"{one.name}.".startswith(f"{module.module}."))
    return any(pattern.fullmatch(name) for name in inside for pattern in patterns)


def _globs(selector: ast.Selector) -> Iterator[str]:
    match selector:
        case ast.Glob(text):
            yield text
        case ast.Union(arms):
            for arm in arms:
                yield from _globs(arm)
        case ast.Difference(left):
            yield from _globs(left)
        case ast.Path() | ast.BracedPath():
            pass


def _left_out(path: ast.Path, paths: SitePaths) -> Iterator[UnplacedModule]:
    """The modules without a role that a path would name if they had it."""
    names = [step.name for i, step in enumerate(path.steps) if not selects_stack(path.steps, i)]
    if "layer" not in names or above_modules(path.steps) is not None:
        return
    below = names[names.index("layer") + 1 :]
    steps = path.steps[: len(path.steps) - len(below)]
    layers = {match.site.steps for match in paths.matches(steps) if paths.has_indices(match, steps)}
    is_whole = all(index.start is None and index.stop is None for index in steps[-1].indices or ())
    for module in paths.table.unplaced:
        selected = module.steps in layers if module.steps else is_whole and len(steps) == 1
        if selected and any(_names(below, role.split(".")) for role in module.roles):
            yield module


def _names(below: Sequence[str], role: Sequence[str]) -> bool:
    """Whether `attn.cross.q` names what lacks `attn` or `attn.q`; and not what lacks `attn.k`."""
    return below[:1] == role[:1] and (len(role) == 1 or below[-1:] == role[-1:])


def _warning(arm: ast.Path, modules: Sequence[UnplacedModule]) -> Diagnostic:
    text = print_selector(arm)
    names = [step.name for step in arm.steps]
    step = arm.steps[min(names.index("layer") + 1, len(arm.steps) - 1)]
    glob = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", modules[0].module)
    lines = reason_lines(modules)
    more = [f"and {plural(len(lines) - MAX_LINES, 'more line')} of `peftc sites`"] if len(lines) > MAX_LINES else []
    message = f"`{text}` leaves out {plural(len(modules), 'module')} with weights whose role is not known"
    help_ = f'name them by a pattern in quotes as well, such as `"{glob}"`, or only the layers that are meant'
    notes = (*lines[:MAX_LINES], *more)
    label = f"not every `{step.name}` of the model"
    return Diagnostic("P217", message, name_span(step), label=label, notes=notes, help=help_, severity="warning")
