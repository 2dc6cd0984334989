"""A functional form is one row; everything that lists forms is generated from these rows. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from peftc.diagnostics import Related
from peftc.diagnostics.record import record
from peftc.forms.shapes import Shape, entries

Value = int | float | bool | str | None | tuple[str, int]  # tuple: a nested form, e.g. reparam=mlp(800) -> ("mlp", 800)
Args = Mapping[str, Value]


@record()
class Param:
    """One argument of a form. Numbers are checked against [low, high]; an end named in `open` is excluded."""

    name: str
    type: Literal["int", "float", "bool", "choice", "call"]
    doc: str
    default: Value = None
    required: bool = False
    low: float | None = None
    high: float | None = None
    open: Literal["", "low", "high", "both"] = ""
    choices: tuple[str, ...] = ()  # of a choice, or the functions of a call


class Spot(NamedTuple):
    """One of the sites that have something in common: the path of its layer and that within it ("" where there is none), and
    the features that it reads and writes (0 where there are none). `home`: the layer that its module is in, or the module.
    """

    layer: str
    part: str
    d_in: int
    d_out: int
    home: str = ""


@record()
class Dims:
    """What a form sees of the place where it stands.

    `input` is the shape of its argument (None for a form without one), `second` of a second one where there is one, `target` of the
    state that the equation writes;
    `d_model` is the width of the residual stream; `sites` how many sites share this set of parameters, and `widest` the
    largest number of features that any of them reads and writes; `spread` how many entries (`Form.entries`) the sites before
    this one have, and all of them; `positions` how many tokens the model takes, where it says so. `spots`: the sites that
    share, in their order; `index`: which of them this is; `depth`: how many layers its stack has; `runs`: how often one
    forward runs its layer.
    """

    input: Shape | None
    target: Shape
    d_model: int
    sites: int = 1
    widest: tuple[int, int] = (0, 0)
    spread: tuple[int, int] = (0, 0)
    positions: int | None = None
    spots: tuple[Spot, ...] = ()
    index: int = 0
    depth: int = 0
    runs: int = 1
    second: Shape | None = None


@record()
class Count:
    """Parameters, in numbers of scalars: with a gradient while training, and in the saved adapter."""

    trained: int
    stored: int


@dataclass(eq=False)
class Illegal(Exception):
    """Raised by `Form.shape` where the form cannot stand; the planner turns it into a diagnostic.

    `argument` names the argument (or "input", "second") to underline; None underlines the whole call.
    """

    code: str
    message: str
    argument: str | None = None
    notes: tuple[str, ...] = ()
    help: str | None = None
    related: tuple[Related, ...] = ()


@runtime_checkable
class EquationForm(Protocol):
    """A form whose row follows from its equation (`peftc.equations`)."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    def at(self, args: Args, dims: Dims) -> Any: ...
    def initial(self, args: Args, dims: Dims) -> AtInit: ...
    def passes(self, args: Args, dims: Dims) -> bool: ...
    def not_affine(self, args: Args, dims: Dims) -> str | None: ...
    def shifts(self, args: Args, dims: Dims) -> bool: ...
    def flops(self, args: Args, dims: Dims) -> int: ...
    def shown(self, source: str, args: Args, dims: Dims) -> str: ...
    def common_sizes(self, args: Args, dims: Dims) -> tuple[object, ...]: ...
    @property
    def text(self) -> str: ...
    def scopes_of(self, part: str) -> frozenset[str]: ...
    def __reduce_row__(self) -> Any: ...


# Who shares the common part of a form: the sites of an attention group, or of the edit.
Scope = Literal["group", "edit"]
AtInit = float | None  # the constant a form's value equals at initialisation (0.0: adds nothing), None: not a constant


