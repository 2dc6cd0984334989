"""Checks of selectors that need no model: site names, and the states of sites."""

from __future__ import annotations

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.semantics.vocabulary import BELOW, PARTS, SITES, STACK_CHOICE_HELP, STATES_AT, TOWERS
from peftc.semantics.walk import arms, selects_stack
from peftc.syntax import ast


def check_selector(selector: ast.Selector) -> Iterator[Diagnostic]:
    """P208 for an unknown site name, or one that cannot follow the name before it."""
    for arm in arms(selector):
        if isinstance(arm, ast.Path):
            yield from _path(arm)


def _path(path: ast.Path) -> Iterator[Diagnostic]:
    above = ""
    for number, step in enumerate(path.steps):
        if step.name == "**":
            if number != len(path.steps) - 1:
                yield Diagnostic("P208", "`**` must end a path: it is every module below", step.span)
            return
        if selects_stack(path.steps, number):
            continue
        if is_tower(path, number):
            above = TOWERS[0]
            continue
        below = BELOW.get(above, ())
        span = step.span.first(len(step.name))
        if step.name not in SITES:
            help_ = STACK_CHOICE_HELP.get(step.name) or did_you_mean(step.name, below) or did_you_mean(step.name, SITES)
            # In one of these parts, any other name may be that of a Linear without a role.
            if help_ or above not in PARTS:
                message = f"there is no site named `{step.name}`"
                yield Diagnostic("P208", message, span, help=help_ or _choices(above))
            return
        if step.name not in below:
            help_ = did_you_mean(step.name, below) or _choices(above)
            yield Diagnostic("P208", f"`{above}` has no `{step.name}`", span, help=help_)
            return
        above = step.name


def is_tower(path: ast.Path, number: int) -> bool:
    """Whether a step names a tower of only some models, such as `qformer` in `qformer.layer[*]`.

    Such a name resembles no other name, or has several words joined by `_`, and a stack follows.
    """
    name, below = path.steps[number].name, [step.name for step in path.steps[number + 1 : number + 2]]
    is_outer = number == 0 or path.steps[number - 1].name in TOWERS
    is_new = name not in SITES and ("_" in name or not did_you_mean(name, SITES))
    return is_outer and is_new and below in (["layer"], ["encoder"], ["decoder"])


def _choices(above: str) -> str:
    if not above:
        return 'a module is also named by a pattern: "model.layers.*.mlp"'
    names = BELOW.get(above, ())
    return f"below `{above}` there are {join_names(names)}" if names else f"nothing is below `{above}`"


def sites_without(selector: ast.Selector, state: str) -> Iterator[str]:
    """The site names in `selector` that never have `state`."""
    match selector:
        case ast.Union(parts):
            for part in parts:
                yield from sites_without(part, state)
        case ast.Difference(left, _):
            yield from sites_without(left, state)
        case ast.Path(steps) if state not in STATES_AT.get(steps[-1].name, (state,)):
            yield steps[-1].name
        case _:
            pass
