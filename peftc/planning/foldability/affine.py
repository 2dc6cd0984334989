"""Whether the equations of an edit are affine, and so fold into a weight. No tensors.

An edit of `h` folds if its value is affine, with constant coefficients, in what its Linear reads.
`peftc.folding.affine_values` interprets the same terms to compute that weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peftc.addressing.sites import Site
from peftc.forms.shapes import Tokens
from peftc.planning.foldability.target import FoldTarget, fold_target, linear_states
from peftc.planning.ir import Arithmetic, Concat, Constant, FormCall, FrozenCall, Read, SiteEdit, Term


@dataclass(eq=False)
class NotAffine(Exception):
    reason: str  # why `term`, a sub-expression, does not fold
    term: Term


def fold_reason(
    site_edit: SiteEdit,
    sites: Mapping[str, Site],
    tied: Collection[Collection[str]] = (),
    overlaps: Collection[Collection[str]] = (),
    edited: Collection[str] = (),
    external_reads: Iterable[Sequence[str]] = (),
) -> str | None:
    """Why an edit does not fold at its site; None if it folds exactly.

    Args:
        tied: groups of dotted names that are one parameter.
        overlaps: groups of parameters that share memory.
        edited: the parameters that the same edit folds into at all sites of the module.
        external_reads: a parameter, and the modules other than its own that compute with it.
    """
    if tasks := next((instance.tasks for instance in site_edit.instances if instance.tasks), ()):
        return f"it has parameters for each task ({', '.join(tasks)}), and a weight is one for all"
    target = fold_target(site_edit, sites)
    if isinstance(target, str):
        return _not_affine(site_edit, site_edit.site.states.keys()) or target
    return (
        _not_affine(site_edit, linear_states(target, site_edit.site))
        or _called_again(target)
        or _other_use(target, tied, edited, "is tied to")
        or _other_use(target, overlaps, edited, "shares memory with")
        or _overlaps_itself(target, overlaps)
        or _external_read(target, external_reads)
    )


def _not_affine(site_edit: SiteEdit, linear: Collection[str]) -> str | None:
    values = [assign.value for assign in site_edit.assigns if assign.state not in ("w", "b")]
    return next((reason for value in values if (reason := affine_reason(value, linear))), None)


def _called_again(target: FoldTarget) -> str | None:
    calls, module = target.site.calls, target.site.module
    if target.side == "weight" or calls == 1:
        return None
    return f"`{module}` is called {calls} times, and the edit is at one of these calls: a fold would change all"


def _other_use(
    target: FoldTarget, groups: Iterable[Collection[str]], edited: Collection[str], relation: str
) -> str | None:
    for group in groups:
        shared = target.parameters & set(group)
        others = sorted(set(group) - target.parameters - set(edited))
        if shared and others:
            return f"`{min(shared)}` {relation} `{others[0]}`: a fold would change both uses"
    return None


def _overlaps_itself(target: FoldTarget, overlaps: Iterable[Collection[str]]) -> str | None:
    names = [name for group in overlaps if len(group) == 1 for name in group if name in target.parameters]
    if not names:
        return None
    return (
        f"entries of `{min(names)}` are in the same place in memory, as in an expanded tensor: a fold would change both"
    )


def _external_read(target: FoldTarget, reads: Iterable[Sequence[str]]) -> str | None:
    for name, reader, *_ in reads:
        if name in target.parameters:
            subject = f"`{reader}` computes" if reader else "the model's own code computes"
            return f"{subject} with `{name}`, too: a fold would change both uses"
    return None


def affine_reason(term: Term, linear: Collection[str]) -> str | None:
    """Why `term` is not affine with constant coefficients in the states `linear`; None if it is."""
    try:
        depends(term, linear)
    except NotAffine as error:
        return error.reason
    return None


def depends(term: Term, linear: Collection[str]) -> bool:
    """Whether an affine term depends on the states in `linear` at all, or is constant.

    Raises: NotAffine: the term is not affine.
    """
    match term:
        case Constant():
            return False
        case Read(state=state):
            if state not in linear:
                raise NotAffine(f"`{state}` is not what the Linear reads", term)
            return True
        case FormCall(instance=instance, input=value):
            if (reason := instance.form.affine(instance.args)) is not None:
                raise NotAffine(f"`{show_term(term)}`: {reason}", term)
            if value is not None and not depends(value, linear):
                raise NotAffine(f"`{show_term(term)}` reads nothing that the Linear reads", term)
            return value is not None
        case Arithmetic(op=op, left=left, right=right):
            left_depends, right_depends = depends(left, linear), depends(right, linear)
            if op == "*" and left_depends and right_depends:
                message = f"`{show_term(term)}` multiplies two values that both depend on the input"
                raise NotAffine(message, term)
            if op == "/" and right_depends:
                raise NotAffine(f"`{show_term(term)}` divides by a value that depends on the input", term)
            return left_depends or right_depends
        case FrozenCall(function=function):
            raise NotAffine(f"`{show_term(term)}`: the model's own `{function}` is not folded through", term)
        case Concat(shape=shape):
            rows = "tokens to the input" if isinstance(shape, Tokens) else "rows to the keys and values"
            raise NotAffine(f"`{show_term(term)}` adds {rows}, which no weight holds", term)


def show_term(term: Term) -> str:
    """A term without the arguments of its forms: `1 - scalar()`, `adapter(h)`."""
    match term:
        case Read(state=state):
            return state
        case Constant(value=value):
            return f"{value:g}"
        case FormCall(instance=instance, inputs=values):
            return f"{instance.form.name}({', '.join(map(show_term, values))})"
        case FrozenCall(function=function, input=value):
            return f"{function}({show_term(value)})"
        case Arithmetic(op=op, left=left, right=right):
            sides = (f"({show_term(s)})" if isinstance(s, Arithmetic) else show_term(s) for s in (left, right))
            return f" {op} ".join(sides)
        case Concat(parts=parts):
            return f"concat({', '.join(map(show_term, parts))})"
