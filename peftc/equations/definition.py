"""From the text of a form to its row: what the planner asks is answered by the equation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any

from peftc.diagnostics import Related, Source, Span
from peftc.equations.analysis import Place, place_of
from peftc.equations.primitives import ACTIVATIONS
from peftc.equations.values import FormError, shape_of
from peftc.forms.arguments import DTYPE
from peftc.forms.projected import SEED
from peftc.forms.registry import Args, AtInit, Count, Dims, Form, Illegal, Param, Scope
from peftc.forms.shapes import Ids, Shape, Tokens
from peftc.syntax import ast
from peftc.syntax.printer import print_expression, print_statement
from peftc.syntax.vocabulary import STATES
from peftc.syntax.walk import names_in

MODULE = "peftc.equations.equation_module:EquationModule"
RESULT = "f"
SCOPES = ("site", "group", "edit")


def inputs_of(form: ast.Form) -> tuple[str, ...]:
    """The parameters of a form that are inputs: those that have the name of a state."""
    return tuple(param.name for param in form.params if param.name in STATES and param.default is None)


class Definition:
    """A form of a text. Its methods are the functions of the row, see `registry.Form`."""

    def __init__(self, form: ast.Form, source: Source | None) -> None:
        self.form, self.source = form, source
        self.inputs = inputs_of(form)
        self.place = lru_cache(maxsize=256)(self._place)

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def text(self) -> str:
        """The form as a spec has it, with its comments."""
        return print_statement(self.form)

    def flops(self, args: Args, dims: Dims) -> int:
        """The floating-point operations of one token, or of a weight."""
        return self.at(args, dims).flops

    def scopes_of(self, part: str) -> frozenset[str]:
        """The scopes of the parameters that a module has: that of a "site", or the "common" one."""
        if not self._has_both_scopes():
            return frozenset(SCOPES)
        return frozenset({"site"} if part == "site" else {"group", "edit"})

    def __reduce__(self) -> Any:
        return (Definition, (self.form, self.source))

    def __reduce_row__(self) -> Any:
        return (form_row, (self.form, self.source))

    def row(self) -> Form:
        lines = [line for line in self.form.body if isinstance(line, ast.Equation)]
        equation = f"{RESULT} = {print_expression(lines[-1].value)}" if lines else ""
        notes = " ".join(line.lstrip("# ") for line in self.form.leading if line)
        return Form(
            name=self.form.name,
            equation=equation,
            takes_input=bool(self.inputs),
            params=(*self.params(), DTYPE),
            shape=self.shape,
            count=self.count,
            at_init=_ask_at_a_place,
            affine=_ask_at_a_place,
            module=MODULE,
            paper=notes,
            common=self.common,
            common_count=self.common_count if self._has_both_scopes() else None,
            apart=self._has_both_scopes() and any(not line.fixed and line.scope for line in self._parameters()),
            rank=self.rank,
            second=self.inputs[1] if len(self.inputs) > 1 else "",
            definition=self,
        )

    # Arguments

    def params(self) -> Iterator[Param]:
        """The arguments of a call. Those that sizes are computed from are whole numbers."""
        whole = self._names_in_sizes()
        for param in self.form.params:
            if param.name in self.inputs:
                continue
            doc = f"an argument of `{self.form.name}`"
            match param.default:
                case None:
                    kind = "int" if param.name in whole else "float"
                    yield Param(param.name, kind, doc, required=True, low=1 if kind == "int" else None)
                case ast.Boolean(value):
                    yield Param(param.name, "bool", doc, value)
                case ast.Name(name) if name in ACTIVATIONS:
                    yield Param(param.name, "choice", doc, name, choices=tuple(ACTIVATIONS))
                case ast.Number() as number:
                    value = Place(self.form, {}, {}, ()).number(number)
                    assert not isinstance(value, str)
                    is_whole = param.name in whole
                    yield Param(param.name, "int" if is_whole else "float", doc, value if is_whole else float(value))
                case value:
                    yield Param(param.name, "float", f"{doc}; without it {print_expression(value)}")
        if any(isinstance(line, ast.Parameter) and line.fixed for line in self.form.body):
            yield SEED

    def _names_in_sizes(self) -> set[str]:
        lets = {line.name: line.value for line in self.form.body if isinstance(line, ast.Let)}
        sizes = [size for line in self.form.body if isinstance(line, ast.Parameter) for size in line.sizes]
        names = {name for size in sizes for name in names_in(size)}
        while more := {inner for name in names & lets.keys() for inner in names_in(lets[name])} - names:
            names |= more
        return names

    # What the planner asks

    def _place(self, args: tuple[tuple[str, object], ...], dims: Dims) -> Place:
        return place_of(self.form, self.inputs, dict(args), dims)  # pyright: ignore[reportArgumentType]

    def at(self, args: Args, dims: Dims) -> Place:
        """The form at a place. Raises: Illegal, with the part of the text that has no meaning."""
        try:
            return self.place(tuple(sorted(args.items(), key=lambda item: item[0])), dims)
        except FormError as error:
            raise self.illegal(error) from None
        except RecursionError:
            raise self.illegal(FormError("P018", "its equation is nested too deeply", self.form)) from None

    def illegal(self, error: FormError) -> Illegal:
        related = (Related(error.node.span, self.source, error.message),) if self.source is not None else ()
        message = f"`{self.form.name}` does not fit: {error.message}"
        return Illegal(error.code, message, help=error.help, related=related)

    def shape(self, args: Args, dims: Dims) -> Shape:
        place = self.at(args, dims)
        value = place.value
        tokens = dims.input.of if isinstance(dims.input, Tokens) else ""
        shape = shape_of(value.type, "" if isinstance(dims.input, Ids) else tokens)
        node = place.result or self.form
        if shape is None:
            raise self.illegal(FormError("P301", f"its value is {value.type}, and no state is", node))
        return shape

    def count(self, args: Args, dims: Dims) -> Count:
        place = self.at(args, dims)
        total = self._total(place, {"site"}) if self._has_both_scopes() else self._total(place, set(SCOPES))
        return Count(total, total)

    def common_count(self, args: Args, dims: Dims) -> Count:
        total = self._total(self.at(args, dims), {"group", "edit"})
        return Count(total, total)

    def _total(self, place: Place, scopes: Iterable[str]) -> int:
        parameters = place.parameters.items()
        return sum(prod(place.sizes[n]) for n, line in parameters if not line.fixed and scope_of(line) in scopes)

    def _parameters(self) -> list[ast.Parameter]:
        return [line for line in self.form.body if isinstance(line, ast.Parameter)]

    def _scopes(self) -> set[str]:
        return set(map(scope_of, self._parameters()))

    def _has_both_scopes(self) -> bool:
        return "site" in self._scopes() and len(self._scopes()) > 1

    def common(self, args: Args) -> Scope | None:
        scopes = self._scopes()
        return "edit" if "edit" in scopes else "group" if "group" in scopes else None

    def initial(self, args: Args, dims: Dims) -> AtInit:
        return self.at(args, dims).value.initial

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        value = self.at(args, dims).value
        if len(self.inputs) > 1:
            return "it reads two states"
        return value.reason if value.varies or not self.inputs else "its value does not depend on its input"

    def common_sizes(self, args: Args, dims: Dims) -> tuple[object, ...]:
        """The sizes of the parameters that sites share, by name: all sites need the same."""
        place = self.at(args, dims)
        return tuple((n, place.sizes[n]) for n, line in place.parameters.items() if scope_of(line) != "site")

    def shifts(self, args: Args, dims: Dims) -> bool:
        return self.at(args, dims).value.shifted

    def rank(self, args: Args, dims: Dims) -> int | None:
        value = self.at(args, dims).value
        size = value.type.size
        bounds = [value.rank] if value.rank is not None else []
        if len(size) == 2 and not value.type.batch:
            bounds += size
        return min(bounds, default=None)


def _ask_at_a_place(args: Args) -> None:
    """Of an equation, sizes may decide: `Form.initial` and `Form.not_affine` have them."""
    raise TypeError("what a form of a text computes depends on its place")


def scope_of(parameter: ast.Parameter) -> str:
    return parameter.scope or "site"


_ROWS: dict[tuple[ast.Form, str, Span], Form] = {}


def form_row(form: ast.Form, source: Source | None = None) -> Form:
    """The row of a form in a text: one object for a text at one place of a file."""
    own = form.origin or source
    key = (form, "" if own is None else own.path, form.span)
    if key not in _ROWS:
        if len(_ROWS) > 1_000:
            _ROWS.clear()
        _ROWS[key] = Definition(form, own).row()
    return _ROWS[key]
