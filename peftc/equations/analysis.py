"""The equation of a form at a place: the type of each part, and what else follows from the rows of
its primitives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from peftc.equations.bindings import (
    add_pruning,
    calls_of_layers,
    check_absent,
    check_second,
    is_value_of,
    mean_over_sites,
    name_tensor,
    read_below,
    write_out,
)
from peftc.equations.operands import Operands
from peftc.equations.products import Products
from peftc.equations.transforms.places import check_places, selects
from peftc.equations.values import (
    Budget,
    FormError,
    Number,
    Pruning,
    Selection,
    SiteNumbers,
    Type,
    Value,
    real,
    shown,
    type_of,
)
from peftc.equations.words import (
    BUDGET,
    BUFFER,
    CHOICE,
    INITIAL_VALUES,
    KEPT,
    NONE,
    OUT,
    OVER_SITES,
    PRUNED,
    SCATTER,
    SELECTION,
    TAIL,
    criterion_of,
    frozen_parameters,
    function_of,
    input_help,
    is_choice_of_numbers,
    optional_inputs_of,
    owner_of,
)
from peftc.forms.form import DISTRIBUTIONS, Args
from peftc.forms.shapes import KeyValue, Rows, Scalar, Shape, Vector, Weight
from peftc.syntax import ast
from peftc.syntax.numbers import COMPARISONS
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import names_in, walk

LOSS = "loss_"  # begins the names of terms of the loss
_MOST_ENTRIES = 2**32  # of a parameter


@dataclass
class Place(Operands):
    """A form with its arguments at a place."""

    heads_first: frozenset[str] = frozenset()  # inputs, and `out`, that have their heads before their tokens
    writes_pair: bool = False  # of keys and values
    is_written_out: bool = False  # whether parts of the text stand for other expressions
    saved: dict[str, ast.Expr] | None = None  # the tensors of the form that is saved in its place
    losses: dict[str, ast.Expr] = field(default_factory=dict[str, ast.Expr])  # terms of the loss
    mean_losses: set[str] = field(default_factory=set[str])  # those that are means over sites, not sums
    code: dict[object, Any] = field(default_factory=dict[object, Any])  # the functions that compute it

    @property
    def value(self) -> Value:
        """The value of the form."""
        assert self.result is not None
        value = self.operand(self.result)
        if isinstance(value, Value):
            return value
        message = f"the value of `{self.form.name}` is the number {shown(value)}: it has no parameter and no input"
        raise FormError("P301", message, self.result)

    @property
    def flops(self) -> int:
        """The floating-point operations of one token, each part of the equation computed once."""
        lines = [self.product[1], *self.products.lets.values(), *self.layer_values]
        parts = {id(part) for line in lines for part in walk(line)}
        return sum(cost for part, cost in self.costs.items() if part in parts)

    @cached_property
    def products(self) -> Products:
        """The equation with its products in order."""
        return Products(self)

    @cached_property
    def product(self) -> tuple[float, ast.Expr]:
        """The value as a number and the expression that it multiplies, as code computes them."""
        assert self.result is not None
        return self.products.factored(self.result)

    def read(self) -> Place:
        """Reads the lines of the form in order. Raises: FormError."""
        for line in self.form.body:
            if not self.holds(line.condition):
                if isinstance(line, ast.Parameter):
                    self.absent.add(line.name)
                check_absent(self, line)
                continue
            match line:
                case ast.Require(left, op, right):
                    self._require(line, left, op, right)
                case ast.Parameter(name):
                    self._check_once(line, name)
                    sizes = tuple(map(self.size, line.sizes))
                    if prod(sizes) > _MOST_ENTRIES:
                        message = f"`{name}` is {Type(sizes)}, {prod(sizes):,} numbers, more than any weight has"
                        raise FormError("P318", message, line)
                    if line.value == ast.Name(name) and name in self.numbers:
                        self.values[id(line.value)] = self.numbers[name]  # the argument of that name
                    self._check_initial(line, sizes)
                    self.parameters[name], self.sizes[name] = line, sizes
                    name_tensor(self, line)
                case ast.Let(name, value):
                    self._check_once(line, name)
                    self.lets[name] = self._written_out(value)
                case ast.Save(call):
                    if self.saved is not None:
                        raise FormError("P111", "the conditions of two lines `save` hold here", line)
                    values = {k.name: self._written_out(k.value) for k in call.kwargs}
                    self.saved = {n: value for n, value in values.items() if isinstance(self.operand(value), Value)}
                case ast.Equation(target, value=value) if target.startswith(LOSS):
                    self._add_loss(line, target.removeprefix(LOSS), self._written_out(value))
                case ast.Equation(target, value=value):
                    if self.result is not None:
                        self._raise_twice(line, target)
                    self.result = self._written_out(value)
        for call in self._calls(PRUNED):
            add_pruning(self, call)
        if self.result is None:
            raise FormError("P319", "no condition of its values holds here", self.form)
        read_below(self, self._parts)
        check_places(self, self._parts)
        self.value  # noqa: B018  # raises what has no meaning
        self.product  # noqa: B018  # known before an edit is made: it may be nested too deeply
        _ = self.layer_values, self.selection, self.pruning
        return self

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """The tensors that a command fills."""
        return tuple(name for name, line in self.parameters.items() if line.value == ast.Name(BUFFER))

    @cached_property
    def budget(self) -> Budget | None:
        """The parameter of which training gives up entries."""
        for call in self._calls(BUDGET):
            name, *numbers = call.args
            assert isinstance(name, ast.Name)
            return Budget(name.id, *(real(self.number(number), number) for number in numbers))  # pyright: ignore[reportArgumentType]  # as its rule says
        return None

    @cached_property
    def pruning(self) -> Pruning | None:
        """The parameter of which the largest entries are left."""
        for call in self._calls(PRUNED):
            name, _, entries = call.args
            assert isinstance(name, ast.Name)
            self._check_sums(call, prod(self.sizes[name.id]))
            fills = self.result is not None and is_value_of(self, self.result, PRUNED)
            return Pruning(name.id, call, self.size(entries), fills)
        return None

    @cached_property
    def selection(self) -> Selection | None:
        """The values at selected places. Raises: FormError."""
        calls = [call for call in dict.fromkeys(self._calls(SCATTER)) if selects(self, call)]
        if len(calls) > 1:
            message = f"`{print_expression(calls[0])}` is another selection, and a form has one"
            raise FormError("P111", message, calls[1])
        for call in calls:
            values, places, n = call.args
            name = next(one for one in names_in(values) if one in self.sizes)
            assert isinstance(places, ast.Name)
            line, own = self.parameters[places.id], self.parameters[name]
            units = self.size(n)
            self._check_sums(call, units)
            fills = self.result is not None and is_value_of(self, self.result, SCATTER)
            dimension = own.sizes.index(line.sizes[0])
            return Selection(name, places.id, criterion_of(line), dimension, units, bool(line.scope), fills)
        return None

    def _check_sums(self, call: ast.Call, units: int) -> None:
        """Raises: FormError P318 if the text sums up others over the sites than it selects from."""
        for other in self._calls(OVER_SITES):
            if self.number(other.args[0]) != units:
                text = f"`{print_expression(call)}` has {units} of a site"
                raise FormError("P318", f"{text}, and `{print_expression(other)}` sums up others", other)

    @property
    def _parts(self) -> list[ast.Expr]:
        """The parts that the text names, and the value."""
        return [*self.lets.values(), *([] if self.result is None else [self.result])]

    @cached_property
    def layer_calls(self) -> tuple[ast.Call, ...]:
        """The calls of `below` and `history`."""
        return calls_of_layers(self._parts)

    @cached_property
    def layer_values(self) -> tuple[ast.Expr, ...]:
        """What the sites above read of this one, by these calls."""
        return tuple(self.products.whole(call.args[0]) for call in self.layer_calls)

    def _calls(self, function: str) -> Iterator[ast.Call]:
        return (call for call in self._all_calls if call.function == function)

    @cached_property
    def _all_calls(self) -> tuple[ast.Call, ...]:
        """The calls in the lines that hold, once all are read."""
        lines = self._parts
        lines += [size for parameter in self.parameters.values() for size in parameter.sizes]
        return tuple(part for line in lines for part in walk(line) if isinstance(part, ast.Call))

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The names of tensors that are saved, and have no gradient."""
        lines = self.parameters.items()
        places = (name for name, line in lines if criterion_of(line) or is_choice_of_numbers(line))
        return (*self.copies, *self.buffers, *places, *self.frozen, *(() if self.pruning is None else (KEPT, PRUNED)))

    @cached_property
    def frozen(self) -> list[str]:
        """The parameters that no gradient reaches."""
        return [name for name in frozen_parameters(self.form) if name in self.parameters]

    def _add_loss(self, line: ast.Equation, name: str, value: ast.Expr) -> None:
        """Raises: FormError if a term of the loss is not one number of the parameters."""
        if (mean := mean_over_sites(value)) is not None:
            self.mean_losses.add(name)
            value = mean
        operand = self.operand(value)
        if not isinstance(operand, Value) or operand.varies or operand.type.entries != 1:
            what = operand.type if isinstance(operand, Value) else shown(operand)
            raise FormError("P301", f"a term of the loss is one number of the parameters, here {what}", value)
        if name in self.losses:
            self._raise_twice(line, f"{LOSS}{name}")
        self.losses[name] = value

    def holds(self, condition: ast.Condition | None) -> bool:
        """Whether a line is there. Raises: FormError."""
        if condition is None:
            return True
        name = condition.left.id if isinstance(condition.left, ast.Name) else ""
        if name in self.sizes or name in self.absent or name in self.inputs:
            right = condition.right
            wanted = right.value if isinstance(right, ast.Boolean) else right != ast.Name(NONE)
            return (name not in self.absent) == (wanted == (condition.op != "!="))
        left = self.argument(condition.left)
        if condition.right is None:
            return bool(left) and left != NONE
        right = self.argument(condition.right)
        if condition.op not in ("==", "!="):
            left, right = real(left, condition.left), real(right, condition.right)
        return COMPARISONS[condition.op](left, right)

    def _written_out(self, node: ast.Expr) -> ast.Expr:
        """An expression with `sum(i in n, …)` and `initial(…)` as what they stand for."""
        return write_out(self, node) if self.is_written_out else node

    def _check_once(self, line: ast.Parameter | ast.Let, name: str) -> None:
        if name in self.sizes or name in self.lets:
            self._raise_twice(line, name)

    def _raise_twice(self, line: ast.Node, name: str) -> None:
        raise FormError("P111", f"two lines define `{name}`, and the conditions of both hold here", line)

    def _require(self, line: ast.Require, left: ast.Expr, op: str, right: ast.Expr) -> None:
        a, b = self.argument(left), self.argument(right)
        if NONE in (a, b) and op not in ("==", "!="):
            return  # an argument that is not given
        if op not in ("==", "!="):
            a, b = real(a, left), real(b, right)
        if not COMPARISONS[op](a, b):
            texts = [
                f"`{print_expression(side)}` is {shown(value)}"
                for side, value in ((left, a), (right, b))
                if not isinstance(side, ast.Number) and side != ast.Name(NONE)
            ]
            if isinstance(left, ast.Name) and right == ast.Name(NONE):
                raise self._presence(line, left.id, op)
            text = f"`{self.form.name}` requires {print_expression(left)} {op} {print_expression(right)}"
            is_bound = op in ("<=", "<", ">=", ">") and isinstance(left, ast.Name) and left.id in self.numbers
            help_ = f"use {print_expression(left)} {op} {shown(b)}" if is_bound else None
            raise FormError("P317", f"{text}: {' and '.join(texts)}", line, help_)

    def _presence(self, line: ast.Require, name: str, op: str) -> FormError:
        """P317 for an argument that must be there, or must not."""
        condition = line.condition
        where = "" if condition is None else f" if {print_expression(condition.left)}"
        if condition is not None and condition.right is not None:
            where += f" {condition.op} {print_expression(condition.right)}"
        if op == "==":
            return FormError("P317", f"`{self.form.name}` takes no `{name}`{where}", line, f"leave out `{name}`")
        return FormError("P317", f"`{self.form.name}` needs `{name}`{where}", line, f"add `{name}=…`")

    def _check_initial(self, line: ast.Parameter, sizes: tuple[int, ...]) -> None:
        """Raises: FormError P318 if a first value has other entries than its parameter."""
        node = line.value
        name = node.id if isinstance(node, ast.Name) else node.function if isinstance(node, ast.Call) else ""
        if name in INITIAL_VALUES and (isinstance(node, ast.Call) or name not in self.numbers):
            least = DISTRIBUTIONS.get(name, 0)
            if len(sizes) < least:
                wanted = "a matrix" if least == 2 else "one with sizes"
                message = f"`{name}` is a first value of {wanted}, and `{line.name}` is {Type(sizes)}"
                raise FormError("P318", message, node)
            for part in node.args if isinstance(node, ast.Call) and name != SELECTION else ():
                if name in (CHOICE, TAIL):
                    self.size(part)
                elif real(self.number(part), part) < 0:
                    raise FormError("P106", f"`{print_expression(part)}` is a deviation or a bound, and below 0", part)
            return
        if others := [name for name in self._names(node) if name in self.sizes]:
            message = f"a first value is computed from numbers and weights of the base, not from `{others[0]}`"
            raise FormError("P318", message, node)
        value = self.operand(node)
        if not isinstance(value, Value):
            real(value, node)
        elif value.type.batch or [n for n in value.type.size if n != 1] != [n for n in sizes if n != 1]:
            message = f"`{line.name}` is {Type(sizes)}, and its first value `{print_expression(node)}` is {value.type}"
            raise FormError("P318", message, node)

    def _names(self, node: ast.Expr) -> set[str]:
        """The names in an expression, and in the parts that it names."""
        names = set(names_in(node))
        return names.union(*(self._names(self.lets[name]) for name in names & self.lets.keys()))


