"""The planner's IR: the typed equations of one edit at one site, and arithmetic on their values.

Names are resolved to states, `let` is gone, and every form has a `FormInstance`. A sub-expression
bound by `let` is one object wherever it is used, so interpreters memoise by `id`. Identity checks,
folding and rewriting read this IR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

from peftc.addressing.renaming import with_changes
from peftc.addressing.sites import Site, State
from peftc.forms.form import Args, Count, Dims, Form
from peftc.forms.shapes import Ids, KeyValue, Scalar, Shape, Tokens, Vector, Weight
from peftc.syntax import ast


@dataclass(frozen=True, eq=False)
class FormInstance:
    """A form with its arguments: one set of parameters at each site whose edit has it.

    Edits at sites of one kind may have one instance in common; `SiteEdit` says whose it is.
    """

    key: str  # unique in its edit at its site: "adapter", "adapter_2"
    form: Form
    args: Args
    dims: Dims
    owner: str | None = None  # the name under which sites share the parameters, or their common part
    index: int = 0  # of this site among the `dims.sites` that share them
    tasks: tuple[str, ...] = ()  # those with parameters of their own
    are_adapters: bool = False  # whether the tasks are attached adapters, which share nothing

    @property
    def has_site_parameters(self) -> bool:
        return self.owner is None or self.form.has_common_part

    @cached_property
    def selects_positions(self) -> bool:
        """Whether the form acts at some positions, which its stack tells it."""
        return self.form.selects_positions(self.form.fill(self.args))

    def task_suffixes(self) -> tuple[tuple[str | None, str], ...]:
        """Each task with the suffix of its parameter names; (None, "") without tasks."""
        return tuple((task, f".tasks.{task}") for task in self.tasks) or ((None, ""),)

    def owner_of(self, task: str | None) -> str | None:
        """The owner of what a task shares: its own owner if all trained parameters are shared."""
        if self.owner is None or task is None:
            return self.owner
        if self.are_adapters:
            return f"{self.owner}.tasks.{task}"
        trains = (
            self.has_site_parameters and not self.form.separates_tasks and self.form.count(self.args, self.dims).trained
        )
        return self.owner if trains else f"{self.owner}.tasks.{task}"

    @property
    def all_tasks_owner(self) -> str | None:
        """The owner of what all tasks share, if each task also has a common part of its own."""
        return None if self.owner is None or not self.form.tasks_module else f"{self.owner}.all"

    def owners(self) -> list[str]:
        names = [*(self.owner_of(task) for task, _ in self.task_suffixes()), self.all_tasks_owner]
        return list(dict.fromkeys(name for name in names if name is not None))

    def common_count(self, owner: str) -> Count:
        form = self.form
        if owner == self.all_tasks_owner:
            return form.tasks_count(self.args, self.dims)
        return (form.common_count if form.has_common_part else form.count)(self.args, self.dims)


@dataclass(frozen=True, eq=False, kw_only=True)
class TypedTerm:
    shape: Shape
    source: ast.Expr  # what the user wrote, for messages and spans


@dataclass(frozen=True, eq=False)
class Read(TypedTerm):
    """The current value of a state."""

    state: str


@dataclass(frozen=True, eq=False)
class Constant(TypedTerm):
    value: float


@dataclass(frozen=True, eq=False)
class FormCall(TypedTerm):
    """A form applied to no, one or two inputs."""

    instance: FormInstance
    input: Term | None
    second: Term | None = None

    @property
    def inputs(self) -> tuple[Term, ...]:
        return tuple(term for term in (self.input, self.second) if term is not None)


@dataclass(frozen=True, eq=False)
class FrozenCall(TypedTerm):
    """A frozen sub-module of the site applied to a value: `norm(h + res)`."""

    function: str
    module: str  # dotted name in the model
    input: Term


@dataclass(frozen=True, eq=False)
class Feature(TypedTerm):
    """One feature of a value for each token: `g[0]` of `let g = router(x, n=2)`."""

    input: Term
    index: int


@dataclass(frozen=True, eq=False)
class Arithmetic(TypedTerm):
    op: Literal["+", "-", "*", "/"]
    left: Term
    right: Term


@dataclass(frozen=True, eq=False)
class Concat(TypedTerm):
    """Rows joined along the tokens, in this order; exactly one part is the state itself. Or the
    weights of Linears, one above the other.
    """

    parts: tuple[Term, ...]


Term = Read | Constant | FormCall | FrozenCall | Feature | Arithmetic | Concat


@dataclass(frozen=True, eq=False)
class Assign:
    """`state = value`; `h += f` is lowered to `h = h + f`."""

    state: str
    value: Term
    source: ast.Equation
    text: ast.Equation | None = None  # as the spec has it, where values differ by layer


@dataclass(frozen=True, eq=False)
class SiteEdit:
    """One edit at one site, or at one of `count` sites that are alike."""

    edit: str
    site: Site
    assigns: tuple[Assign, ...]
    instances: tuple[FormInstance, ...] = ()
    lets: tuple[tuple[int, Term], ...] = ()  # (i, term): computed once, just before equation i
    parameter_site: Site | None = None  # the site that owns the parameters, if it is another of the module
    count: int = 1
    # the weights of other Linears that it reads, by `weight(k)`; their modules relative to its own
    weights: Mapping[str, State] = field(default_factory=dict[str, State])

    @property
    def owner_path(self) -> str:
        """The path of the site under which the parameters are saved."""
        return (self.parameter_site or self.site).path

    @property
    def modules(self) -> list[str]:
        """The dotted names of the site's module, at all its uses."""
        return [site.module for site in (self.parameter_site or self.site).uses]

    def uses(self) -> Iterator[SiteEdit]:
        """The edit at each site of the module."""
        yield self
        for site in self.site.shared_with:
            yield _with_site(self, site)

    def reads(self) -> set[str]:
        return {term.state for term in self.terms() if isinstance(term, Read)}

    def terms(self) -> list[Term]:
        """All terms of the edit, including those of its lets."""
        roots = [*(assign.value for assign in self.assigns), *(term for _, term in self.lets)]
        return [term for root in roots for term in subterms(root)]


