"""Equations after resolution at one site: typed, named arguments gone, every form an `Instance`.

The planner makes it, and identity, folding and rewriting read it. Sub-expressions bound by `let` are the same object
wherever they are used: an interpreter memoises by `id`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from peftc.addressing.sites import Site
from peftc.forms.registry import Args, Count, Dims, Form
from peftc.forms.shapes import Shape
from peftc.syntax import ast


@dataclass(frozen=True, eq=False)
class FormInstance:
    """A form with its arguments at a place: one set of parameters.

    `key` is unique within its edit at its site ("adapter", "adapter_2"). `owner` is None for parameters of this site alone,
    else the name under which several sites share them, or the common part of them ("prefix.encoder.self", or the name of a
    `shared` let); then `index` is this site's number among them and `dims.sites` their number. `tasks`: those that have
    parameters of their own each; what a form has in common besides is common to them, too.
    """

    key: str
    form: Form
    args: Args
    dims: Dims
    owner: str | None = None
    index: int = 0
    tasks: tuple[str, ...] = ()

    @property
    def has_site_parameters(self) -> bool:
        """Whether the site has parameters of its own."""
        return self.owner is None or self.form.common_count is not None

    def task_suffixes(self) -> tuple[tuple[str | None, str], ...]:
        """The tasks, and what follows the names of the parameters of each; one without where there are no tasks."""
        return tuple((task, f".tasks.{task}") for task in self.tasks) or ((None, ""),)

    def owner_of(self, task: str | None) -> str | None:
        """Where all that is trained is in common, each task has it once."""
        if self.owner is None or task is None:
            return self.owner
        trains = self.has_site_parameters and not self.form.apart and self.form.count(self.args, self.dims).trained
        return self.owner if trains else f"{self.owner}.tasks.{task}"

    @property
    def all_tasks_owner(self) -> str | None:
        """The name of what all tasks have in common, where each of them has a common part of its own besides."""
        return None if self.owner is None or self.form.all_count is None else f"{self.owner}.all"

    def owners(self) -> list[str]:
        """The names of all that the sites have in common."""
        names = [*(self.owner_of(task) for task, _ in self.task_suffixes()), self.all_tasks_owner]
        return list(dict.fromkeys(name for name in names if name is not None))

    def common_count(self, owner: str) -> Count:
        """The parameters of that part of what they have in common."""
        form = self.form
        return ((form.all_count if owner == self.all_tasks_owner else form.common_count) or form.count)(
            self.args, self.dims
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TypedTerm:
    shape: Shape
    source: ast.Expr  # what the user wrote, for messages and spans


@dataclass(frozen=True, eq=False)
class Read(TypedTerm):
    """The present value of a state at the site."""

    state: str


@dataclass(frozen=True, eq=False)
class Constant(TypedTerm):
    value: float


@dataclass(frozen=True, eq=False)
class FormCall(TypedTerm):
    """A form applied to its input, and to a second one where it takes two; a form without an input has `input` None."""

    instance: FormInstance
    input: Term | None
    second: Term | None = None

    @property
    def inputs(self) -> tuple[Term, ...]:
        """What it is applied to."""
        return tuple(term for term in (self.input, self.second) if term is not None)


@dataclass(frozen=True, eq=False)
class FrozenCall(TypedTerm):
    """A frozen sub-module of the site applied to a value: `norm(h + res)`."""

    function: str
    module: str  # dotted name in the model
    input: Term


@dataclass(frozen=True, eq=False)
class Arithmetic(TypedTerm):
    op: Literal["+", "-", "*", "/"]
    left: Term
    right: Term


@dataclass(frozen=True, eq=False)
class Concat(TypedTerm):
    """Keys and values joined along the tokens, in this order; exactly one part is the state `kv` itself."""

    parts: tuple[Term, ...]


Term = Read | Constant | FormCall | FrozenCall | Arithmetic | Concat


@dataclass(frozen=True, eq=False)
class Assign:
    """`state = value`; `h += f` has become `h = h + f`."""

    state: str
    value: Term
    source: ast.Equation


@dataclass(frozen=True, eq=False)
class SiteEdit:
    """One edit at one site. `lets`: (i, term) is computed once, just before equation i. `of`: the site whose parameters
    these are, where it is another one of the same module.
    """

    edit: str
    site: Site
    assigns: tuple[Assign, ...]
    instances: tuple[FormInstance, ...] = field(default=())
    lets: tuple[tuple[int, Term], ...] = ()
    parameter_site: Site | None = None

    @property
    def owner_path(self) -> str:
        """The path of the site under which its parameters are saved."""
        return (self.parameter_site or self.site).path

    @property
    def modules(self) -> list[str]:
        """The dotted names of the site's module, at all its uses."""
        home = self.parameter_site or self.site
        return [home.module, *(site.module for site in home.shared_with)]

    def uses(self) -> Iterator[SiteEdit]:
        """The edit at each site of the module."""
        yield self
        for site in self.site.shared_with:
            yield _moved(self, site)


def subterms(term: Term) -> Iterator[Term]:
    """A term and all terms in it."""
    yield term
    match term:
        case FormCall(inputs=values):
            for value in values:
                yield from subterms(value)
        case FrozenCall(input=value):
            yield from subterms(value)
        case Arithmetic(left=left, right=right):
            yield from subterms(left)
            yield from subterms(right)
        case Concat(parts=terms):
            for part in terms:
                yield from subterms(part)
        case _:
            pass


def _moved(placed: SiteEdit, site: Site) -> SiteEdit:
    """The edit with the same parameters at another site of the module, where it applies the frozen modules of that one."""
    memory: dict[int, Term] = {}

    def moved(term: Term) -> Term:
        if id(term) not in memory:
            memory[id(term)] = _rebuilt(term, moved, site)
        return memory[id(term)]

    assigns = tuple(replace(assign, value=moved(assign.value)) for assign in placed.assigns)
    lets = tuple((i, moved(term)) for i, term in placed.lets)
    return replace(placed, site=site, assigns=assigns, lets=lets, parameter_site=placed.parameter_site or placed.site)


def _rebuilt(term: Term, moved: Callable[[Term], Term], site: Site) -> Term:
    match term:
        case FormCall(input=value, second=second) if value is not None:
            return replace(term, input=moved(value), second=None if second is None else moved(second))
        case FrozenCall(function=function, input=value):
            return replace(term, module=site.frozen_modules[function], input=moved(value))
        case Arithmetic(left=left, right=right):
            return replace(term, left=moved(left), right=moved(right))
        case Concat(parts=parts):
            return replace(term, parts=tuple(map(moved, parts)))
        case _:
            return term
