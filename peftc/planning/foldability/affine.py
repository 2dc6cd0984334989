"""Whether an edit folds into a weight, read off its equations: no tensors.

An edit of `h` folds where its value is affine, with constant coefficients, in what its Linear reads; the arithmetic
itself is `peftc.folding.affine_values`, which interprets the same terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from peftc.addressing.sites import Site, WeightRef
from peftc.forms.shapes import Tokens, Weight
from peftc.planning.ir import Arithmetic, Concat, Constant, FormCall, FrozenCall, Read, SiteEdit, Term

Side = Literal["weight", "output", "input"]
OUTPUT_OF = {"ffn": "down", "attn": "o", "self": "o", "cross": "o"}  # sub-layer -> the Linear that computes its h


@dataclass(frozen=True)
class FoldTarget:
    """The parameters that an edit folds into.

    side "weight": equations of w and b alone. "output": the value of h becomes the Linear's output, so W' = value's matrix.
    "input": the edit changes what the Linear reads, so W' = W · value's matrix. `bias` is None where there is none yet.
    """

    side: Side
    site: Site
    weight: WeightRef | None
    bias: WeightRef | None


@dataclass(eq=False)
class NotAffine(Exception):
    """`reason`: why a term does not fold, naming the sub-expression; `term`: that sub-expression."""

    reason: str
    term: Term


def fold_target(placed: SiteEdit, sites: Mapping[str, Site]) -> FoldTarget | str:
    """What the edit folds into, or the reason why there is no such Linear. `sites`: by path."""
    states = {assign.state for assign in placed.assigns}
    site = placed.site
    if states <= {"w", "b"}:
        return _target("weight", site)
    if states <= {"h", "w", "b"} and is_linear(site):
        return _target("output", site)
    if states == {"h"} and site.steps[-1][0] == "hidden":
        return _sibling("input", sites, _parent(site.path), "down")
    if states == {"z"} and site.steps[-1][0] == "ffn":
        return _sibling("input", sites, site.path, "down")
    if states == {"h"} and site.steps[-1][0] in OUTPUT_OF:
        return _sublayer(site, sites)
    return f"`{min(states - {'w', 'b'})}` of `{site.path}` is not the output of a Linear"


def fold_reason(
    placed: SiteEdit,
    sites: Mapping[str, Site],
    tied: Collection[Collection[str]] = (),
    overlaps: Collection[Collection[str]] = (),
    own: Collection[str] = (),
    elsewhere: Iterable[Sequence[str]] = (),
) -> str | None:
    """None where the edit folds exactly at its site, else why not.

    Args: dotted names of parameters. `tied`: those that are one parameter; `overlaps`: those that share memory; `own`: those
    that the same edit folds into at other sites of the module; `elsewhere`: a parameter, and the modules that compute with it beside its
    own.
    """
    if tasks := next((one.tasks for one in placed.instances if one.tasks), ()):
        return f"it has parameters for each task ({', '.join(tasks)}), and a weight is one for all"
    target = fold_target(placed, sites)
    if isinstance(target, str):
        return _first_reason(placed, placed.site.states.keys()) or target
    reason = _first_reason(placed, linear_states(target, placed.site))
    return (
        reason
        or _called_again(target)
        or _elsewhere(target, tied, own, "is tied to")
        or _elsewhere(target, overlaps, own, "shares memory with")
        or _repeated(target, overlaps)
        or _read_elsewhere(target, elsewhere)
    )


def affine_reason(term: Term, linear: Collection[str]) -> str | None:
    """None where `term` is affine with constant coefficients in the states named in `linear`, else why not."""
    try:
        depends(term, linear)
    except NotAffine as found:
        return found.reason
    return None


def linear_states(target: FoldTarget, site: Site) -> frozenset[str]:
    """The states at the edit's site that are linear in what the folded Linear reads."""
    if target.side == "input":
        return frozenset({"h"} if site.steps[-1][0] == "hidden" else {"z"})
    return frozenset({"h", "x"} if site.path == target.site.path else {"h"})


def is_linear(site: Site) -> bool:
    """A site that multiplies its x by a weight (out, in) of its own and gives the result as h."""
    weight, x, h = (site.states.get(name) for name in ("w", "x", "h"))
    if weight is None or x is None or h is None or not isinstance(weight.shape, Weight):
        return False
    return (x.shape, h.shape) == (Tokens(weight.shape.d_in), Tokens(weight.shape.d_out))