@record()
class Form:
    """A functional form: what it computes, what it takes, what it costs, whether it folds.

    `shape` gives the shape of the result, or raises `Illegal`. `at_init` is the constant it equals at initialisation.
    `affine` is None when the value is affine in the input with constant coefficients (so that an h-edit folds), else the
    reason why not, as a phrase ("its activation relu is not linear").

    `common` says, from the arguments, who shares the common part of the form (a reparametrised prefix has one for each
    attention group, VeRA one for the edit). `common_count` counts it where a site has parameters of its own besides, which
    `count` then counts; without it the common part is everything. Of edits `per task`, each task has the common part where
    the sites have nothing of their own, or where `apart` says so; `all_count` counts what all tasks have in common besides.
    `anywhere`: it suits sites of different shapes. `entries`: those of a site that `Dims.spread` counts. `changes`: how many
    entries of its value are not zero in the end, where they are chosen, over all sites that have the choice in common.
    """

    name: str
    equation: str
    takes_input: bool
    params: tuple[Param, ...]
    shape: Callable[[Args, Dims], Shape]
    count: Callable[[Args, Dims], Count]
    at_init: Callable[[Args], AtInit]
    affine: Callable[[Args], str | None]
    module: str  # "peftc.forms.svd_module:SVD", imported only when a model is changed
    paper: str
    common: Callable[[Args], Scope | None] = field(default=lambda args: None)
    common_count: Callable[[Args, Dims], Count] | None = None
    all_count: Callable[[Args, Dims], Count] | None = None
    anywhere: bool = False
    apart: bool = False
    entries: Callable[[Args, Dims], int] = field(default=lambda args, dims: entries(dims.target))
    changes: Callable[[Args, Dims], int] | None = None
    collapses: Callable[[Args], str | None] = field(default=lambda args: None)  # the form that is saved in its place
    rank: Callable[[Args, Dims], int | None] = field(
        default=lambda args, dims: None
    )  # of the change it makes to a weight
    design: Callable[[str, Args], str] | None = (
        None  # what it computes of an input, as tables of the literature have it
    )
    picks: Callable[[Args], bool] = field(
        default=lambda args: False
    )  # acts at some positions, which its stack tells it
    second: str = ""  # what a second input is, where it may have one: `ladder(h, x)`
    definition: EquationForm | None = None  # of a form in a text, which answers for its place
    passes: bool = False  # of a Python form: at initialisation its value is its input, bit for bit, where that is the base's own weight

    def __reduce__(self) -> Any:
        if self.definition is not None:
            return self.definition.__reduce_row__()
        return (named, (self.name,))  # pickled by name: a row is code

    def initial(self, args: Args, dims: Dims) -> AtInit:
        """The constant that its value equals at initialisation, at a place."""
        return self.at_init(args) if self.definition is None else self.definition.initial(args, dims)

    def keeps_base(self, args: Args, dims: Dims) -> bool:
        """Whether its value is its input at initialisation, bit for bit, where that is the base's own weight."""
        return self.passes if self.definition is None else self.definition.passes(args, dims)

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        """Why its value is not affine in the input, at a place; None if it is."""
        return self.affine(args) if self.definition is None else self.definition.not_affine(args, dims)

    def shifts(self, args: Args, dims: Dims) -> bool:
        """Whether its value may differ from zero where the input is zero."""
        return bool(args.get("bias")) if self.definition is None else self.definition.shifts(args, dims)

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        """What it computes of `source`, in short."""
        if self.definition is not None:
            return self.definition.shown(source, self.fill(args), dims)
        return self.design(source, self.fill(args)) if self.design else f"{self.name}({source})"

    def param(self, name: str) -> Param | None:
        return next((p for p in self.params if p.name == name), None)

    def fill(self, given: Args) -> Args:
        """All arguments: those given, and the defaults of the others. The functions of a row expect every name."""
        return {p.name: given.get(p.name, p.default) for p in self.params}


PYTHON_FORMS: dict[str, Form] = {}


def register(form: Form) -> Form:
    """Adds a row; two forms of one name are a bug."""
    assert form.name not in PYTHON_FORMS, form.name
    PYTHON_FORMS[form.name] = form
    return form


def named(name: str) -> Form:
    """The row of that name. Importing this module imports the package, which registers all rows."""
    return PYTHON_FORMS[name]
