"""What the planner knows of a functional form. No torch in here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from peftc.diagnostics import Related
from peftc.diagnostics.record import record
from peftc.forms.shapes import Shape, Tokens, entries

ArgumentValue = int | float | bool | str | None | tuple[str, int]  # ("mlp", 800) is `reparam=mlp(800)`
Args = Mapping[str, ArgumentValue]
Scope = Literal["group", "edit"]
FirstValue = float | str | tuple[str, float]
# The distributions of first values, with the fewest dimensions that each needs.
DISTRIBUTIONS = {"normal": 0, "truncated": 0, "uniform": 0, "kaiming": 1, "orthogonal": 2, "identity": 2, "signs": 0}
ModulePath = str | type  # "package.module:Class", imported when it is needed, or a class


@record()
class Argument:
    """An argument of a form, as a call in a spec passes it by name.

    Attributes:
        name: as a call writes it.
        type: what a call may pass: a whole number, a number, `true` or `false`, one of the words
            `choices`, or a call such as `mlp(800)` of one of the functions `choices`.
        doc: what it is, with its unit.
        default: its value in a call that does not pass it.
        required: whether each call passes it.
        low, high: the range of a number.
        open: which ends of the range are excluded.
        choices: the words of a choice, or the functions of a call.
    """

    name: str
    type: Literal["int", "float", "bool", "choice", "call"]
    doc: str
    default: ArgumentValue = None
    required: bool = False
    low: float | None = None
    high: float | None = None
    open: Literal["", "low", "high", "both"] = ""
    choices: tuple[str, ...] = ()


@record()
class Parameter:
    """A tensor of a form at a place, like a line `param A[r, d(x)] = kaiming` of a text.

    Attributes:
        name: its name in the module, and in a saved adapter.
        size: its dimensions; None if the form does not have it here.
        first: its first value: a number, or a distribution by its name in texts, such as
            "kaiming", or with a number, such as ("normal", 0.02).
        scope: who has it: each "site"; the sites together, as "common"; or all "tasks" together.
        role: "trained", and saved; "training" if only trained, because a simpler form is saved;
            "saved" if it is of that form, and not trained; "state" if it is saved, and changes in
            other ways than by gradients; "fixed" if it is drawn from the argument `seed`, and
            neither trained nor saved.
        dtype: of one that has another dtype than the form, such as "int64": it is not counted.
    """

    name: str
    size: tuple[int, ...] | None
    first: FirstValue = 0.0
    scope: Literal["site", "common", "tasks"] = "site"
    role: Literal["trained", "training", "saved", "state", "fixed"] = "trained"
    dtype: str = ""

    @property
    def entries(self) -> int:
        return 0 if self.size is None else prod(self.size)


class Spot(NamedTuple):
    """One of the sites that have parameters in common.

    Attributes:
        layer: the path of its layer; empty outside of layers.
        part: its path in the layer.
        d_in, d_out: the features that it reads and writes; 0 where there are none.
        home: the layer that its module is in, or the module.
        shapes: of the state that it writes, and of its inputs; empty where they are not known.
    """

    layer: str
    part: str
    d_in: int
    d_out: int
    home: str = ""
    shapes: tuple[Shape | None, ...] = ()


@record()
class Dims:
    """What a form sees of the place where it stands.

    Attributes:
        input: the shape of its first input; None for a form without one.
        target: the shape of the state that the equation writes.
        d_model: the width of the residual stream.
        sites: how many sites have its parameters in common.
        widest: the most features that any of them reads, and writes.
        spread: how many entries (`Form.entries`) the sites before this one have, and all of them.
        positions: how many tokens the model takes, where it says so.
        spots: the sites that have parameters in common, in their order.
        index: which of them this is.
        depth: how many layers its stack has.
        runs: how often one forward runs its layer.
        second: the shape of its second input, where it has one.
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
    """Parameters, as numbers of scalars: with a gradient while training, and in the saved adapter."""

    trained: int
    stored: int


