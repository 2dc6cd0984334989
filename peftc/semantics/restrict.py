"""`apply … at STACK`: the selectors of a method, within a part of the model."""

from __future__ import annotations

from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.semantics.vocabulary import STACKS, TOWERS
from peftc.semantics.walk import selects_stack
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_index, print_selector

QUALIFIERS = (*STACKS, *TOWERS)


def within(inner: ast.Selector, outer: ast.Selector) -> ast.Selector:
    """The sites of `inner` that are in `outer`; spans are those of `inner`.

    Raises: PeftcError P122 where no path says that.
    """
    match outer:
        case ast.Union(arms):
            return ast.Union(tuple(within(inner, arm) for arm in arms), span=inner.span)
        case ast.Difference(left, right):
            return ast.Difference(within(inner, left), within(inner, right), span=inner.span)
        case ast.Glob():
            raise _impossible(inner, outer, "a pattern on the names of modules is no part of a path")
        case ast.Path():
            return _within_path(inner, outer)


def _within_path(inner: ast.Selector, outer: ast.Path) -> ast.Selector:
    match inner:
        case ast.Union(arms):
            return replace(inner, arms=tuple(_within_path(arm, outer) for arm in arms))
        case ast.Difference(left, right):
            return replace(inner, left=_within_path(left, outer), right=_within_path(right, outer))
        case ast.Glob():
            raise _impossible(inner, outer, "a pattern on the names of modules is no part of a path")
        case ast.Path(steps):
            return replace(inner, steps=_joined(steps, outer.steps, inner, outer))


def _joined(
    steps: tuple[ast.Step, ...], above: tuple[ast.Step, ...], inner: ast.Path, outer: ast.Path
) -> tuple[ast.Step, ...]:
    """`layer[*].attn` within `encoder.layer[0..5]` is `encoder.layer[0..5].attn`."""
    if selects_stack(steps, 0) and not any(selects_stack(above, i) for i in range(len(above))):
        at = next((i for i, step in enumerate(above) if step.name not in QUALIFIERS), len(above))
        return (*above[:at], steps[0], *(_joined(steps[1:], above[at:], inner, outer) if above[at:] else steps[1:]))
    if steps[0].name in QUALIFIERS and above[0].name not in QUALIFIERS:
        return (steps[0], *_joined(steps[1:], above, inner, outer)) if len(steps) > 1 else steps
    if steps[0].name in STACKS and above[0].name in TOWERS:
        return (above[0], *(_joined(steps, above[1:], inner, outer) if len(above) > 1 else steps))
    if steps[0].name in QUALIFIERS and above[0].name != steps[0].name:
        raise _impossible(inner, outer, f"`{steps[0].name}` is not in `{above[0].name}`")
    shared = next((n for n in range(min(len(steps), len(above)), 0, -1) if _overlap(above[-n:], steps[:n])), 0)
    in_layers = any(step.name == "layer" for step in above) or above[-1].name not in QUALIFIERS
    if in_layers and not shared and steps[0].name != "**":
        raise _impossible(inner, outer, f"`{steps[0].name}` is not in `{print_selector(outer)}`")
    both = tuple(_both(a, b, inner, outer) for a, b in zip(above[len(above) - shared :], steps[:shared], strict=True))
    return (*above[: len(above) - shared], *both, *steps[shared:])


def _overlap(above: tuple[ast.Step, ...], steps: tuple[ast.Step, ...]) -> bool:
    return all(a.name == b.name for a, b in zip(above, steps, strict=True))


def _both(above: ast.Step, step: ast.Step, inner: ast.Path, outer: ast.Path) -> ast.Step:
    """The step with the indices that are in both."""
    if _everything(step) or above.indices == step.indices:
        return replace(step, indices=above.indices if above.indices is not None else step.indices)
    if _everything(above):
        return step
    asked, given = (", ".join(map(print_index, found.indices or ())) for found in (step, above))
    raise _impossible(inner, outer, f"both choose among `{step.name}`: `[{asked}]` and `[{given}]`")


def _everything(step: ast.Step) -> bool:
    return step.indices is None or step.indices == (ast.Index(None, None),)


def _impossible(inner: ast.Selector, outer: ast.Selector, why: str) -> PeftcError:
    return PeftcError(
        Diagnostic(
            "P122",
            f"`{print_selector(inner)}` cannot be taken within `{print_selector(outer)}`",
            inner.span,
            label=why,
            help="write the edit with the selector that is meant, or apply the method without `at`",
        )
    )