def children_of(term: Term) -> tuple[Term, ...]:
    """The terms directly in a term."""
    match term:
        case FormCall(inputs=children) | Concat(parts=children):
            return children
        case FrozenCall(input=value) | Feature(input=value):
            return (value,)
        case Arithmetic(left=left, right=right):
            return (left, right)
        case Read() | Constant():
            return ()


def subterms(term: Term) -> Iterator[Term]:
    """A term and all terms in it, outermost first."""
    yield term
    for child in children_of(term):
        yield from subterms(child)


def _with_site(site_edit: SiteEdit, site: Site) -> SiteEdit:
    """The edit with the same parameters at another site."""
    return replace(at_sites(site_edit)(site), parameter_site=site_edit.parameter_site or site_edit.site)


def at_sites(site_edit: SiteEdit) -> Callable[[Site], SiteEdit]:
    """The edit at another site, with the frozen modules of that site."""
    weights = site_edit.weights
    if any(isinstance(term, FrozenCall) for term in site_edit.terms()):
        return lambda site: _at_site(site_edit, with_weights(site, weights))
    return lambda site: with_changes(site_edit, site=with_weights(site, weights), count=1)


def with_weights(site: Site, weights: Mapping[str, State]) -> Site:
    """A site with the weights of Linears around it among its states."""
    if not weights:
        return site
    own = dict(site.states)
    for name, state in weights.items():
        assert state.weight is not None
        module = ".".join(filter(None, (site.module, state.weight.module)))
        own[name] = with_changes(state, weight=with_changes(state.weight, module=module))
    return with_changes(site, states=own)


def _at_site(site_edit: SiteEdit, site: Site) -> SiteEdit:
    @cache  # by identity: what a `let` binds stays one object
    def copy(term: Term) -> Term:
        match term:
            case FormCall(input=value, second=second) if value is not None:
                return replace(term, input=copy(value), second=None if second is None else copy(second))
            case FrozenCall(function=function, input=value):
                return replace(term, module=site.frozen_modules[function], input=copy(value))
            case Feature(input=value):
                return replace(term, input=copy(value))
            case Arithmetic(left=left, right=right):
                return replace(term, left=copy(left), right=copy(right))
            case Concat(parts=parts):
                return replace(term, parts=tuple(map(copy, parts)))
            case _:
                return term

    assigns = tuple(replace(assign, value=copy(assign.value)) for assign in site_edit.assigns)
    lets = tuple((i, copy(term)) for i, term in site_edit.lets)
    return replace(site_edit, site=site, assigns=assigns, lets=lets, count=1)


def combine_shapes(op: str, left: Shape, right: Shape) -> Shape | None:
    """The shape of `left op right`; None where they do not go together.

    A scalar goes with every shape: one for each example only with hidden states, one for each row
    only with as many rows of keys and values. A vector [d] goes with hidden states [..., d], and so
    does one feature for each token, [..., 1]. Keys and values are pairs and can only be scaled. Any
    other shape goes with itself.
    """
    if isinstance(left, Ids) or isinstance(right, Ids):
        return None
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        if left.rows and right.rows and left.rows != right.rows:
            return None
        return Scalar(left.per_example or right.per_example, left.rows or right.rows)
    if isinstance(left, Scalar):
        divides_pair = op == "/" and isinstance(right, KeyValue)
        return right if _scales(op, left, right) and not divides_pair else None
    if isinstance(right, Scalar):
        return left if _scales(op, right, left) else None
    match left, right:
        case (Tokens(d=d) as tokens, Vector(e)) | (Vector(e), Tokens(d=d) as tokens) if d == e:
            return tokens
        case (Tokens(of=of) as tokens, Tokens(1, other)) | (Tokens(1, other), Tokens(of=of) as tokens) if of == other:
            return tokens
        case _:
            return left if left == right and not isinstance(left, KeyValue) else None


def _scales(op: str, scalar: Scalar, other: Shape) -> bool:
    if isinstance(other, KeyValue):
        return op in ("*", "/") and scalar.rows in (0, other.rows)
    # A weight serves the whole batch, so it has no value for each example.
    return not scalar.rows and not (scalar.per_example and isinstance(other, Weight | Vector))