@dataclass(eq=False)
class PlacementError(Exception):
    """A form that cannot stand at a place; the planner makes a diagnostic of it, with its span.

    Attributes:
        code: of the diagnostic: P310 for a state that the form cannot read or write, P301 for
            shapes that do not fit, P312 for arguments that contradict each other, and others that
            `peftc explain` describes.
        message: what is wrong, on one line.
        argument: the argument that it is about, or "input" or "second"; None: the whole call.
        notes, help: further lines.
        related: other places of the spec.
    """

    code: str
    message: str
    argument: str | None = None
    notes: tuple[str, ...] = ()
    help: str | None = None
    related: tuple[Related, ...] = ()


class Form:
    """A functional form whose equation is code: the base class of forms that no text can say.

    A subclass says what the planner asks, without torch; its `module` computes, and is imported
    only when a model is changed. `peftc.forms.register` makes its name known to specs. One object
    of the class serves all calls: `args` are the arguments of a call, with all defaults, and
    `dims` the place where it stands.

    A form that has a text (`form NAME(…) { … }`) answers the same questions from its equation.

    Attributes:
        name: how specs call it.
        version: a number to raise when saved adapters would mean something else. An adapter of
            another version is refused.
        equation: what it computes, on one line, for the documentation.
        paper: its source.
        inputs: the names of its inputs: none, one, or two of which the second may be left out.
        arguments: the arguments of a call.
        module: the `FormModule` that computes it, as "package.module:Class", or the class itself.
        common_module: the `FormModule` with the parameters of scope "common", if sites have
            modules of their own beside it.
        tasks_module: the `FormModule` with the parameters of scope "tasks".
        mixes_shapes: whether sites of different shapes can have parameters in common.
        separates_tasks: whether each task of an edit `per task` has common parameters of its own,
            even if its sites have others.
        value_arguments: the names of arguments on which the value alone depends: calls of one `shared`
            may differ in them.
        training_arguments: the names of arguments that act while training alone: with any value of
            theirs, a saved adapter means the same.
        has_base_dtype: whether its tensors have the dtype of the base also where that is float16 or
            bfloat16; without it they have float32 there.
    """

    name: str = ""
    version: int = 1
    equation: str = ""
    paper: str = ""
    inputs: tuple[str, ...] = ("x",)
    arguments: tuple[Argument, ...] = ()
    module: ModulePath = ""
    common_module: ModulePath = ""
    tasks_module: ModulePath = ""
    has_base_dtype: bool = False
    mixes_shapes: bool = False
    separates_tasks: bool = False
    value_arguments: frozenset[str] = frozenset()
    training_arguments: frozenset[str] = frozenset({"dropout", "init"})
    text: str | None = None  # of a form that has one

    # What a subclass defines

    def shape(self, args: Args, dims: Dims) -> Shape:
        """The shape of its value. Raises: PlacementError where it cannot stand."""
        raise NotImplementedError(f"{type(self).__name__} does not define `shape`")

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        """Its tensors at a place. `FormModule` creates them, and counts follow from them."""
        return ()

    def initial(self, args: Args, dims: Dims) -> float | None:
        """The number that each entry of its value equals before training; None: not one number.

        An edit that starts as the base is one with 0 where the value is added, 1 where it is a
        factor.
        """
        return None

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        """Why its value is not affine in the input, as a phrase; None if it is.

        An affine form folds into a weight; its module has `FormModule.fold`.
        """
        return f"`{self.name}` does not say that it is affine"

    def shifts(self, args: Args, dims: Dims) -> bool:
        """Whether its value may differ from zero where the input is zero, so that folding needs a bias."""
        return bool(args.get("bias"))

    def keeps_base(self, args: Args, dims: Dims) -> bool:
        """Whether its value is its input before training, bit for bit, where that is a value of the base."""
        return False

    def rank(self, args: Args, dims: Dims) -> int | None:
        """The most rank of the change that it makes to a weight; None: any."""
        return None

    def common(self, args: Args) -> Scope | None:
        """Who has parameters in common: the sites of an attention "group", those of the "edit", or none."""
        return None

    def saved_as(self, args: Args) -> str | None:
        """The name of the simpler form that is saved in its place (`FormModule.collapsed`)."""
        return None

    def saved_arguments(self, args: Args) -> Mapping[str, str]:
        """The arguments of a call that the simpler form takes, too, with their names there."""
        return {argument.name: argument.name for argument in self.arguments}

    counts_rows: bool = False  # whether positions of the text count the rows that it joins to keys
    joins_tokens: bool = False  # whether it has a mean over the tokens of a call

    def selects_positions(self, args: Args) -> bool:
        """Whether it acts at some positions, of which its stack tells it."""
        return False

    def entries(self, args: Args, dims: Dims) -> int:
        """The entries of a site among which sites select together (`Dims.spread`)."""
        return entries(dims.target)

    def changed_entries(self, args: Args, dims: Dims) -> int | None:
        """How many entries of its value are not zero in the end, over all sites that select together; None: any."""
        return None

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        """What it computes of `source`, in short."""
        return f"{self.name}({source})"

    def module_of(self, args: Args) -> ModulePath:
        """The `FormModule` of a call, if it depends on the arguments."""
        return self.module

    # What follows

    @property
    def takes_input(self) -> bool:
        return bool(self.inputs)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """The inputs that a call may leave out."""
        return self.inputs[1:]

    @property
    def has_common_part(self) -> bool:
        """Whether sites have modules of their own, beside what they have in common."""
        return bool(self.common_module)

    def flops(self, args: Args, dims: Dims) -> int | None:
        """The floating-point operations of one token, or of a weight, where they are known."""
        return None

    def common_sizes(self, args: Args, dims: Dims) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The sizes of the parameters that sites have in common, by name: all sites need the same."""
        return ()

    def count(self, args: Args, dims: Dims) -> Count:
        """The parameters of a site; of all sites, where they have all of them in common."""
        return self._count(args, dims, {"site"} if self.has_common_part else {"site", "common"})

    def common_count(self, args: Args, dims: Dims) -> Count:
        """The parameters that sites have in common."""
        return self._count(args, dims, {"common"})

    def tasks_count(self, args: Args, dims: Dims) -> Count:
        """The parameters that all tasks have in common."""
        return self._count(args, dims, {"tasks"})

    def _count(self, args: Args, dims: Dims, scopes: set[str]) -> Count:
        parameters = [p for p in self.parameters(args, dims) if p.scope in scopes]
        trained = sum(p.entries for p in parameters if p.role in ("trained", "training"))
        saved = [p for p in parameters if p.role in ("trained", "saved", "state") and not p.dtype]
        return Count(trained, sum(p.entries for p in saved))

    def argument(self, name: str) -> Argument | None:
        return next((argument for argument in self.arguments if argument.name == name), None)

    def fill(self, args: Args) -> Args:
        """All arguments: those of a call, and the defaults of the others."""
        return {a.name: args.get(a.name, a.default) for a in self.arguments}

    def read_features(self, dims: Dims) -> int:
        """d of the hidden states (batch, tokens, d) that it reads. Raises: PlacementError P310 for others."""
        return self._features(dims.input, "reads", "input")

    def written_features(self, dims: Dims) -> int:
        """d of the hidden states (batch, tokens, d) that it writes. Raises: PlacementError P310 for others."""
        return self._features(dims.target, "writes", None)

    def _features(self, shape: Shape | None, verb: str, argument: str | None) -> int:
        if isinstance(shape, Tokens):
            return shape.d
        other = "nothing" if shape is None else f"{shape}"
        message = f"`{self.name}` {verb} hidden states [batch, tokens, d], here it has {other}"
        raise PlacementError("P310", message, argument)

    def __deepcopy__(self, memo: object) -> Form:
        return self