def place_of(
    form: ast.Form,
    inputs: tuple[str, ...],
    args: Args,
    shapes: Sequence[Shape | None],
    numbers_of_site: SiteNumbers = SiteNumbers(),  # noqa: B008  # a tuple
    is_written_out: bool = False,
) -> Place:
    """A form at a place. Raises: FormError if its equation has no meaning there.

    Args:
        shapes: of the state that is written, and of the inputs.
        numbers_of_site: what the equation knows of its site besides.
        is_written_out: whether parts of the text stand for other expressions.
    """
    types: dict[str, Type] = {}
    names = dict(zip((OUT, *inputs), shapes, strict=False))
    for name, shape in names.items():
        if shape is None or (name == OUT and isinstance(shape, KeyValue)):
            continue
        if (type_ := type_of(shape)) is None:
            message = f"{owner_of(name)} is {shape}: the equation takes hidden states, a weight or a vector"
            raise FormError("P310", message, form, input_help(name) if shape == Scalar() else None)
        types[name] = type_
    if len(inputs) > 1:
        check_second(form, inputs, shapes)
    optional = optional_inputs_of(form)
    present = tuple(name for name in inputs if names[name] is not None or name not in optional)
    target = shapes[0]
    if isinstance(target, Weight | Vector):
        types.setdefault("w" if isinstance(target, Weight) else "b", types[OUT])
    numbers: dict[str, Number] = {}
    heads_first = frozenset(name for name, shape in names.items() if isinstance(shape, Rows))
    place = Place(form, numbers, types, present, heads_first=heads_first, writes_pair=isinstance(target, KeyValue))
    place.absent |= set(inputs) - set(present)
    place.pair = target if isinstance(target, KeyValue) else None
    place.is_written_out = is_written_out
    place.numbers_of_site = numbers_of_site
    widest_in, widest_out = numbers_of_site.widest
    place.widest = {OUT: widest_out, **({inputs[0]: widest_in} if inputs else {})}
    for param in form.params:
        value = args.get(param.name)
        if param.name in inputs:
            continue
        if function_of(param) is not None:
            assert isinstance(param.default, ast.Call)
            numbers[param.name] = value[1] if isinstance(value, tuple) else place.argument(*param.default.args)
        elif isinstance(value, bool | int | float | str):
            numbers[param.name] = value
        elif param.default is not None:
            numbers[param.name] = place.argument(param.default)
    return place.read()
