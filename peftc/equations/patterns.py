"""What an equation has in common with others: a bottleneck, parameters that may have rows, or those
of other calls of one `shared`.
"""

from __future__ import annotations

from functools import cache

from peftc.diagnostics.record import record
from peftc.equations.analysis import LOSS, Place
from peftc.equations.primitives import ACTIVATIONS, FUNCTIONS, PAPER_NAMES
from peftc.equations.values import Value
from peftc.equations.words import (
    ATTENTION,
    BUDGET,
    CROSS_LAYER,
    MEANS,
    POSITIONS,
    PRUNED,
    RANDOM,
    SCATTER,
    inputs_of,
    mean_over,
)
from peftc.syntax import ast
from peftc.syntax.walk import children, names_in, names_in_statements, values, walk

_WITH_STATE = (ATTENTION, BUDGET, POSITIONS, PRUNED, RANDOM, SCATTER, *CROSS_LAYER)
_OF_FEATURES = ("narrow", "concat")  # which act on the last dimension of hidden states


@record()
class Bottleneck:
    """factor · (U act(D x + b) + c): the parts of the text, and the name of act."""

    factor: float
    up: ast.Expr
    up_bias: ast.Expr | None
    act: str
    down: ast.Expr
    down_bias: ast.Expr | None
    of_heads: bool

    def shown(self, source: str) -> str:
        """`ReLU(x W_down) W_up`, as tables of the literature have it."""
        down, up = ("P_kᵀ", "P_v") if self.of_heads else ("W_down", "W_up")
        inner = f"{source} {down}"
        return f"{inner if self.act == 'none' else f'{PAPER_NAMES.get(self.act, self.act)}({inner})'} {up}"


def bottleneck_of(place: Place) -> Bottleneck | None:
    """The form as a bottleneck, of hidden states or in each head; None if it is none."""
    factor, node = place.product
    up = _map(place, node)
    if up is None:
        return None
    hidden, act = _without_dropout(place, up[2]), "none"
    if isinstance(hidden, ast.Call) and place.function(hidden.function) in (*ACTIVATIONS, "softmax"):
        act, hidden = place.function(hidden.function), hidden.args[0]
    down = _map(place, hidden)
    if down is None or _without_dropout(place, down[2]) != ast.Name(place.inputs[0]):
        return None
    return Bottleneck(factor, up[0], up[1], act, down[0], down[1], len(place.type_of(down[0]).size) == 3)


def _map(place: Place, node: ast.Expr) -> tuple[ast.Expr, ast.Expr | None, ast.Expr] | None:
    """M, b and v of M v + b with a matrix and a vector that are the same for all tokens."""
    bias: ast.Expr | None = None
    node = _definition(place, node)
    if isinstance(node, ast.Binary) and node.op == "+":
        product, bias = (node.left, node.right) if _varies(place, node.left) else (node.right, node.left)
        operand = place.operand(bias)
        if not isinstance(operand, Value):
            return _map(place, product) if operand == 0 else None
        if operand.varies or len(operand.type.size) != 1:
            return None
        node = _definition(place, product)
    if not (isinstance(node, ast.Binary) and node.op == "@") or _varies(place, node.left):
        return None
    source = place.type_of(node.right)
    is_state = _varies(place, node.right) and source.batch == "tokens"
    return (node.left, bias, node.right) if is_state else None


def _without_dropout(place: Place, node: ast.Expr) -> ast.Expr:
    node = _definition(place, node)
    if isinstance(node, ast.Call) and node.function == "dropout":
        return _without_dropout(place, node.args[0])
    return node


def _definition(place: Place, node: ast.Expr) -> ast.Expr:
    return place.products.lets.get(node.id, node) if isinstance(node, ast.Name) else node


def _varies(place: Place, node: ast.Expr) -> bool:
    operand = place.operand(node)
    return isinstance(operand, Value) and operand.varies


def takes_rows(place: Place) -> bool:
    """Whether the equation also holds for parameters with a first dimension of rows, which are
    aligned from the right with a state (rows, tokens, d).

    So it is for entries, last dimensions, and matrices that multiply each token.
    """
    if place.states or place.layer_calls or any(place.types[name].batch != "tokens" for name in place.inputs):
        return False
    parts = [place.product[1], *place.products.lets.values()]
    return all(_is_of_rows(place, part) for part in parts)


def _is_of_rows(place: Place, node: ast.Expr) -> bool:
    if not isinstance(place.operand(node), Value):
        return True
    match node:
        case ast.Name():
            return True
        case ast.Binary("@", left, right):
            source = place.type_of(right)
            sizes = len(place.type_of(left).size), len(source.size)
            fits = sizes in ((2, 1), (3, 2)) if source.batch == "tokens" else sizes == (2, 2) and not source.batch
            return fits and not _varies(place, left) and all(_is_of_rows(place, part) for part in (left, right))
        case ast.Call(function, args):
            over = mean_over(node)
            own, parts = (MEANS[over], args[:1]) if over else (place.function(function), args)
            of_features = own in _OF_FEATURES and bool(place.type_of(parts[0]).batch)
            return (of_features or FUNCTIONS[own].by_rows) and all(_is_of_rows(place, part) for part in parts)
        case ast.Binary() | ast.Negative() | ast.Pair():
            return all(_is_of_rows(place, part) for part in children(node))
        case _:
            return False


@cache
def value_arguments(form: ast.Form) -> frozenset[str]:
    """The arguments on which the value alone depends: not the parameters and their first values,
    what is saved, a term of the loss, or what a form keeps between its calls.

    Calls of one `shared` may differ in them.
    """
    lets = [line for line in form.body if isinstance(line, ast.Let)]
    defaults = {param.name: param.default for param in form.params}
    calls = [part for value in values(form) for part in walk(value) if isinstance(part, ast.Call)]
    todo = [name for call in calls if call.function in _WITH_STATE for name in names_in(call)]
    todo += names_in_statements(line for line in form.body if _is_of_parameters(line))
    names = set[str]()
    while todo:
        if (name := todo.pop()) not in names:
            names.add(name)
            todo += names_in_statements(let for let in lets if let.name == name)
            todo += names_in(default) if (default := defaults.get(name)) is not None else ()
    read = set(names_in_statements(line for line in form.body if isinstance(line, ast.Let | ast.Equation)))
    return frozenset(defaults) & (read - names) - set(inputs_of(form))


def _is_of_parameters(line: ast.Statement) -> bool:
    is_loss = isinstance(line, ast.Equation) and line.target.startswith(LOSS)
    return is_loss or isinstance(line, ast.Parameter | ast.Save)
