"""The words of equations beside the primitives: functions of numbers and sizes, first values,
arguments such as `none`, an activation, or what lines compare them with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peftc.equations.primitives import ACTIVATIONS
from peftc.syntax import ast
from peftc.syntax.walk import values, walk

NONE = "none"  # an argument without a value
BUFFER = "buffer"  # a first value of what a command fills
PERMUTATION = "permutation"  # a first value that is an order of entries
BUDGET = "budget"  # `budget(v, target, total, …)`: v, of which training gives up entries
OUT = "out"  # the name of the state that the equation writes, in sizes
RANDOM = "random"  # `let i = random(n)`: one of 0, 1, … n - 1, in each forward while training

# Functions of numbers, and of the shapes of inputs and of `out`, the state that is written.
NUMBERS: Mapping[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "abs": abs,
    "floor": math.floor,
    "power_of_two": lambda n: 1 << (n - 1).bit_length(),
    "root_divisor": lambda n: max(m for m in range(1, math.isqrt(n) + 1) if n % m == 0),
}
SIZES: Mapping[str, str] = {
    "d": "the features of hidden states, or of a vector",
    "rows": "the outputs of a weight",
    "cols": "the inputs of a weight",
    "heads": "the heads of an attention's states",
    "d_head": "the features of a head; of keys and values, those of a key",
    "d_value": "the features of a head of values",
    "widest": "the most features that any site of the edit has there",
    "d_model": "the features of the residual stream",
    "sites": "the sites that have parameters in common",
    "site": "the number of this site among them, from 0",
    "layers": "the layers of these sites, and the modules outside of layers",
    "layer": "the number of this site's layer among them, from 0",
    "entries": "the entries of a weight, or of a vector",
}
PLACES: Mapping[str, str] = {  # where a form that asks for a size can stand
    **dict.fromkeys(("d", "heads", "d_head"), "a form of hidden states stands at `h`, as in `h += lora(x, r=8)`"),
    **dict.fromkeys(("rows", "cols"), "a form of weights stands at `w`, as in `w += lowrank(r=8)`"),
}


def owner_of(name: str) -> str:
    """An input of a form, or what its equation writes, in a message."""
    return "what the equation writes" if name == OUT else f"`{name}`"


def without_size(function: str, name: str, kind: str) -> str:
    """The message for a size that a state of another kind does not have."""
    return f"`{function}({name})` is {SIZES[function]}, but {owner_of(name)} is {kind}"


INITIAL_VALUES: Mapping[str, str] = {
    "zeros": "0",
    "ones": "1",
    "kaiming": "uniform in ±1/√(last size), as nn.Linear",
    "normal": "normal, normal(std) with a standard deviation other than 1",
    "truncated": "normal, cut at two deviations: truncated(std)",
    "uniform": "uniform in ±bound: uniform(bound)",
    "orthogonal": "orthonormal rows, or columns if there are more rows",
    "identity": "ones on the diagonal, identity(x) with x beside it",
    "signs": "1 or -1, each as likely",
    BUFFER: "0, of a `fixed` tensor that a command fills and an adapter keeps, as `peftc.fuse` does",
    PERMUTATION: "0, 1, … n - 1 in any order, of a `fixed` vector",
}


def function_of(param: ast.FormParam) -> str | None:
    """The function of which an argument is a call, `mlp` of `reparam = mlp(none)`.

    In the equation, the argument is the number in the call.
    """
    match param.default:
        case ast.Call(function, (ast.Name("none"),), ()):
            return function
        case _:
            return None


def words_of(form: ast.Form) -> dict[str, tuple[str, ...]]:
    """The words that an argument can be, by the argument; the default is among them.

    `init = bert` has the words `bert` and `lora` if a line has the condition `if init == lora`.
    """
    defaults = {param.name: param.default for param in form.params}
    words: dict[str, dict[str, None]] = {}
    functions = {part.function for value in values(form) for part in walk(value) if isinstance(part, ast.Call)}
    for name, default in defaults.items():
        if isinstance(default, ast.Name) and default.id in ACTIVATIONS and name in functions:
            words[name] = dict.fromkeys(ACTIVATIONS)
        elif default == ast.Name(NONE):
            words[name] = {NONE: None}
    for left, right in _equalities(form):
        if left.id in defaults and right.id not in defaults:
            default = defaults[left.id]
            first = [default.id] if isinstance(default, ast.Name) and default.id not in defaults else []
            words.setdefault(left.id, {}).update(dict.fromkeys((*first, right.id)))
    return {name: tuple(own) for name, own in words.items()}


def is_choice(form: ast.Form, name: str) -> bool:
    """Whether an argument is one of several words, not a number that may be missing."""
    return words_of(form).get(name, (NONE,)) != (NONE,)


def _equalities(form: ast.Form) -> Iterator[tuple[ast.Name, ast.Name]]:
    """The names that lines compare by `==` and `!=`, both ways round."""
    for line in form.body:
        comparisons = [line.condition] if line.condition is not None else []
        for one in (*comparisons, *([line] if isinstance(line, ast.Require) else [])):
            if one.op in ("==", "!=") and isinstance(one.left, ast.Name) and isinstance(one.right, ast.Name):
                yield one.left, one.right
                yield one.right, one.left
