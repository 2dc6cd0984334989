"""What stands for other expressions: `sum(i in n, A[i] @ x)`, written out where n is known,
`initial(B @ A)`, the value with the first values of its parameters, and `rows(table, ids)`; and for
values at other sites, `below(s, first)` and `history(x)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from peftc.diagnostics import Diagnostic
from peftc.equations.operands import Operands
from peftc.equations.rules import Operand
from peftc.equations.values import TOP, FormError, Type, Value, real, shown
from peftc.equations.words import BELOW, HISTORY, KEPT, LAYER, NONE, PRUNED, SITE, number_of, optional_inputs_of
from peftc.forms.form import Dims, PlacementError
from peftc.forms.shapes import Rows, Shape, Tokens, Vector, Weight
from peftc.syntax import ast
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import map_children, walk

INITIAL = "initial"
SITES = "sites"  # `mean(x, sites)`
BINDERS: Mapping[str, Literal["+", "*", "@"]] = {"sum": "+", "product": "*"}  # of matrices, the product is `@`
_MOST_TERMS, _MOST_PARTS = 256, 20_000


def write_out(place: Operands, node: ast.Expr, numbers: Mapping[str, int] | None = None) -> ast.Expr:
    """An expression in which each sum and product over a number is its terms.

    Args:
        numbers: what the bound names around it are.

    Raises: FormError if a number of terms is not known, or there are too many.
    """
    numbers = numbers or {}
    match node:
        case ast.Name(name, span=span) if name in numbers:
            return ast.Number(numbers[name], span=span)
        case ast.Call(function, (ast.Binding(name, count), term)) if function in BINDERS:
            terms = _terms(place, node, name, write_out(place, count, numbers), term, numbers)
            return _joined(place, function, terms, node)
        case ast.Call("rows", (table, ids)):
            transposed = ast.Call("t", (write_out(place, table, numbers),), (), span=node.span)
            return ast.Binary("@", transposed, write_out(place, ids, numbers), span=node.span)
        case ast.Call(function, (value,)) if function == HISTORY:
            count = ast.Number(place.numbers_of_site.site + 1, span=node.span)
            return replace(node, args=(write_out(place, value, numbers), count))
        case ast.Call(function, (value,)) if function == INITIAL:
            return _initial(place, write_out(place, value, numbers), node)
        case _:
            return map_children(node, lambda part: write_out(place, part, numbers))


def is_written_out(node: ast.Expr) -> bool:
    """Whether a part of a text stands for another expression."""
    is_call = isinstance(node, ast.Call) and (
        node.function in (INITIAL, HISTORY) or (node.function == "rows" and len(node.args) == 2)
    )
    return is_call or isinstance(node, ast.Binding)


def name_tensor(place: Operands, line: ast.Parameter) -> None:
    """Names the tensor of a parameter by the number of the sites that have it in common."""
    if not number_of(line):
        return
    place.derived_nodes.append(name := ast.Name(line.scope, span=line.name_span))
    number = place.argument(name)
    if number != NONE and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        message = f"`{line.name}` is `per {line.scope}`, a whole number from 0 on or `none`, here {shown(number)}"
        raise FormError("P318", message, line)
    if number != NONE:
        place.tensors[line.name] = f"{line.name}_{number}"


def is_value_of(place: Operands, node: ast.Expr, function: str) -> bool:
    """Whether a value is that of a function with other dimensions, or times a number."""
    match node:
        case ast.Name(name) if name in place.lets:
            return is_value_of(place, place.lets[name], function)
        case ast.Call("reshape" | "t", (value, *_)):
            return is_value_of(place, value, function)
        case ast.Binary("*", number, value) if not isinstance(place.operand(number), Value):
            return is_value_of(place, value, function)
        case _:
            return isinstance(node, ast.Call) and node.function == function


def add_pruning(place: Operands, call: ast.Call) -> None:
    """Adds the states of `pruned(v, z, n)`: what is kept, and whether the rest is pruned."""
    name = call.args[0].id if isinstance(call.args[0], ast.Name) else ""
    for state, sizes, scope in ((KEPT, place.sizes[name], ""), (PRUNED, (), "edit")):
        place.sizes[state] = sizes
        place.parameters[state] = replace(place.parameters[name], name=state, fixed=True, scope=scope)


def mean_over_sites(value: ast.Expr) -> ast.Expr | None:
    """The term of the loss of which `mean(x, sites)` is the mean over all sites."""
    match value:
        case ast.Call("mean", (term, ast.Name(name)), ()) if name == SITES:
            return term
        case _:
            return None


def initial_name(parameter: str) -> str:
    """The name of the copy of a parameter that keeps its first value."""
    return f"{parameter}_{INITIAL}"


def _initial(place: Operands, value: ast.Expr, call: ast.Call) -> ast.Expr:
    """A value in which each trained parameter is its copy with the first value."""
    match value:
        case ast.Name(name, span=span) if name in place.parameters and not place.parameters[name].fixed:
            if initial_name(name) in (*place.sizes, *place.lets, *place.numbers) and name not in place.copies.values():
                message = (
                    f"`{print_expression(call)}` keeps the first value as `{initial_name(name)}`, which is another"
                )
                raise FormError("P111", message, call, "use another name")
            place.copies[initial_name(name)] = name
            place.sizes[initial_name(name)] = place.sizes[name]
            place.parameters[initial_name(name)] = replace(place.parameters[name], name=initial_name(name))
            return ast.Name(initial_name(name), span=span)
        case ast.Name(name) if name in place.lets:
            return _initial(place, place.lets[name], call)
        case _:
            return map_children(value, lambda part: _initial(place, part, call))


def _terms(
    place: Operands, node: ast.Call, name: str, count: ast.Expr, term: ast.Expr, numbers: Mapping[str, int]
) -> list[ast.Expr]:
    place.derived_nodes.append(count)  # what the place knows of it is by its id
    number = place.size(count)
    if number > _MOST_TERMS or number * sum(1 for _ in walk(term)) > _MOST_PARTS:
        message = f"`{print_expression(node)}` has {number:,} terms, more than are written out"
        raise FormError("P318", message, count, help_="use a matrix, over which one product sums")
    return [write_out(place, term, {**numbers, name: i}) for i in range(number)]


def _joined(place: Operands, function: str, terms: list[ast.Expr], node: ast.Call) -> ast.Expr:
    op = BINDERS[function]
    if op == "*":  # a sum is known by its parts, some of which `below` may not have told yet
        first = place.operand(terms[0])
        is_matrix = isinstance(first, Value) and not first.type.batch and len(first.type.size) == 2
        op = "@" if is_matrix else op
    place.derived_nodes += terms
    joined, *others = reversed(terms) if op == "@" else terms
    for term in others:
        left, right = (term, joined) if op == "@" else (joined, term)
        joined = ast.Binary(op, left, right, span=node.span)
    return joined


def check_second(form: ast.Form, inputs: tuple[str, ...], shapes: Sequence[Shape | None]) -> None:
    """Raises: FormError for a second input that is missing, of other tokens, or beside a weight."""
    at = next(param for param in form.params if param.name == inputs[1])
    target, first, second = shapes
    if second is None and inputs[1] in optional_inputs_of(form):
        return
    if second is None:
        raise FormError("P108", f"`{form.name}` reads `{inputs[0]}` and `{inputs[1]}`: give both", at)
    if isinstance(target, Weight | Vector):
        raise FormError("P310", "a form of two inputs reads hidden states, and this edit writes a weight", at)
    tokens = [shape.of for shape in (first, second) if isinstance(shape, Tokens | Rows)]
    if len(set(tokens)) > 1:
        raise FormError("P301", f"its inputs are of different tokens: {first} and {second}", at)


# Values at other sites


def layer_call_errors(form: ast.Form, call: ast.Call) -> Iterator[Diagnostic]:
    """The errors of `below(s, first)` and `history(x)` that need no place."""
    lets = [line.name for line in form.body if isinstance(line, ast.Let)]
    if call.function == BELOW:
        is_right = len(call.args) == 2 and isinstance(call.args[0], ast.Name) and call.args[0].id in lets
        what = "`below(s, first)` is the value of `let s = …` at the site below, and `first` at the first one"
    else:
        is_right, what = len(call.args) == 1, "`history(x)` is x at the sites up to this one"
    if not is_right or call.kwargs:
        yield Diagnostic("P108", what, call.span)
    scopes = (line for line in form.body if isinstance(line, ast.Parameter) and line.scope == "edit")
    for line in scopes:
        message = f"`{call.function}` reads values in one stack of layers, and `{line.name}` is of all stacks"
        yield Diagnostic("P023", message, line.name_span, help="write `per group`")


def calls_of_layers(lines: Sequence[ast.Expr]) -> tuple[ast.Call, ...]:
    """The calls of `below` and `history`, in their order, those that are alike once."""
    parts = (part for line in lines for part in walk(line))
    return tuple(
        dict.fromkeys(part for part in parts if isinstance(part, ast.Call) and part.function in (BELOW, HISTORY))
    )


def check_sites(form: str, dims: Dims, has_top: bool) -> None:
    """Raises: PlacementError P315 if sites are not one above the other, or end too low.

    Args:
        has_top: whether the form asks for the last site.
    """
    if not dims.spots:
        return
    stack, _, last = dims.spots[-1].layer.rpartition("[")
    if last and not dims.depth:
        what = "its places are not alike, and those of a stack have a part in common already"
        raise PlacementError("P315", f"`{form}` cannot be `shared`: {what}", help=f"write `{form}(…)` in the equation")
    if dims.runs > 1:
        what = f"the layers of `{stack}`, or modules in them, run {dims.runs} times"
        raise PlacementError("P315", f"{what}: `{form}` has one place for each")
    if has_top and (not last or int(last[:-1]) != dims.depth - 1):
        where = f"its last place is layer {last[:-1]} of {dims.depth}" if last else "it has no place in a layer"
        help_ = f"let the selector reach `layer[{dims.depth - 1}]`" if last else "write it at `layer[*]`"
        raise PlacementError("P315", f"`{form}` ends at the last layer of its stack, and {where}", help=help_)


def check_absent(place: Operands, line: ast.Require | ast.Parameter | ast.Let | ast.Equation | ast.Save) -> None:
    """Raises: FormError if a line that only some sites have reads values of other sites."""
    if not isinstance(line, ast.Let | ast.Equation) or line.condition is None:
        return
    sides = [side for side in (line.condition.left, line.condition.right) if side is not None]
    calls = calls_of_layers([line.value])
    if calls and _functions_behind(place, sides) & {SITE, LAYER, TOP}:
        text = print_expression(calls[0])
        message = f"only some sites have this line, and `{text}` reads values of all"
        raise FormError("P105", message, calls[0], f"write `let NAME = {text}` without `if`")


def _functions_behind(place: Operands, nodes: Sequence[ast.Expr]) -> set[str]:
    """The functions in expressions, and in the parts that they name."""
    parts = [part for node in nodes for part in walk(node)]
    names = [part.id for part in parts if isinstance(part, ast.Name) and part.id in place.lets]
    own = {part.function for part in parts if isinstance(part, ast.Call)}
    return own.union(*(_functions_behind(place, [place.lets[name]]) for name in names))


def read_below(place: Operands, lines: Sequence[ast.Expr]) -> None:
    """Finds out what `below(s, first)` stands for: a value like that of s where it is `first`.

    Raises: FormError if s is not one value for each token, or is another one above.
    """
    calls = [part for line in lines for part in walk(line) if isinstance(part, ast.Call) and part.function == BELOW]
    firsts = {id(call): _for_tokens(place, place.operand(call.args[1]), call) for call in calls}
    lowest = replace(place, values={**place.values, **firsts}, costs={}, derived_nodes=[])
    values = {id(call): _like_lowest(lowest, call) for call in calls}
    place.values.update(values)
    for call in calls:
        above, (part, _) = values[id(call)].type, call.args
        value = place.operand(part)
        if not isinstance(value, Value) or value.type != above:
            now = value.type if isinstance(value, Value) else shown(value)
            message = f"`{print_expression(part)}` is {above} at the first site, and {now} above"
            raise FormError("P301", message, call)


def _for_tokens(place: Operands, first: Operand, call: ast.Call) -> Value:
    """A first value as one for each token, with as many dimensions as what the form reads."""
    if isinstance(first, Value) and first.type.batch:
        return first
    number = None if isinstance(first, Value) else float(real(first, call.args[1]))
    size = first.type.size if isinstance(first, Value) else ()
    missing = len(place.types[place.inputs[0]].size) - len(size) if place.inputs else 0
    return Value(Type((*[1] * missing, *size), "tokens"), number, varies=True, shifted=True)


def _like_lowest(lowest: Operands, call: ast.Call) -> Value:
    """A value like that of a part at the lowest site."""
    part = call.args[0]
    value = lowest.operand(part)
    if not isinstance(value, Value) or value.type.batch != "tokens":
        what = value.type if isinstance(value, Value) else f"the number {shown(value)}"
        message = f"`{print_expression(part)}` is {what}; expected one value for each token, which the sites above read"
        raise FormError("P301", message, call)
    return Value(value.type, varies=True, reason="it depends on the states of all layers", shifted=True)