def depends(term: Term, linear: Collection[str]) -> bool:
    """Whether an affine term depends on the states in `linear` at all (else it is constant).

    Raises: NotAffine.
    """
    match term:
        case Constant():
            return False
        case Read(state=state):
            if state not in linear:
                raise NotAffine(f"`{state}` is not what the Linear reads", term)
            return True
        case FormCall(input=value):
            return _applied(term, value, linear)
        case Arithmetic(op=op, left=left, right=right):
            return _arithmetic(term, op, depends(left, linear), depends(right, linear))
        case FrozenCall(function=function):
            raise NotAffine(f"`{show_term(term)}`: the model's own `{function}` is not folded through", term)
        case Concat(shape=shape):
            what = "tokens to the input" if isinstance(shape, Tokens) else "rows to the keys and values"
            raise NotAffine(f"`{show_term(term)}` adds {what}, which no weight holds", term)


def show_term(term: Term) -> str:
    """A term in few words, for messages: `adapter(h)`, `1 - g` as `1 - scalar()`."""
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
            return f"{_grouped(left)} {op} {_grouped(right)}"
        case Concat(parts=parts):
            return f"concat({', '.join(map(show_term, parts))})"


def _applied(term: FormCall, value: Term | None, linear: Collection[str]) -> bool:
    reason = term.instance.form.affine(term.instance.args)
    if reason is not None:
        raise NotAffine(f"`{show_term(term)}`: {reason}", term)
    if value is not None and not depends(value, linear):
        raise NotAffine(f"`{show_term(term)}` reads nothing that the Linear reads", term)
    return value is not None


def _arithmetic(term: Arithmetic, op: str, left: bool, right: bool) -> bool:
    if op == "*" and left and right:
        raise NotAffine(f"`{show_term(term)}` multiplies two values that both depend on the input", term)
    if op == "/" and right:
        raise NotAffine(f"`{show_term(term)}` divides by a value that depends on the input", term)
    return left or right


def _grouped(term: Term) -> str:
    return f"({show_term(term)})" if isinstance(term, Arithmetic) else show_term(term)


def _first_reason(placed: SiteEdit, linear: Collection[str]) -> str | None:
    equations = [a for a in placed.assigns if a.state not in ("w", "b")]
    return next((r for r in (affine_reason(a.value, linear) for a in equations) if r), None)


def _target(side: Side, site: Site) -> FoldTarget:
    weight, bias = site.states.get("w"), site.states.get("b")
    return FoldTarget(side, site, weight.weight if weight else None, bias.weight if bias else None)


def _sibling(side: Side, sites: Mapping[str, Site], parent: str, name: str) -> FoldTarget | str:
    found = sites.get(f"{parent}.{name}")
    if found is None or not is_linear(found):
        return f"`{parent}` has no single Linear `{name}`"
    return _target(side, found)


def _sublayer(site: Site, sites: Mapping[str, Site]) -> FoldTarget | str:
    found = sites.get(site.states["h"].linear)
    if found is None or not is_linear(found):
        return f"`h` of `{site.path}` is not simply the output of `{OUTPUT_OF[site.steps[-1][0]]}`"
    return _target("output", found)


def _called_again(target: FoldTarget) -> str | None:
    calls = target.site.calls
    if target.side == "weight" or calls == 1:
        return None
    return f"`{target.site.module}` is called {calls} times, and the edit is at one of these calls: a fold would change all"


def _repeated(target: FoldTarget, overlaps: Collection[Collection[str]]) -> str | None:
    """A parameter that shares memory with itself is a group alone."""
    alone = {name for group in overlaps if len(group) == 1 for name in group}
    repeated = sorted(parameter_names(target) & alone)
    if not repeated:
        return None
    return f"entries of `{repeated[0]}` are in the same place in memory, as in an expanded tensor: a fold would change both"


def _elsewhere(target: FoldTarget, groups: Collection[Collection[str]], own: Collection[str], what: str) -> str | None:
    mine = parameter_names(target)
    for group in groups:
        others = sorted(set(group) - mine - set(own))
        if mine & set(group) and others:
            return f"`{min(mine & set(group))}` {what} `{others[0]}`: a fold would change both uses"
    return None


def _read_elsewhere(target: FoldTarget, elsewhere: Iterable[Sequence[str]]) -> str | None:
    for name, reader, *_ in elsewhere:
        if name in parameter_names(target):
            who = f"`{reader}` computes" if reader else "the model's own code computes"
            return f"{who} with `{name}`, too: a fold would change both uses"
    return None


def parameter_names(target: FoldTarget) -> frozenset[str]:
    """The dotted names of the weight and the bias."""
    return frozenset(
        f"{ref.module}.{ref.attribute}".lstrip(".") for ref in (target.weight, target.bias) if ref is not None
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
