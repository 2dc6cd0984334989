"""The Linear into which an edit folds, and whether its equations are affine. No tensors.

An edit of `h` folds if its value is affine, with constant coefficients, in what its Linear reads.
`peftc.folding.module_folds` interprets the same terms to compute that weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from peftc.addressing.sites import INPUT, Site, WeightRef, parameter_name
from peftc.forms.shapes import Ids, Tokens, Weight
from peftc.planning.ir import Arithmetic, Concat, Constant, Feature, FormCall, FrozenCall, Read, SiteEdit, Term
from peftc.syntax.printer import print_expression


class SitesByPath(Protocol):
    """Sites by path: those of a table, or a mapping."""

    def get(self, path: str, /) -> Site | None: ...


Matrix = Literal["zero", "identity", "other"]
Side = Literal["weight", "output", "input"]
OUTPUT_LINEAR = {"ffn": "down", "attn": "o", "self": "o", "cross": "o"}  # sub-layer -> the Linear that computes its h


@dataclass(eq=False)
class NotAffine(Exception):
    reason: str  # why `term`, a sub-expression, does not fold
    term: Term


@dataclass(frozen=True)
class AffineStructure:
    """An affine value A h + B x + c: the kind of A, and whether B and c exist."""

    matrix: Matrix = "zero"
    input: bool = False
    constant: bool = False

    def __add__(self, other: AffineStructure) -> AffineStructure:
        one, two = self.matrix, other.matrix
        matrix: Matrix = two if one == "zero" else one if two == "zero" else "other"
        return AffineStructure(matrix, self.input or other.input, self.constant or other.constant)

    def mapped(self, constant: bool = False) -> AffineStructure:
        """After a linear map, which may add a constant of its own."""
        matrix: Matrix = "zero" if self.matrix == "zero" else "other"
        return AffineStructure(matrix, self.input, self.constant or constant)

    @property
    def varies(self) -> bool:
        return self.matrix != "zero" or self.input


ONE_ADAPTER = "save one alone, `peftc.save(model, directory, name=…)`, and `peftc.load` it onto the base"


def of_adapters(names: Iterable[str]) -> str:
    """Why what is attached is no single change."""
    return f"it has parameters for each attached adapter ({', '.join(names)})"


def fold_reason(
    site_edit: SiteEdit,
    sites: SitesByPath,
    tied: Collection[Collection[str]] = (),
    overlaps: Collection[Collection[str]] = (),
    edited: Collection[str] = (),
    external_reads: Iterable[Sequence[str]] = (),
) -> str | None:
    """Why an edit does not fold at its site; None if it folds exactly.

    Args: `tied`: groups of names of one parameter. `overlaps`: of parameters that share memory.
    `edited`: the parameters that the same edit folds into at all sites of the module.
    `external_reads`: a parameter, and the modules other than its own that compute with it.
    """
    if tasks := next((instance.tasks for instance in site_edit.instances if instance.tasks), ()):
        if site_edit.instances[0].are_adapters:
            return f"{of_adapters(tasks)}, and a weight is one for all; {ONE_ADAPTER}: it folds there"
        return f"it has parameters for each task ({', '.join(tasks)}), and a weight is one for all"
    target = fold_target(site_edit, sites)
    if isinstance(target, str):
        return _not_affine(site_edit, site_edit.site.states.keys()) or target
    return (
        _not_affine(site_edit, linear_states(target, site_edit.site))
        or _lacking_bias(site_edit, target)
        or _beyond_border(site_edit, target)
        or next(_other_effects(site_edit.site, target, tied, overlaps, edited, external_reads), None)
    )


def _not_affine(site_edit: SiteEdit, linear: Collection[str]) -> str | None:
    try:
        affine_structure(site_edit, linear)
    except NotAffine as error:
        return error.reason
    return None


def scales_output(site_edit: SiteEdit, target: FoldTarget) -> bool:
    """Whether an edit is affine and multiplies what a Linear has computed, its bias included."""
    try:
        value = affine_structure(site_edit, linear_states(target, site_edit.site))
    except NotAffine:
        return False
    return target.side == "output" and value.matrix != "identity"


def _lacking_bias(site_edit: SiteEdit, target: FoldTarget) -> str | None:
    """Why a fold would miss the bias, where code multiplies by a parameter itself."""
    if not target.site.bare or target.bias is not None or target.side == "weight":
        return None
    value = affine_structure(site_edit, linear_states(target, site_edit.site))
    if target.site.computed_bias and scales_output(site_edit, target):
        return "the model's code computes its bias"
    return "no parameter is added to its result" if value.constant else None


def _beyond_border(site_edit: SiteEdit, target: FoldTarget) -> str | None:
    """Why a constant that is added to what a convolution reads is not one that its bias holds."""
    place = target.site.states["x"].activation if target.side == "input" else None
    kernel = place.kernel if place is not None else None
    if kernel is None or kernel.mode != "constant" or not any(n for pair in kernel.padding for n in pair):
        return None
    value = affine_structure(site_edit, linear_states(target, site_edit.site))
    subject = f"the kernel of `{target.site.module}` reads zeros beyond the border"
    return f"{subject}, and a constant is added only inside" if value.constant else None


def _other_effects(
    site: Site,
    target: FoldTarget,
    tied: Iterable[Collection[str]],
    overlaps: Collection[Collection[str]],
    edited: Collection[str],
    external_reads: Iterable[Sequence[str]],
) -> Iterator[str]:
    """Why a fold would change more than the edit at a site does."""
    calls, names = target.site.calls, target.parameters
    if target.side != "weight" and calls != 1 and not site.is_of_every_call:
        subject = f"`{target.site.module}` is called {calls} times"
        yield f"{subject}, and the edit is at one of these calls: a fold would change all"
    if target.side != "weight" and target.site.read_besides and target.weight is not None:
        yield f"the model's code computes with `{parameter_name(target.weight)}` besides: a fold would change both uses"
    for groups, relation in ((tied, "is tied to"), (overlaps, "shares memory with")):
        for group in map(frozenset, groups):
            others = sorted(group - names - set(edited))
            if others and not group.isdisjoint(names):
                yield f"`{min(names & group)}` {relation} `{others[0]}`: a fold would change both uses"
    own = [name for group in overlaps if len(group) == 1 for name in group if name in names]
    if own:
        subject = f"entries of `{min(own)}` are in the same place in memory, as in an expanded tensor"
        yield f"{subject}: a fold would change both"
    for name, reader, *_ in external_reads:
        if name in names and not (target.side == "weight" and reader == site.root != ""):  # an edit of w acts at both
            subject = f"`{reader}` computes" if reader else "the model's own code computes"
            yield f"{subject} with `{name}`, too: a fold would change both uses"


def affine_structure(site_edit: SiteEdit, linear: Collection[str]) -> AffineStructure:
    """The value after an edit, as a function of the states `linear`. Raises: NotAffine."""
    env: dict[str, AffineStructure] = {}
    let_envs: dict[int, dict[str, AffineStructure]] = {}  # a `let` reads the states from before its equation
    value = AffineStructure("identity")
    for i, assign in enumerate(site_edit.assigns):
        let_envs |= {id(term): env.copy() for before, term in site_edit.lets if before == i}
        if assign.state not in ("w", "b"):
            value = env[assign.state] = term_structure(assign.value, linear, env, let_envs)
    return value


def term_structure(
    term: Term,
    linear: Collection[str],
    env: Mapping[str, AffineStructure],
    let_envs: Mapping[int, Mapping[str, AffineStructure]],
) -> AffineStructure:
    """The structure of a term. `env` has the values of states that earlier equations assigned."""
    env = let_envs.get(id(term), env)

    def structure(inner: Term) -> AffineStructure:
        return term_structure(inner, linear, env, let_envs)

    match term:
        case Constant():
            return AffineStructure(constant=True)
        case Read(state=state):
            if state not in linear:
                raise NotAffine(f"`{state}` is not what the Linear reads", term)
            return env.get(state) or AffineStructure("zero" if state == "x" else "identity", input=state == "x")
        case FormCall(instance=instance, input=source):
            if (reason := instance.form.not_affine(instance.args, instance.dims)) is not None:
                raise NotAffine(f"`{show_term(term)}`: {reason}", term)
            if source is None:
                return AffineStructure(constant=True)
            value = structure(source)
            if not value.varies:
                raise NotAffine(f"`{show_term(term)}` reads nothing that the Linear reads", term)
            return value.mapped(instance.form.shifts(instance.args, instance.dims))
        case Arithmetic(left=left, right=right) if _is_broadcast(left, right):
            for side in (left, right):
                structure(side)
            raise NotAffine(f"`{show_term(term)}`: one feature for each token is not folded through", term)
        case Feature(input=value):
            structure(value)
            raise NotAffine(f"`{show_term(term)}`: one feature for each token is not folded through", term)
        case Arithmetic(op="+" | "-" as op, left=left, right=right):
            return structure(left) + (structure(right) if op == "+" else structure(right).mapped())
        case Arithmetic(op=op, left=left, right=right):
            first, second = structure(left), structure(right)
            if op == "*" and first.varies and second.varies:
                raise NotAffine(f"`{show_term(term)}` multiplies two values that both depend on the input", term)
            if op == "/" and second.varies:
                raise NotAffine(f"`{show_term(term)}` divides by a value that depends on the input", term)
            value, factor = (first, right) if first.varies else (second, left)
            return value if isinstance(factor, Constant) and factor.value == 1 else value.mapped()
        case FrozenCall(function=function):
            raise NotAffine(f"`{show_term(term)}`: the model's own `{function}` is not folded through", term)
        case Concat(shape=Weight()):
            raise NotAffine(f"`{show_term(term)}` is not what the Linear reads", term)
        case Concat(shape=shape):
            rows = "tokens to the input" if isinstance(shape, Tokens) else "rows to the keys and values"
            raise NotAffine(f"`{show_term(term)}` adds {rows}, which no weight holds", term)


def _is_broadcast(left: Term, right: Term) -> bool:
    """Whether one of two values has one feature for each token, and the other several."""
    values = (term for term in (left, right) if not isinstance(term, Constant))
    widths = {term.shape.d for term in values if isinstance(term.shape, Tokens)}
    return len(widths) > 1


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
        case Feature(input=value, index=index):
            return f"{show_term(value)}[{index}]"
        case Arithmetic(op=op, left=left, right=right):
            sides = (f"({show_term(s)})" if isinstance(s, Arithmetic) else show_term(s) for s in (left, right))
            return f" {op} ".join(sides)
        case Concat(shape=Weight(), source=source):
            return print_expression(source)
        case Concat(parts=parts):
            return f"concat({', '.join(map(show_term, parts))})"


@dataclass(frozen=True)
class FoldTarget:
    """The parameters that an edit folds into.

    side "weight": equations of w and b alone. "output": h becomes the Linear's output, so W' is the
    value's matrix. "input": the edit changes what the Linear reads, so W' = W · the value's matrix.
    """

    side: Side
    site: Site
    weight: WeightRef | None
    bias: WeightRef | None  # None if folding adds one

    @property
    def refs(self) -> list[WeightRef]:
        return [ref for ref in (self.weight, self.bias) if ref is not None]

    @property
    def parameters(self) -> frozenset[str]:
        """The dotted names of the weight and the bias."""
        return frozenset(map(parameter_name, self.refs))


def fold_target(site_edit: SiteEdit, sites: SitesByPath) -> FoldTarget | str:
    """What the edit folds into, or the reason why there is no such Linear. `sites`: by path."""
    states = {assign.state for assign in site_edit.assigns}
    site, last = site_edit.site, site_edit.site.steps[-1][0]
    if states <= {"w", "b"}:
        return _target("weight", site)
    if states <= {"h", "w", "b"} and is_linear(site):
        return _target("output", site)
    if (states, last) in (({"h"}, "hidden"), ({"z"}, "ffn")):
        ffn = site.path if last == "ffn" else site.path.rpartition(".")[0]
        down = sites.get(f"{ffn}.down")
        return _target("input", down) if down and is_linear(down) else f"`{ffn}` has no single Linear `down`"
    if states == {"h"} and last in OUTPUT_LINEAR:
        linear = sites.get(site.states["h"].linear)
        if linear and is_linear(linear):
            return _target("output", linear)
        return f"`h` of `{site.path}` is not simply the output of `{OUTPUT_LINEAR[last]}`"
    return f"`{min(states - {'w', 'b'})}` of `{site.path}` is not the output of a Linear"


def _target(side: Side, site: Site) -> FoldTarget:
    weight, bias = site.states.get("w"), site.states.get("b")
    return FoldTarget(side, site, weight.weight if weight else None, bias.weight if bias else None)


def linear_states(target: FoldTarget, site: Site) -> frozenset[str]:
    """The states at the edit's site that are linear in what the target Linear reads."""
    if target.side == "input":
        return frozenset({"h"} if site.steps[-1][0] == "hidden" else {"z"})
    return frozenset({"h", "x"} if site.path == target.site.path else {"h"})


def is_linear(site: Site) -> bool:
    """Whether the site computes h = w x, perhaps with a bias. Shapes: w (out, in)."""
    weight, x, h = (site.states.get(name) for name in ("w", "x", "h"))
    if weight is None or x is None or h is None or not isinstance(weight.shape, Weight):
        return False
    if is_table(site):
        return x.activation is not None and x.activation.node == INPUT  # else its own forward changes the ids
    return (x.shape, h.shape) == (Tokens(weight.shape.d_in), Tokens(weight.shape.d_out))


def computes_product(site: Site) -> bool:
    """Whether the site is a Linear, or stands for one: no table, and no convolution of patches."""
    place = site.states["x"].activation if is_linear(site) and not is_table(site) else None
    return place is not None and place.kernel is None


def is_table(site: Site) -> bool:
    """Whether the site is an embedding: h = wᵀ x for one-hot vectors x. Shapes: w (ids, d)."""
    weight, x, h = (site.states.get(name) for name in ("w", "x", "h"))
    if weight is None or x is None or h is None or not isinstance(weight.shape, Weight):
        return False
    return (x.shape, h.shape) == (Ids(weight.shape.d_out), Tokens(weight.shape.d_in))
