"""The words of a selector, without a model: do such sites exist at all, and do they have such states?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from peftc.diagnostics import Diagnostic, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.semantics.vocabulary import BELOW, PARTS, SITES, STACK_CHOICE_HELP, STATES_AT, TOWERS
from peftc.semantics.walk import arms, selects_stack
from peftc.syntax import ast


def check_selector(selector: ast.Selector) -> Iterator[Diagnostic]:
    """P208 for a name that is no site, or none that can follow the one before.

    Linears without a role have names that only the model can say; what looks like another word is taken for that word.
    """
    for arm in arms(selector):
        if isinstance(arm, ast.Path):
            yield from _path(arm)


def _path(path: ast.Path) -> Iterator[Diagnostic]:
    above = ""
    for number, step in enumerate(path.steps):
        if step.name == "**":
            if number != len(path.steps) - 1:
                yield Diagnostic("P208", "`**` ends a path: it is every module below", step.span)
            return
        if selects_stack(path.steps, number):
            continue
        if is_tower(path, number):
            above = TOWERS[0]
            continue
        if step.name not in SITES:
            known = _following(above)
            help_ = STACK_CHOICE_HELP.get(step.name) or did_you_mean(step.name, known) or did_you_mean(step.name, SITES)
            if help_ is None and above in PARTS:
                return
            yield Diagnostic(
                "P208", f"there is no site called `{step.name}`", name_span(step), help=help_ or _choices(above)
            )
            return
        if step.name not in _following(above):
            help_ = did_you_mean(step.name, BELOW.get(above, ())) or _choices(above)
            yield Diagnostic("P208", f"`{above}` has no `{step.name}`", name_span(step), help=help_)
            return
        above = step.name


def is_tower(path: ast.Path, number: int) -> bool:
    """Whether a step is the name of a part that only some models have, such as `qformer` of `qformer.layer[*]`: a word like
    no other, or several joined by `_`, with a stack below it.
    """
    name, below = path.steps[number].name, [step.name for step in path.steps[number + 1 : number + 2]]
    outer = number == 0 or path.steps[number - 1].name in TOWERS
    own = name not in SITES and ("_" in name or not did_you_mean(name, SITES))
    return outer and own and below in (["layer"], ["encoder"], ["decoder"])


def _following(above: str) -> tuple[str, ...]:
    return BELOW.get(above, ())


def _choices(above: str) -> str:
    known = _following(above)
    if not known:
        return f"nothing is below `{above}`"
    return (
        f"below `{above}` there are {join_names(known)}"
        if above
        else 'a module is also named by a pattern: "model.layers.*.mlp"'
    )


def name_span(step: ast.Step) -> Span:
    """The word of a step, without its brackets."""
    at, length = step.span, len(step.name)
    if at.end - at.start <= length:
        return at
    return Span(at.start, at.start + length, at.line, at.column, at.line, at.column + length)


def states_missing(selector: ast.Selector, state: str) -> Iterable[str]:
    """The kinds of sites in `selector` that never have `state`, whatever the model."""
    for arm in _kept(selector):
        if isinstance(arm, ast.Path) and state not in STATES_AT.get(arm.steps[-1].name, (state,)):
            yield arm.steps[-1].name


def _kept(selector: ast.Selector) -> Iterable[ast.Path | ast.Glob]:
    match selector:
        case ast.Difference(left, _):
            return _kept(left)
        case ast.Union(parts):
            return [arm for part in parts for arm in _kept(part)]
        case _:
            return [selector]
